"""Rows times a packed weight. A row has the same bits for any number of rows and threads.

A general matrix product chooses its kernel by the number of rows, and with it a row's last bits. These do not::

    PackedWeight   the compiled kernels: weights in bfloat16 (twelve bits in the AVX-512 build) or float32
    CodedWeight    the compiled kernels: quantized weights, decoded in registers
    CodesForInt8   the compiled kernels: rows are rounded to int8, and multiplied with codes of integers
    RoundedRows    the same without the kernels, with the same bits
    Dequantized    without the kernels: a quantized weight is dequantized for each product, some outputs at a time
    OneDnn         without the kernels: oneDNN's product on packed weights, without AMX
    SingleRows     a build of torch without oneDNN: torch's product of each row, in float32
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from enum import IntEnum
from types import ModuleType

import torch

from decant.engine.checkpoint.weight import CodeKind, Codes
from decant.engine.cpu import int8_rows
from decant.engine.cpu.huge_pages import Arena
from decant.engine.cpu.threads import all_for_torch, num_threads

Product = Callable[[torch.Tensor], torch.Tensor]
"""x [..., in] -> [..., out], both in the weight's dtype."""

PANEL = 16
"""Outputs that are interleaved in memory."""

_DEQUANTIZED = 1 << 22
"""Elements that are dequantized at once without the kernels."""

_WEIGHTS = Arena()


def prepare(
    weight: torch.Tensor, bias: torch.Tensor | None, kernels: ModuleType | None, arena: Arena = _WEIGHTS
) -> Product:
    """Return the product with copies of ``weight`` [out, in] and ``bias`` [out], in float32 or bfloat16.

    Kernels keep the weight in the ``arena``, whose memory is freed as a whole.
    """
    if kernels is not None:
        return PackedWeight(kernels, weight, bias, arena)
    return OneDnn(weight, bias) if torch.backends.mkldnn.is_available() else SingleRows(weight, bias)


def prepare_codes(
    codes: Codes,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    kernels: ModuleType | None,
    *,
    rounds_rows: bool = False,
) -> Product:
    """Return the product of rows in ``dtype`` with a copy of a quantized weight, whose ``order`` is the caller's task.

    A weight with groups that the kernels don't take is dequantized here, and takes the memory of a plain one. With
    ``rounds_rows``, rows are rounded to int8 where the weight's codes are integers in groups that the kernels take.
    """
    if rounds_rows and int8_rows.takes(codes):
        return int8_rows.RoundedRows(codes, bias) if kernels is None else CodesForInt8(kernels, codes, bias, dtype)
    if kernels is None:
        return Dequantized(codes, bias, dtype)
    if not codes.has_kernel_group:
        return prepare(codes.dequantize(dtype), bias, kernels)
    return CodedWeight(kernels, codes, bias, dtype)


class WeightForm(IntEnum):
    """As enum WeightForm in kernels/linear.h."""

    NUMBERS = 0
    CODES = 1
    CODES_FOR_INT8 = 2


class NativeWeight:
    """Weight in the memory of the compiled kernels."""

    form = WeightForm.NUMBERS

    def __init__(
        self, multiply: Callable[..., None], shape: torch.Size, dtype: torch.dtype, bias: torch.Tensor | None
    ) -> None:
        self.outputs, self.inner = shape
        if self.outputs % PANEL:
            raise ValueError(f"outputs: a multiple of {PANEL}, got {self.outputs}")
        if dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"weight: bfloat16 or float32, got {dtype}")
        if bias is not None and bias.shape != (self.outputs,):
            raise ValueError(f"bias: shape ({self.outputs},), got {tuple(bias.shape)}")
        self._multiply = multiply
        self._dtype, self._half = dtype, dtype == torch.bfloat16
        self._bias = None if bias is None else bias.detach().to(torch.float32, copy=True).contiguous()

    def _pack(self, pack: Callable[[int], int], arena: Arena = _WEIGHTS) -> None:
        """Call ``pack`` with the address of its memory, after one call with 0, which returns the bytes needed."""
        self._weight = arena.zeros((pack(0),), torch.uint8)
        pack(self._weight.data_ptr())
        self.addresses = self._weight.data_ptr(), 0 if self._bias is None else self._bias.data_ptr()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != self._dtype or x.shape[-1] != self.inner:
            raise ValueError(f"x: {self._dtype} [..., {self.inner}], got {x.dtype} {list(x.shape)}")
        x = x.contiguous()
        out = x.new_empty(*x.shape[:-1], self.outputs)
        rows, panels = x.numel() // self.inner, self.outputs // PANEL
        addresses = x.data_ptr(), *self.addresses, out.data_ptr()
        self._multiply(self._half, self.form, *addresses, rows, self.inner, panels, num_threads())
        return out


