"""Decoder layers whose operations between the products are Triton kernels.

    transformers   norm -> q, k, v -> rotate -> write -> attend -> o -> add -> norm -> gate, up -> silu -> * -> down
    here           norm -> q, k, v -> rotate and write -> attend -> o -> add and norm -> gate, up -> gate -> down

Layers with the expected parts are fused if a trial agrees. The new ``forward`` passes calls that it does not support
to the original.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from decant.engine.cuda import layer_kernels as kernels
from decant.engine.cuda.attention import TritonAttention, power_of_two
from decant.engine.kv_layout import KvLayout, LayerSpec
from decant.engine.model.attention.interface import AttentionBackend, AttentionCall, attending, current, next_layer
from decant.engine.model.attention.masks import AttentionWindow
from decant.engine.model.kv_store import KvStore
from decant.engine.model.step_batch import flatten
from decant.engine.plan import Row
from decant.engine.request import Request

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NORMS = ("input_layernorm", "post_attention_layernorm", "q_norm", "k_norm")
OPTIONAL = ("q_norm", "k_norm")

GATE_TILE = 1024

WIDEST = 1 << 14

TOLERANCE = {torch.bfloat16: 4e-2, torch.float16: 4e-3, torch.float32: 1e-4}
"""Relative to the norm of what the layer adds to a row."""

TRIAL_SCALES = (1e-2, 0.1, 1.0)
TRIAL_BLOCK = 16
TRIAL_POSITION = 1 << 20
"""A layer that scales distant tokens must fail the trial."""

Forward = Callable[..., Any]


class Norm(NamedTuple):
    weight: torch.Tensor
    eps: float

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self._run(rows, rows, rows)

    def add(self, rows: torch.Tensor, addend: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = torch.empty_like(rows)
        return total, self._run(rows, addend, total)

    def _run(self, rows: torch.Tensor, addend: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        out, width = torch.empty_like(rows), rows.shape[1]
        kernels.add_rms_norm[(len(rows),)](
            *(rows, addend, self.weight, total, out, width, self.eps), ADD=total is not rows, PAD=power_of_two(width)
        )
        return out


def gated(gates: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Compute silu(gates) * up, both [n, width] and contiguous."""
    out, count = torch.empty_like(gates), gates.numel()
    kernels.gate[(-(-count // GATE_TILE),)](gates, up, out, count, TILE=GATE_TILE)
    return out


class FusedLayer:
    def __init__(self, original_forward: Forward, parts: Parts, call: AttentionCall) -> None:
        self.original_forward = original_forward
        self._parts = parts
        self._call = call._replace(query=call.query[:, :, :0], key=call.key[:, :, :0], value=call.value[:, :, :0])
        self.dtype, self.width = call.query.dtype, call.query.shape[3]

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        attention, angles = current(), kwargs.get("position_embeddings")
        if (
            args
            or angles is None
            or kwargs.get("past_key_values") is not None
            or not isinstance(attention, TritonAttention)
            or not self._fits(hidden_states, *angles)
        ):
            return self.original_forward(hidden_states, *args, **kwargs)
        return self._compute(hidden_states[0], angles, attention)[None]

    def _fits(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
        return (
            len(hidden) == 1
            and hidden.is_contiguous()
            and cos.shape == sin.shape == (1, hidden.shape[1], self.width)
            and hidden.dtype == cos.dtype == sin.dtype == self.dtype
        )

    def _compute(
        self, hidden: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], attention: TritonAttention
    ) -> torch.Tensor:
        parts = self._parts
        before, after, query_norm, key_norm = parts.norms
        query, key, value, out, gate, up, down = parts.linears
        assert before is not None
        assert after is not None
        normalized = before(hidden)
        call = self._call._replace(
            layer=next_layer(),
            query=self._heads(query(normalized), query_norm),
            key=self._heads(key(normalized), key_norm),
            value=self._heads(value(normalized), None),
        )
        mixed = out(attention.attend_rotated(call, *angles)[0].flatten(1))
        total, normalized = after.add(hidden, mixed)
        added = down(gated(gate(normalized), up(normalized)))
        result: torch.Tensor = total + added
        return result

    def _heads(self, rows: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        heads: torch.Tensor = rows.unflatten(1, (-1, self.width))
        if norm is not None:
            heads = norm(heads.flatten(0, 1)).view_as(heads)
        return heads.transpose(0, 1)[None]


class Parts:
    def __init__(self, module: nn.Module) -> None:
        children = dict(module.named_children())
        parts = {name: part for child in children.values() for name, part in child.named_children()} | children
        self.norms = [find_norm(parts.get(name) if name in OPTIONAL else parts[name]) for name in NORMS]
        self.linears = [_linear(parts[name]) for name in LINEARS]
        self.hidden = self.linears[0].in_features
        widths: list[Any] = [getattr(part, "head_dim", None) for part in children.values()]
        self.width = next((width for width in widths if isinstance(width, int)), 0)
        if self.width < 2 or self.width % 2 or self.linears[1].out_features % self.width or self.hidden > WIDEST:
            raise LookupError("no heads of a width that can be rotated")


def find_norm(part: nn.Module | None) -> Norm | None:
    if part is None:
        return None
    eps: Any = getattr(part, "variance_epsilon", getattr(part, "eps", None))
    own = dict(part.named_parameters())
    if not isinstance(eps, float) or own.keys() != {"weight"} or own["weight"].dim() != 1:
        raise LookupError("another kind of norm")
    return Norm(own["weight"].detach().contiguous(), eps)


def _linear(part: nn.Module) -> nn.Linear:
    if type(part) is not nn.Linear:
        raise LookupError("another kind of linear layer")
    return part


def fuse(model: nn.Module, dtype: torch.dtype) -> int:
    """Fuse the layers that pass the trial and return their number. Raises what a launch raises, with none fused."""
    layers = []
    for module in model.modules():
        try:
            parts = Parts(module)
        except LookupError:
            continue
        if (layer := _try_layer(module.forward, parts, dtype)) is not None:
            layers.append((module, layer))
    for module, layer in layers:  # none, if a launch raised
        module.forward = layer
    return len(layers)


class _RecordingAttention:
    def __init__(self, attention: AttentionBackend) -> None:
        self._attention = attention
        self.call: AttentionCall | None = None

    def attend(self, call: AttentionCall) -> torch.Tensor:
        self.call = call
        return self._attention.attend(call)


class _Trial:
    def __init__(self, parts: Parts, dtype: torch.dtype) -> None:
        count, generator = len(TRIAL_SCALES), torch.Generator().manual_seed(0)
        self._device = parts.linears[0].weight.device
        rows = torch.randn(1, count, parts.hidden, generator=generator) * torch.tensor(TRIAL_SCALES)[:, None]
        self.rows = rows.to(self._device, dtype)
        angles = [torch.randn(1, count, parts.width, generator=generator) for _ in range(2)]
        self._angles = tuple(part.to(self._device, dtype) for part in angles)
        self._positions = TRIAL_POSITION + torch.arange(count, device=self._device)[None]
        spec = LayerSpec(parts.linears[1].out_features // parts.width, parts.width, parts.width)
        self._layout = KvLayout((spec,), TRIAL_BLOCK, dtype.itemsize)
        tokens = list(range(count))
        self._step = [Row(Request("trial", tuple(tokens)), tokens, 0, count, (array("i", [0]),), True)]

    def run(self, forward: Forward) -> tuple[torch.Tensor, torch.Tensor, AttentionCall | None]:
        store = KvStore(self._layout, 1, self.rows.dtype, self._device)
        attention = TritonAttention(store, [AttentionWindow()], flatten(self._step, TRIAL_BLOCK, store.null_block))
        recording = _RecordingAttention(attention)
        kwargs = {"attention_mask": None, "position_ids": self._positions, "position_embeddings": self._angles}
        with attending(attention if isinstance(forward, FusedLayer) else recording):
            output = forward(self.rows, **kwargs, use_cache=False)
        return output, store.blocks, recording.call


@torch.inference_mode()
def _try_layer(original_forward: Forward, parts: Parts, dtype: torch.dtype) -> FusedLayer | None:
    trial = _Trial(parts, dtype)
    try:
        expected, expected_blocks, call = trial.run(original_forward)
    except (TypeError, ValueError, AttributeError):  # it takes other arguments, or its heads have another shape
        return None
    if not isinstance(expected, torch.Tensor) or call is None or call.sinks is not None:
        return None
    layer = FusedLayer(original_forward, parts, call)
    output, blocks, _ = trial.run(layer)
    pairs = ((output - trial.rows, expected - trial.rows), (blocks, expected_blocks))
    for actual, expected in pairs:
        difference = (actual.double() - expected.double()).norm(dim=-1)
        if not bool((difference <= TOLERANCE[dtype] * expected.double().norm(dim=-1)).all()):
            return None
    return layer
