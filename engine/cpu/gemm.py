"""Rows times a packed weight. A row has the same bits for any number of rows and threads.

A general matrix product chooses its kernel by the number of rows, and with it a row's last bits. These do not::

    PackedWeight   the compiled kernels: weights in bfloat16 (twelve bits in the AVX-512 build) or float32
    OneDnn         without the kernels: oneDNN's product on packed weights, without AMX
    SingleRows     a build of torch without oneDNN: torch's product of each row, in float32
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch

from decant.engine.cpu.huge_pages import Arena
from decant.engine.cpu.threads import all_for_torch, num_threads

Product = Callable[[torch.Tensor], torch.Tensor]
"""x [..., in] -> [..., out], both in the weight's dtype."""

PANEL = 16
"""Outputs that are interleaved in memory."""

_WEIGHTS = Arena()


def prepare(weight: torch.Tensor, bias: torch.Tensor | None, kernels: ModuleType | None) -> Product:
    """Return the product with copies of ``weight`` [out, in] and ``bias`` [out], in float32 or bfloat16."""
    if kernels is not None:
        return PackedWeight(kernels, weight, bias)
    return OneDnn(weight, bias) if torch.backends.mkldnn.is_available() else SingleRows(weight, bias)


class PackedWeight:
    def __init__(self, kernels: ModuleType, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.outputs, self.inner = weight.shape
        if self.outputs % PANEL:
            raise ValueError(f"outputs: a multiple of {PANEL}, got {self.outputs}")
        self._multiply = kernels.multiply
        if weight.dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"weight: bfloat16 or float32, got {weight.dtype}")
        if bias is not None and bias.shape != (self.outputs,):
            raise ValueError(f"bias: shape ({self.outputs},), got {tuple(bias.shape)}")
        self._dtype, self._half = weight.dtype, weight.dtype == torch.bfloat16
        weight = weight.detach().contiguous()
        needed = kernels.pack(self._half, weight.data_ptr(), 0, *weight.shape)
        self._weight = _WEIGHTS.zeros((needed,), torch.uint8)
        kernels.pack(self._half, weight.data_ptr(), self._weight.data_ptr(), *weight.shape)
        self._bias = None if bias is None else bias.detach().to(torch.float32, copy=True).contiguous()
        self.addresses = self._weight.data_ptr(), 0 if self._bias is None else self._bias.data_ptr()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != self._dtype or x.shape[-1] != self.inner:
            raise ValueError(f"x: {self._dtype} [..., {self.inner}], got {x.dtype} {list(x.shape)}")
        x = x.contiguous()
        out = x.new_empty(*x.shape[:-1], self.outputs)
        rows, panels = x.numel() // self.inner, self.outputs // PANEL
        addresses = x.data_ptr(), *self.addresses, out.data_ptr()
        self._multiply(self._half, *addresses, rows, self.inner, panels, num_threads())
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