class PackedWeight(NativeWeight):
    def __init__(
        self, kernels: ModuleType, weight: torch.Tensor, bias: torch.Tensor | None, arena: Arena = _WEIGHTS
    ) -> None:
        super().__init__(kernels.multiply, weight.shape, weight.dtype, bias)
        weight = weight.detach().contiguous()
        self._pack(lambda to: kernels.pack(self._half, weight.data_ptr(), to, *weight.shape), arena)


_KINDS = {CodeKind.INT8: 1, CodeKind.INT4: 2, CodeKind.FP8: 3, CodeKind.E2M1: 4}
"""As enum CodeKind in codes.h."""

_FACTORS = {CodeKind.FP8: 256, CodeKind.E2M1: 0.5}
"""Of the scales: the kernels' numbers of fp8 are that much smaller, and those of e2m1 doubled."""


class CodedWeight(NativeWeight):
    form = WeightForm.CODES

    def __init__(self, kernels: ModuleType, codes: Codes, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(kernels.multiply, codes.shape, dtype, bias)
        scales = codes.scales * _FACTORS.get(codes.kind, 1)
        has_half_scales = torch.equal(scales.half().float(), scales)
        parts = (codes.codes, scales, codes.zeros, codes.mins)
        tensors = [None if part is None else part.contiguous() for part in parts]
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        kind, size = _KINDS[codes.kind], (*codes.shape, codes.group)
        for_int8 = self.form is WeightForm.CODES_FOR_INT8
        self._pack(lambda to: kernels.pack_codes(self._half, for_int8, kind, *addresses, has_half_scales, to, *size))


class CodesForInt8(CodedWeight):
    form = WeightForm.CODES_FOR_INT8


class Dequantized:
    def __init__(self, codes: Codes, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        codes = codes.without_e2m1()
        zeros, mins = (None if each is None else each.clone() for each in (codes.zeros, codes.mins))
        self._codes = replace(codes, codes=codes.codes.clone(), scales=codes.scales.clone(), zeros=zeros, mins=mins)
        self._dtype = dtype
        self._bias = None if bias is None else bias.detach().clone()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        outputs, inner = self._codes.shape
        out, step = x.new_empty(*x.shape[:-1], outputs), max(1, _DEQUANTIZED // inner)
        for first in range(0, outputs, step):
            rows = slice(first, first + step)
            weight = self._codes.dequantize(self._dtype, rows.start, rows.stop)
            out[..., rows] = prepare(weight, None if self._bias is None else self._bias[rows], None)(x)
        return out


class OneDnn:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._dtype, self._outputs = weight.dtype, len(weight)
        if weight.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            self._dtype = torch.float32
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach().to(self._dtype).contiguous(), None)
        self._bias = None if bias is None else bias.detach().to(self._dtype, copy=True)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1]).to(self._dtype)
        count = len(rows)
        if count == 0:
            return x.new_empty(*x.shape[:-1], self._outputs)
        if count == 1:  # a single row would take another kernel (float32, AVX512)
            rows = rows.expand(2, -1).contiguous()
        with all_for_torch():
            out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")
        return out[:count].to(x.dtype).view(*x.shape[:-1], -1)


class SingleRows:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight.detach().to(torch.float32, copy=True).contiguous()
        self._bias = None if bias is None else bias.detach().to(torch.float32, copy=True)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1]).float()
        out = rows.new_empty(len(rows), len(self._weight))
        for row, result in zip(rows, out, strict=True):
            torch.mv(self._weight, row, out=result)
        if self._bias is not None:
            out += self._bias
        return out.to(x.dtype).view(*x.shape[:-1], len(self._weight))
