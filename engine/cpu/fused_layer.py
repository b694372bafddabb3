"""Decoder layers in one compiled call: norm, attention, norm, gated MLP (engine/cpu/kernels/layer.h).

A layer is fused if in a trial it computes the same bits of outputs and blocks.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import TypeVar

import torch
from torch import nn

from decant.engine.cpu.attention import NativeAttention
from decant.engine.cpu.fused_ops import PROBE_SCALES, GatedMlp, RmsNorm
from decant.engine.cpu.gemm import NativeWeight
from decant.engine.cpu.linear import UNSUPPORTED_CALL, PackedLinear
from decant.engine.cpu.threads import num_threads
from decant.engine.kv_layout import LayerSpec
from decant.engine.model.attention.interface import AttentionCall, next_layer
from decant.engine.model.decoder_layer import (
    LINEARS,
    NORMS,
    Angles,
    Forward,
    FusedLayer,
    Trial,
    TrialResult,
    find_parts,
    head_width,
)

Layer = TypeVar("Layer", bound="NativeLayer")


class _Norm(ctypes.Structure):
    _fields_ = (("weight", ctypes.c_void_p), ("eps", ctypes.c_double))


class _Linear(ctypes.Structure):
    _fields_ = (
        *[(name, ctypes.c_void_p) for name in ("weight", "bias")],
        *[(name, ctypes.c_int64) for name in ("inner", "outputs", "form")],
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        *[(name, _Norm) for name in NORMS],
        *[(name, _Linear) for name in LINEARS],
        *[(name, ctypes.c_int64) for name in ("heads", "kv_heads", "width")],
        *[(name, ctypes.c_double) for name in ("scaling", "softcap")],
        ("number", ctypes.c_int64),
    )


class StepChanges:
    """Changes that adapters make in the running step; fused layers share one. As struct StepChanges in changes.h."""

    address = 0
    """0: none."""


NO_CHANGES = StepChanges()


class NativeLayer(FusedLayer[NativeAttention]):
    attention = NativeAttention
    changes: StepChanges = NO_CHANGES

    def __init__(self, kernels: ModuleType, original_forward: Forward, parts: _Parts, call: AttentionCall) -> None:
        super().__init__(original_forward, call)
        self._kernel = kernels.layers
        self._parts = parts  # keeps the memory that the kernel reads
        self.hidden = parts.weights[0].inner
        self._descriptor = _Layer(
            *[_Norm() if norm is None else _Norm(norm.weight.data_ptr(), norm.eps) for norm in parts.norms],
            *[_Linear(*weight.addresses, weight.inner, weight.outputs, weight.form) for weight in parts.weights],
            *(call.query.shape[1], call.key.shape[1], self.width),
            call.scaling,
            call.softcap or 0.0,
            0,
        )
        self._address = ctypes.addressof(self._descriptor)

    def take_changes(self, changes: StepChanges, number: int) -> None:
        """Compute with the step's ``changes``, in whose tables this layer has a ``number``."""
        self.changes = changes
        self._descriptor.number = number

    def _compute(self, hidden: torch.Tensor, angles: Angles, attention: NativeAttention) -> torch.Tensor:
        output = torch.empty_like(hidden)
        self._run([self], hidden, angles, attention, output)
        return output

    def _run(
        self,
        layers: Sequence[NativeLayer],
        hidden: torch.Tensor,
        angles: Angles,
        attention: NativeAttention,
        outputs: torch.Tensor,
    ) -> None:
        """Compute consecutive layers, this one first, into ``outputs`` [layers, *hidden.shape]."""
        calls = array("Q")  # as struct LayerCall in layer.h
        for index, layer in enumerate(layers, next_layer()):
            calls.extend((layer._address, *attention.addresses(index)))
        addresses = [tensor.data_ptr() for tensor in (hidden, *angles, outputs)]
        half, tokens = self.dtype == torch.bfloat16, hidden.shape[1]
        self._kernel(half, calls.buffer_info()[0], len(layers), *addresses, tokens, self.changes.address, num_threads())

    def _fits(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
        return super()._fits(hidden, cos, sin) and cos.is_contiguous() and sin.is_contiguous()


class _Parts:
    def __init__(self, module: nn.Module) -> None:
        if not any(isinstance(child, GatedMlp) for child in module.children()):
            raise LookupError("no gated MLP")
        norms, linears = find_parts(module)
        self.norms = [_norm(part) for part in norms]
        self.weights = [_packed_weight(part) for part in linears]
        self._check()

    def _check(self) -> None:
        query, key, value, out, gate, up, down = self.weights
        before, _, _, after = self.norms
        assert before is not None
        assert after is not None
        equal = (
            {before.width, query.inner, key.inner, value.inner, out.outputs},
            {after.width, gate.inner, up.inner, down.outputs, out.outputs},
            {gate.outputs, up.outputs, down.inner},
            {query.outputs, out.inner},
            {key.outputs, value.outputs},
        )
        if any(len(widths) > 1 for widths in equal):
            raise LookupError("widths that do not fit")

    def has_heads_of(self, width: int) -> bool:
        query, key = self.weights[:2]
        fits = width > 0 and not query.outputs % width and not key.outputs % width
        return fits and all(norm is None or norm.width == width for norm in self.norms[1:3])


def _norm(part: nn.Module | None) -> RmsNorm | None:
    if part is not None and not isinstance(part, RmsNorm):
        raise LookupError("another kind of norm")
    return part


def _packed_weight(part: nn.Module) -> NativeWeight:
    weight = part.packed_weight if isinstance(part, PackedLinear) else None
    if weight is None:
        raise LookupError("another kind of linear layer")
    return weight


def fuse(model: nn.Module, dtype: torch.dtype, kernels: ModuleType, kind: type[Layer]) -> list[Layer]:
    """Fuse every layer that passes the trial, in the model's order. Call it after ``fused_ops.fuse``."""
    layers = []
    for module in model.modules():
        try:
            parts = _Parts(module)
        except LookupError:
            continue
        if (layer := _fused(module, parts, dtype, kernels, kind)) is not None:
            module.forward = layer
            layers.append(layer)
    return layers


def fused_layers(model: nn.Module) -> list[tuple[nn.Module, NativeLayer]]:
    return [(module, module.forward) for module in model.modules() if isinstance(module.forward, NativeLayer)]


def unfuse(model: nn.Module) -> list[tuple[nn.Module, NativeLayer]]:
    """Restore the original forwards; ``module.forward = layer`` fuses a returned one again."""
    layers = fused_layers(model)
    for module, layer in layers:
        module.forward = layer.original_forward
    return layers


def _fused(
    module: nn.Module, parts: _Parts, dtype: torch.dtype, kernels: ModuleType, kind: type[Layer]
) -> Layer | None:
    key, width = parts.weights[1], head_width(module)
    if not parts.has_heads_of(width):
        return None
    spec, make_attention = LayerSpec(key.outputs // width, width, width), partial(NativeAttention, kernels)
    trial = Trial(PROBE_SCALES, key.inner, spec, make_attention, dtype, torch.device("cpu"))
    make = partial(kind, kernels, module.forward, parts)
    return trial.fuse(module.forward, make, _has_same_bits, UNSUPPORTED_CALL)


def _has_same_bits(actual: TrialResult, expected: TrialResult) -> bool:
    return torch.equal(actual.output, expected.output) and torch.equal(actual.blocks, expected.blocks)
