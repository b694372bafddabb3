"""Experts of transformers' models as linear layers of their own, so that each may be quantized.

transformers has a tensor for all experts of a layer, gates and up projections in one. Files of most formats have a
matrix for each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from decant.engine.checkpoint.coded_linear import CodedLinear
from decant.engine.checkpoint.weight import Weight

TOLERANCE = {torch.bfloat16: 0.05, torch.float16: 0.05, torch.float32: 1e-3}
"""Relative to the norm of the output."""

DOWN = "down_proj"

_PARTS = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "up_proj": (("up_proj",),),
    DOWN: (("down_proj",), ("w2",)),
}
"""Names of an expert's matrices in files, by the model's tensor of all: as most models have them, or as Mixtral, which
also has another name for the layer with the experts."""

Parts = tuple[Weight, ...]
"""Weights of an expert whose outputs follow one another."""


@dataclass(frozen=True, slots=True)
class CodedExperts:
    """Quantized weights of a module with experts.

    ``tensors``: names and shapes of the model's tensors that they stand for. ``names``: of theirs in the files.
    """

    up: tuple[Parts, ...]
    down: tuple[Parts, ...]
    tensors: Mapping[str, torch.Size]
    names: frozenset[str] = frozenset()


class ExpertLayers(nn.Module):
    """transformers' experts (``use_experts_implementation``), of whose weights linear layers are made.

    A token's experts are added in the router's order. The original module, ``experts``, loses its weights.
    """

    original: tuple[nn.Module, ...] = ()
    """Of ``CodedLinear``, the original module; in a tuple it is no part of the model."""

    def __init__(self, experts: Any, up: nn.ModuleList, down: nn.ModuleList) -> None:
        super().__init__()
        self.gate: Callable[[torch.Tensor], torch.Tensor] = experts._apply_gate if experts.has_gate else experts.act_fn
        self.post = experts.post_expert_norm if experts.has_post_expert_norm else nn.Identity()
        self.up, self.down = up, down
        for name in (first_of(experts), DOWN):
            delattr(experts, name)

    def forward(self, states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        count, top_k = top_k_index.shape
        hidden = states.reshape(count, -1)
        outputs = hidden.new_zeros(count * top_k, hidden.shape[-1])
        chosen = top_k_index.flatten()
        for expert in torch.unique(chosen).tolist():
            indices = (chosen == expert).nonzero().flatten()
            inner = self.gate(self.up[expert](hidden[indices // top_k]))
            outputs[indices] = self.post(self.down[expert](inner))
        weighted = (outputs * top_k_weights.reshape(-1, 1)).unflatten(0, (count, top_k))
        total: torch.Tensor = weighted[:, 0]
        for rank in range(1, top_k):
            total = total + weighted[:, rank]
        return total.to(hidden.dtype).view(states.shape)

    def dequantized(self, device: torch.device) -> nn.Module:
        """Return transformers' module with the weights of the ``CodedLinear`` that this one has."""
        experts: Any
        (experts,) = self.original
        for tensor, layers in ((first_of(experts), self.up), (DOWN, self.down)):
            matrices = [
                torch.cat([part.source[:].to(device, part.dtype) for part in parts_of(layer)]) for layer in layers
            ]
            stacked = torch.stack(matrices)
            weight = stacked.transpose(1, 2).contiguous() if experts.is_transposed else stacked
            setattr(experts, tensor, nn.Parameter(weight, requires_grad=False))
        restored: nn.Module = experts.to(device)
        return restored


class JoinedLinear(nn.Module):
    """Linear layers of the same inputs, whose outputs follow one another."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(x) for part in self.parts], -1)


def parts_of(layer: nn.Module) -> Sequence[CodedLinear]:
    """Return the quantized layers whose outputs an expert's layer has."""
    parts = list(layer.parts) if isinstance(layer, JoinedLinear) else [layer]
    assert all(isinstance(part, CodedLinear) for part in parts)
    return cast(Sequence[CodedLinear], parts)


def has_stacked_experts(module: nn.Module) -> bool:
    """Whether a module is of transformers' experts, with the weights of all in a tensor."""
    return hasattr(module, "is_transposed") and hasattr(module, "has_gate")


def first_of(experts: Any) -> str:
    """Name of the tensor that multiplies an expert's input."""
    return "gate_up_proj" if experts.has_gate else "up_proj"


def find_coded(model: nn.Module, slices: Mapping[str, Any]) -> Iterator[tuple[str, CodedExperts]]:
    """Yield modules, by name, all of whose experts are quantized in the files.

    Raises ValueError for missing ones, and for those of other shapes than the model's.
    """
    for name, module in model.named_modules():
        if not has_stacked_experts(module):
            continue
        up, down = (_find(name, each, module, slices) for each in (first_of(module), DOWN))
        if up and down:
            for tensor, weights in ((first_of(module), up), (DOWN, down)):
                shape = getattr(module, tensor).shape
                _check_shapes(f"{name}.{tensor}", shape, weights, is_transposed=module.is_transposed)
            tensors = {f"{name}.{each}": getattr(module, each).shape for each in (first_of(module), DOWN)}
            names = frozenset(weight.name for parts in (*up, *down) for weight in parts)
            yield name, CodedExperts(up, down, tensors, names)


