"""Decoder layers in one compiled call: norm, attention, norm, gated MLP (engine/cpu/kernels/layer.h).

A layer is fused if it has the expected parts and in a trial computes the same bits of outputs and blocks. Its new
``forward`` passes calls that the kernel does not support to the original.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import nn

from decant.engine.cpu.attention import NativeAttention
from decant.engine.cpu.fused_ops import PROBE_SCALES, GatedMlp, RmsNorm
from decant.engine.cpu.gemm import PackedWeight
from decant.engine.cpu.linear import UNSUPPORTED_CALL, PackedLinear
from decant.engine.cpu.threads import num_threads
from decant.engine.kv_layout import KvLayout, LayerSpec
from decant.engine.model.attention.interface import AttentionBackend, AttentionCall, attending, current, next_layer
from decant.engine.model.attention.masks import AttentionWindow
from decant.engine.model.kv_store import KvStore
from decant.engine.model.step_batch import flatten
from decant.engine.plan import Row
from decant.engine.request import Request

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NORMS = ("input_layernorm", "q_norm", "k_norm", "post_attention_layernorm")
OPTIONAL = ("q_norm", "k_norm")

TRIAL_BLOCK = 16
PROBE_POSITION = 1 << 20
"""First position of a trial: a layer that scales distant tokens differs."""

Forward = Callable[..., Any]
Angles = tuple[torch.Tensor, torch.Tensor]
"""cos and sin [1, T, head width]."""

Layer = TypeVar("Layer", bound="FusedLayer")


class _Norm(ctypes.Structure):
    _fields_ = (("weight", ctypes.c_void_p), ("eps", ctypes.c_double))


class _Linear(ctypes.Structure):
    _fields_ = (
        *[(name, ctypes.c_void_p) for name in ("weight", "bias")],
        *[(name, ctypes.c_int64) for name in ("inner", "outputs")],
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        *[(name, _Norm) for name in NORMS],
        *[(name, _Linear) for name in LINEARS],
        *[(name, ctypes.c_int64) for name in ("heads", "kv_heads", "width")],
        *[(name, ctypes.c_double) for name in ("scaling", "softcap")],
    )


class FusedLayer:
    def __init__(self, kernels: ModuleType, original_forward: Forward, parts: _Parts, call: AttentionCall) -> None:
        self._kernel = kernels.layers
        self.original_forward = original_forward
        self._parts = parts  # keeps the memory that the kernel reads
        self.dtype, self.width, self.hidden = call.query.dtype, call.query.shape[3], parts.weights[0].inner
        self._descriptor = _Layer(
            *[_Norm() if norm is None else _Norm(norm.weight.data_ptr(), norm.eps) for norm in parts.norms],
            *[_Linear(*weight.addresses, weight.inner, weight.outputs) for weight in parts.weights],
            *(call.query.shape[1], call.key.shape[1], self.width),
            call.scaling,
            call.softcap or 0.0,
        )
        self._address = ctypes.addressof(self._descriptor)

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        attention, angles = current(), kwargs.get("position_embeddings")
        if (
            args
            or angles is None
            or kwargs.get("past_key_values") is not None
            or not isinstance(attention, NativeAttention)
            or not self._fits(hidden_states, *angles)
        ):
            return self.original_forward(hidden_states, *args, **kwargs)
        return self._compute(hidden_states, angles, attention)

    def _compute(self, hidden: torch.Tensor, angles: Angles, attention: NativeAttention) -> torch.Tensor:
        output = torch.empty_like(hidden)
        self._run([self], hidden, angles, attention, output)
        return output

    def _run(
        self,
        layers: Sequence[FusedLayer],
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
        self._kernel(half, calls.buffer_info()[0], len(layers), *addresses, tokens, num_threads())

    def _fits(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
        return (
            len(hidden) == 1
            and cos.shape == sin.shape == (1, hidden.shape[1], self.width)
            and hidden.dtype == cos.dtype == sin.dtype == self.dtype
            and hidden.is_contiguous()
            and cos.is_contiguous()
            and sin.is_contiguous()
        )


class _Parts:
    def __init__(self, module: nn.Module) -> None:
        children = dict(module.named_children())
        parts = {name: part for child in children.values() for name, part in child.named_children()} | children
        if not any(isinstance(child, GatedMlp) for child in children.values()):
            raise LookupError("no gated MLP")
        self.norms = [_norm(parts.get(name) if name in OPTIONAL else parts[name]) for name in NORMS]
        self.weights = [_packed_weight(parts[name]) for name in LINEARS]
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


def _packed_weight(part: nn.Module) -> PackedWeight:
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


def fused_layers(model: nn.Module) -> list[tuple[nn.Module, FusedLayer]]:
    return [(module, module.forward) for module in model.modules() if isinstance(module.forward, FusedLayer)]


def unfuse(model: nn.Module) -> list[tuple[nn.Module, FusedLayer]]:
    """Restore the original forwards; ``module.forward = layer`` fuses a returned one again."""
    layers = fused_layers(model)
    for module, layer in layers:
        module.forward = layer.original_forward
    return layers


class _RecordingAttention:
    def __init__(self, attention: AttentionBackend, spec: LayerSpec) -> None:
        self._attention = attention
        self._spec = spec
        self.call: AttentionCall | None = None

    def attend(self, call: AttentionCall) -> torch.Tensor:
        spec = self._spec
        widths = call.query.shape[3], call.key.shape[3], call.value.shape[3]
        if widths != (spec.key_dim, spec.key_dim, spec.value_dim):
            raise ValueError("heads of another width")
        if not call.key.shape[1] == call.value.shape[1] == spec.kv_heads or call.query.shape[1] % spec.kv_heads:
            raise ValueError("another number of heads")
        self.call = call
        return self._attention.attend(call)


class _Trial:
    def __init__(self, kernels: ModuleType, hidden: int, kv_heads: int, width: int, dtype: torch.dtype) -> None:
        self._kernels = kernels
        count = len(PROBE_SCALES)
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(1, count, hidden, generator=generator) * torch.tensor(PROBE_SCALES)[:, None]
        self._rows = rows.to(dtype)
        self._angles = tuple(torch.randn(1, count, width, generator=generator).to(dtype) for _ in range(2))
        self._positions = PROBE_POSITION + torch.arange(count)[None]
        self._spec = LayerSpec(kv_heads, width, width)
        self._layout = KvLayout((self._spec,), TRIAL_BLOCK, dtype.itemsize)
        tokens = list(range(count))
        self._step = [Row(Request("trial", tuple(tokens)), tokens, 0, count, (array("i", [0]),), True)]

    def run(self, forward: Forward) -> tuple[torch.Tensor, torch.Tensor, AttentionCall | None]:
        store = KvStore(self._layout, 1, self._rows.dtype, self._rows.device)
        flat = flatten(self._step, TRIAL_BLOCK, store.null_block)
        native = NativeAttention(self._kernels, store, [AttentionWindow()], flat)
        recording = _RecordingAttention(native, self._spec)
        kwargs = {"attention_mask": None, "position_ids": self._positions, "position_embeddings": self._angles}
        with attending(native if isinstance(forward, FusedLayer) else recording):
            output = forward(self._rows, **kwargs, use_cache=False)
        return output, store.blocks, recording.call


@torch.inference_mode()
def _fused(
    module: nn.Module, parts: _Parts, dtype: torch.dtype, kernels: ModuleType, kind: type[Layer]
) -> Layer | None:
    original_forward, key = module.forward, parts.weights[1]
    widths: list[Any] = [getattr(part, "head_dim", None) for part in module.children()]
    width = next((width for width in widths if isinstance(width, int)), 0)
    if not parts.has_heads_of(width):
        return None
    trial = _Trial(kernels, key.inner, key.outputs // width, width, dtype)
    try:
        expected, expected_blocks, call = trial.run(original_forward)
    except UNSUPPORTED_CALL:
        return None
    if not isinstance(expected, torch.Tensor) or call is None or call.sinks is not None:
        return None
    layer = kind(kernels, original_forward, parts, call)
    output, blocks, _ = trial.run(layer)
    return layer if torch.equal(output, expected) and torch.equal(blocks, expected_blocks) else None
