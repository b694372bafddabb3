"""Decoder layers whose operations between the products are Triton kernels.

    transformers   norm -> q, k, v -> rotate -> write -> attend -> o -> add -> norm -> gate, up -> silu -> * -> down
    here           norm -> q, k, v -> rotate and write -> attend -> o -> add and norm -> gate, up -> gate -> down

A layer is fused if in a trial its outputs and blocks are close to those of transformers.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from decant.engine.cuda import layer_kernels as kernels
from decant.engine.cuda.attention import TILE, TritonAttention, power_of_two
from decant.engine.kv_layout import LayerSpec
from decant.engine.model.attention.interface import AttentionCall, next_layer
from decant.engine.model.decoder_layer import Angles, Forward, FusedLayer, Trial, TrialResult, find_parts, head_width

GATE_TILE = 1024

UNSUPPORTED_CALL = (TypeError, ValueError, AttributeError)
"""Raised by layers that take other arguments or have heads of another shape. A RuntimeError may be of a launch."""

WIDEST = 1 << 14

TOLERANCE = {torch.bfloat16: 4e-2, torch.float16: 4e-3, torch.float32: 1e-4}
"""Relative to the norm of what the layer adds to a row."""

TRIAL_SCALES = (1e-2, 0.1, 1.0)


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
            *(rows, addend, self.weight, total, out, width, self.eps),
            ADD=total is not rows,
            PAD=power_of_two(width),
            num_warps=4,
            num_stages=3,
        )
        return out


def gated(gates: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Compute silu(gates) * up, both [n, width] and contiguous."""
    out, count = torch.empty_like(gates), gates.numel()
    kernels.gate[(-(-count // GATE_TILE),)](gates, up, out, count, TILE=GATE_TILE, num_warps=4, num_stages=3)
    return out


class TritonLayer(FusedLayer[TritonAttention]):
    attention = TritonAttention

    def __init__(self, original_forward: Forward, parts: Parts, call: AttentionCall) -> None:
        super().__init__(original_forward, call)
        self._parts = parts
        self._call = call._replace(query=call.query[:, :, :0], key=call.key[:, :, :0], value=call.value[:, :, :0])

    def _compute(self, hidden: torch.Tensor, angles: Angles, attention: TritonAttention) -> torch.Tensor:
        before, query_norm, key_norm, after = self._parts.norms
        query, key, value, out, gate, up, down = self._parts.linears
        assert before is not None
        assert after is not None
        rows = hidden[0]
        normalized = before(rows)
        call = self._call._replace(
            layer=next_layer(),
            query=self._heads(query(normalized), query_norm),
            key=self._heads(key(normalized), key_norm),
            value=self._heads(value(normalized), None),
        )
        mixed = out(attention.attend_rotated(call, *angles)[0].flatten(1))
        total, normalized = after.add(rows, mixed)
        added: torch.Tensor = down(gated(gate(normalized), up(normalized)))
        return (total + added)[None]

    def _heads(self, rows: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        heads: torch.Tensor = rows.unflatten(1, (-1, self.width))
        if norm is not None:
            heads = norm(heads.flatten(0, 1)).view_as(heads)
        return heads.transpose(0, 1)[None]


class Parts:
    def __init__(self, module: nn.Module) -> None:
        norms, linears = find_parts(module)
        self.norms = [find_norm(part) for part in norms]
        self.linears = [_linear(part) for part in linears]
        self.hidden = self.linears[0].in_features
        self.width = head_width(module)
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


def _try_layer(original_forward: Forward, parts: Parts, dtype: torch.dtype) -> TritonLayer | None:
    spec = LayerSpec(parts.linears[1].out_features // parts.width, parts.width, parts.width)
    trial = Trial(TRIAL_SCALES, parts.hidden, spec, TritonAttention, dtype, parts.linears[0].weight.device)
    trial.block_size = TILE  # a model with blocks of another size compiles again
    tolerance = TOLERANCE[dtype]

    def agrees(actual: TrialResult, expected: TrialResult) -> bool:
        added = _is_close(actual.output - trial.rows, expected.output - trial.rows, tolerance)
        return added and _is_close(actual.blocks, expected.blocks, tolerance)

    return trial.fuse(original_forward, partial(TritonLayer, original_forward, parts), agrees, UNSUPPORTED_CALL)


def _is_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    difference = (actual.double() - expected.double()).norm(dim=-1)
    return bool((difference <= tolerance * expected.double().norm(dim=-1)).all())