def _find(name: str, tensor: str, module: Any, slices: Mapping[str, Any]) -> tuple[Parts, ...]:
    stacked: Sequence[Weight] = getattr(slices.get(f"{name}.{tensor}"), "experts", ())
    if stacked or module.has_bias or not module.is_concatenated:
        return tuple((weight,) for weight in stacked)
    count, *_ = getattr(module, tensor).shape
    for folder in (name, name.replace(".mlp.", ".block_sparse_moe.")):
        for parts in _PARTS[tensor]:
            names = [[f"{folder}.{at}.{part}.weight" for part in parts] for at in range(count)]
            if found := _coded([name for each in names for name in each], slices):
                return tuple(tuple(found[name] for name in each) for each in names)
    return ()


def _check_shapes(name: str, shape: torch.Size, weights: Sequence[Parts], *, is_transposed: bool) -> None:
    count, *matrix = shape
    outputs, inner = reversed(matrix) if is_transposed else matrix
    if len(weights) != count:
        raise ValueError(f"{name} has {len(weights)} experts, and the model {count}")
    for weight in (weight for parts in weights for weight in parts):
        expected = outputs // len(weights[0]), inner
        if tuple(weight.shape) != expected:
            raise ValueError(f"{weight.name} is {list(weight.shape)}, and the model's is {list(expected)}")


def _coded(names: Sequence[str], slices: Mapping[str, Any]) -> Mapping[str, Weight]:
    """Return the weights of these names, or none if some are plain. Raises ValueError if some are not there."""
    missing = [name for name in names if name not in slices]
    if missing and len(missing) < len(names):
        raise ValueError(f"{missing[0]} is missing")
    found = {name: each for name in names if isinstance(each := slices.get(name), Weight)}
    return found if len(found) == len(names) else {}


def replace_experts(model: nn.Module, found: Mapping[str, CodedExperts], dtype: torch.dtype) -> None:
    """Put ``ExpertLayers`` of ``CodedLinear`` in place of modules, by name. Raises ValueError."""
    for name, coded in found.items():
        module: Any = model.get_submodule(name)
        layers = {tensor: _layers(module, tensor, coded, dtype) for tensor in (first_of(module), DOWN)}
        arguments, expected = _first_two(module, coded, dtype)
        module.num_experts = len(coded.up)
        made = ExpertLayers(module, *layers.values())
        made.original = (module,)
        check_equal(module, made(*arguments), expected)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, made)


def _layers(module: Any, tensor: str, coded: CodedExperts, dtype: torch.dtype) -> nn.ModuleList:
    weights = coded.down if tensor == DOWN else coded.up
    biases = getattr(module, f"{tensor}_bias", None)
    layers: list[nn.Module] = []
    for at, parts in enumerate(weights):
        linears = [CodedLinear(part, None if biases is None else biases[at], dtype) for part in parts]
        layers.append(linears[0] if len(linears) == 1 else JoinedLinear(linears))
    return nn.ModuleList(layers)


@torch.inference_mode()
def _first_two(module: Any, coded: CodedExperts, dtype: torch.dtype) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Return arguments for the module that choose its first two experts, and what transformers computes."""
    count = min(2, len(coded.up))
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))  # of biases and norms
    for tensor, weights in ((first_of(module), coded.up), (DOWN, coded.down)):
        stacked = torch.stack([torch.cat([part[:] for part in parts]) for parts in weights[:count]]).to(device, dtype)
        made = stacked.transpose(1, 2).contiguous() if module.is_transposed else stacked
        setattr(module, tensor, nn.Parameter(made, requires_grad=False))
    module.num_experts = count
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(4, coded.up[0][0].shape[1], generator=generator).to(device, dtype)
    chosen = (torch.arange(4, device=device)[:, None] + torch.arange(count, device=device)) % count
    share = torch.tensor([0.7, 0.3][:count]).to(device, dtype).expand(4, count)
    return (rows, chosen, share), module(rows, chosen, share)


def check_equal(experts: nn.Module, output: torch.Tensor, expected: torch.Tensor) -> None:
    """Raises ValueError unless the outputs agree but for rounding."""
    difference = (output.float() - expected.float()).norm(dim=-1)
    if not (difference <= TOLERANCE[output.dtype] * expected.float().norm(dim=-1)).all():
        raise ValueError(f"packed {type(experts).__name__} differ from the original")
