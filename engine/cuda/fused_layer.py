"""Decoder layers whose operations between the products are Triton kernels.

    transformers   norm, q, k, v, rotate, write, attend, o, add, norm, gate, up, silu, *, down, add
    here           norm, qkv, rotate and write, attend, o, add and norm, gate and up, gated, down and add

Weights that multiply the same rows are parts of one tensor. A layer is fused if in a trial its outputs and blocks are
close to those of transformers, and a norm outside of such layers, or the angles of all, if its output is.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from decant.engine.cuda import layer_kernels as kernels
from decant.engine.cuda.attention import TILE, TritonAttention, power_of_two
from decant.engine.cuda.coded_product import CodedProduct, merge_products
from decant.engine.cuda.dependent_launch import dependent_options
from decant.engine.cuda.rotary import try_rotary
from decant.engine.cuda.skinny import is_skinny, multiply
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

Linear = nn.Linear | CodedProduct


class Norm(NamedTuple):
    weight: torch.Tensor
    eps: float

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self._run(rows[:, None], rows, rows)

    def add(self, rows: torch.Tensor, addend: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = torch.empty_like(rows)
        return total, self._run(rows[:, None], addend, total)

    def heads(self, heads: torch.Tensor) -> torch.Tensor:
        """Normalize heads [T, heads, width], which may have a stride between tokens."""
        return self._run(heads, heads, heads)

    def _run(self, rows: torch.Tensor, addend: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        count, heads, width = rows.shape
        out = torch.empty(total.shape, dtype=total.dtype, device=total.device)
        kernels.add_rms_norm[(count * heads,)](
            *(rows, addend, self.weight, total, out, width, heads, rows.stride(0), self.eps),
            ADD=addend is not total,
            PAD=power_of_two(width),
            **dependent_options(rows.device),
            num_warps=4,
            num_stages=3,
        )
        return out


class NormForward:
    """Forward of a norm."""

    def __init__(self, norm: Norm) -> None:
        self._norm = norm

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        rows = hidden_states.reshape(-1, hidden_states.shape[-1]).contiguous()
        return self._norm(rows).view(hidden_states.shape)


@torch.inference_mode()
def try_norm(module: nn.Module, dtype: torch.dtype) -> NormForward | None:
    """Return a forward of the module if it is a norm that the kernel computes."""
    try:
        norm = find_norm(module)
    except LookupError:
        return None
    width = 0 if norm is None else len(norm.weight)
    if norm is None or not 0 < width <= WIDEST:
        return None
    rows = torch.randn(len(TRIAL_SCALES), width, generator=torch.Generator().manual_seed(0)).to(norm.weight.device)
    forward = NormForward(norm)
    for kind in {torch.float32, dtype}:  # in float32, a weight of 41 and one of 40 relative to one differ
        if not _is_close(forward(rows.to(kind)), module(rows.to(kind)), TOLERANCE[kind]):
            return None
    return forward


def gated(pairs: torch.Tensor) -> torch.Tensor:
    """Compute silu(gates) * up [n, width] of both, [n, 2 * width] and contiguous."""
    count, width = len(pairs), pairs.shape[1] // 2
    out = pairs.new_empty(count, width)
    kernels.gate[(count, -(-width // GATE_TILE))](pairs, out, width, TILE=GATE_TILE, num_warps=4, num_stages=3)
    return out


class TritonLayer(FusedLayer[TritonAttention]):
    attention = TritonAttention

    def __init__(self, original_forward: Forward, parts: Parts, call: AttentionCall) -> None:
        super().__init__(original_forward, call)
        self._parts = parts
        self._call = call._replace(query=call.query[:, :, :0], key=call.key[:, :, :0], value=call.value[:, :, :0])

    @property
    def merged(self) -> tuple[Linear, Linear]:
        """Products that are no modules of the model."""
        return self._parts.qkv, self._parts.gate_up

    def _compute(self, hidden: torch.Tensor, angles: Angles, attention: TritonAttention) -> torch.Tensor:
        parts = self._parts
        before, query_norm, key_norm, after = parts.norms
        assert before is not None
        assert after is not None
        rows = hidden[0]
        heads = _product(parts.qkv, before(rows)).unflatten(1, (-1, self.width))
        query, key, value = heads.split(parts.heads, 1)
        call = self._call._replace(
            layer=next_layer(),
            query=_normalized(query, query_norm),
            key=_normalized(key, key_norm),
            value=_normalized(value, None),
        )
        mixed = attention.attend_rotated(call, *angles)[0].flatten(1)
        total, normalized = after.add(rows, _product(parts.out, mixed))
        return _add_product(total, parts.down, _gated_product(parts.gate_up, normalized))[None]


def _product(linear: Linear, rows: torch.Tensor) -> torch.Tensor:
    if isinstance(linear, nn.Linear) and is_skinny(linear, rows):
        return multiply(linear, rows)
    product: torch.Tensor = linear(rows)
    return product


def _gated_product(linear: Linear, rows: torch.Tensor) -> torch.Tensor:
    if isinstance(linear, nn.Linear) and is_skinny(linear, rows):
        return multiply(linear, rows, is_gated=True)
    return gated(linear(rows))


def _add_product(total: torch.Tensor, linear: Linear, rows: torch.Tensor) -> torch.Tensor:
    """total + linear(rows), which may change the total."""
    if isinstance(linear, nn.Linear):
        if is_skinny(linear, rows):
            return multiply(linear, rows, total)
        if _adds(linear):
            return total.addmm_(rows, linear.weight.t())
    product: torch.Tensor = linear(rows)
    return total + product


def _normalized(heads: torch.Tensor, norm: Norm | None) -> torch.Tensor:
    """[1, heads, T, width] of [T, heads, width]."""
    return (heads if norm is None else norm.heads(heads)).transpose(0, 1)[None]


def _adds(linear: nn.Linear) -> bool:
    """Whether torch's product can add to another tensor: not with a bias, and not if another forward computes it."""
    bias: torch.Tensor | None = linear.bias  # torch declares a tensor
    return bias is None and "forward" not in vars(linear)


class Parts:
    """Parts of a layer. Making them moves weights of the module into one tensor for each product."""

    def __init__(self, module: nn.Module) -> None:
        norms, linears = find_parts(module)
        self.norms = [find_norm(part) for part in norms]
        query, key, value, self.out, gate, up, self.down = (_linear(part) for part in linears)
        self.hidden = query.in_features
        self.width = head_width(module)
        outputs = [linear.out_features for linear in (query, key, value)]
        if self.width < 2 or self.width % 2 or outputs[1] % self.width or self.hidden > WIDEST:
            raise LookupError("no heads of a width that can be rotated")
        if any(count % self.width for count in outputs) or gate.out_features != up.out_features:
            raise LookupError("heads of different widths, or other products")
        self.heads = [count // self.width for count in outputs]
        self.qkv, self.gate_up = _merged((query, key, value)), _merged((gate, up))

    @property
    def device(self) -> torch.device:
        before = self.norms[0]
        assert before is not None
        return before.weight.device

    @property
    def spec(self) -> LayerSpec:
        return LayerSpec(self.heads[1], self.width, self.width)


def _merged(parts: Sequence[Linear]) -> Linear:
    linears = [part for part in parts if isinstance(part, nn.Linear)]
    products = [part for part in parts if isinstance(part, CodedProduct)]
    if linears and products:
        raise LookupError("products of different kinds")
    return merge_linears(linears) if linears else merge_products(products)


@torch.inference_mode(False)
def merge_linears(linears: Sequence[nn.Linear]) -> nn.Linear:
    """Return one product for all; their weights and biases become parts of its. Raises LookupError."""
    first = linears[0]
    shapes = {(linear.in_features, linear.weight.dtype, linear.bias is None) for linear in linears}
    if len(shapes) > 1 or any("forward" in vars(linear) for linear in linears):
        raise LookupError("products of different kinds")
    columns = [linear.out_features for linear in linears]
    merged = nn.Linear(first.in_features, sum(columns), bias=first.bias is not None, device="meta")
    for name in ("weight", "bias"):
        owned = [getattr(linear, name) for linear in linears]
        if owned[0] is None:
            continue
        together = torch.cat([one.detach() for one in owned])
        setattr(merged, name, nn.Parameter(together, requires_grad=False))
        for linear, part in zip(linears, together.split(columns), strict=True):
            setattr(linear, name, nn.Parameter(part, requires_grad=False))
    return merged


def find_norm(part: nn.Module | None) -> Norm | None:
    if part is None:
        return None
    eps: Any = getattr(part, "variance_epsilon", getattr(part, "eps", None))
    own = dict(part.named_parameters())
    if not isinstance(eps, float) or own.keys() != {"weight"} or own["weight"].dim() != 1:
        raise LookupError("another kind of norm")
    return Norm(own["weight"].detach().contiguous(), eps)


def _linear(part: nn.Module) -> Linear:
    if isinstance(part, CodedProduct) or type(part) is nn.Linear:
        return part
    raise LookupError("another kind of linear layer")


def fuse(model: nn.Module, dtype: torch.dtype) -> int:
    """Fuse the layers that pass the trial and return their number. Raises what a launch raises, with none fused."""
    layers: list[tuple[nn.Module, TritonLayer]] = []
    for module in model.modules():
        try:
            parts = Parts(module)
        except LookupError:
            continue
        if (layer := _try_layer(module.forward, parts, dtype)) is not None:
            layers.append((module, layer))
    inside = {part for module, _ in layers for part in module.modules()}
    norms = [(module, try_norm(module, dtype)) for module in model.modules() if module not in inside]
    rotaries = [(module, try_rotary(module)) for module in model.modules()]
    for module, forward in (*layers, *norms, *rotaries):  # none, if a launch raised
        if forward is not None:
            module.forward = forward
    return len(layers)


def fused_layers(model: nn.Module) -> list[tuple[nn.Module, TritonLayer]]:
    return [(module, module.forward) for module in model.modules() if isinstance(module.forward, TritonLayer)]


def _try_layer(original_forward: Forward, parts: Parts, dtype: torch.dtype) -> TritonLayer | None:
    trial = Trial(TRIAL_SCALES, parts.hidden, parts.spec, TritonAttention, dtype, parts.device)
    trial.block_size = TILE  # a model with blocks of another size compiles again
    tolerance = TOLERANCE[dtype]

    def agrees(actual: TrialResult, expected: TrialResult) -> bool:
        added = _is_close(actual.output - trial.rows, expected.output - trial.rows, tolerance)
        return added and _is_close(actual.blocks, expected.blocks, tolerance)

    return trial.fuse(original_forward, partial(TritonLayer, original_forward, parts), agrees, UNSUPPORTED_CALL)


def _is_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    difference = (actual.double() - expected.double()).norm(dim=-1)
    return bool((difference <= tolerance * expected.double().norm(dim=-1)).all())
