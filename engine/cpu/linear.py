from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from decant.engine.checkpoint.coded_linear import CodedLinear, is_plain_linear
from decant.engine.checkpoint.expert_layers import DOWN, ExpertLayers, check_equal, first_of, has_stacked_experts
from decant.engine.cpu.gemm import NativeWeight, Product, prepare, prepare_codes
from decant.engine.cpu.huge_pages import release_freed
from decant.engine.model.parallel_experts import is_parallel_experts

FIXED_ROWS = 32

FREED_AT_ONCE = 64 << 20

LANES = 64
"""Elements of one iteration of the widest vector loop (bf16, AVX512, unrolled twice)."""


UNSUPPORTED_CALL = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


class PackedLinear(nn.Module):
    """``nn.Linear`` with a packed weight.

    An output whose width is no multiple of LANES is a view of a wider tensor. In a dense one, the position of the
    scalar tail of torch's elementwise loops, with other last bits, would depend on the number of rows.
    """

    def __init__(self, weight: torch.Tensor, product: Product, order: torch.Tensor | None = None) -> None:
        """``product`` has the outputs of ``weight``, and as many further ones as ``_widened`` says."""
        super().__init__()
        self._product, self._order = product, order
        self.weight = torch.empty_like(weight, device="meta")  # dtype and shape, for callers that look at them
        self._dtype, self._width = weight.dtype, len(weight)
        self._is_wider = bool(self._width % LANES)

    @property
    def packed_weight(self) -> NativeWeight | None:
        """Weight for the compiled kernels; None unless it has exactly the layer's inputs and outputs, in order."""
        product = self._product
        return product if isinstance(product, NativeWeight) and not self._is_wider and self._order is None else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != self._dtype:
            return self.forward(x.to(self._dtype)).to(x.dtype)
        out = self._product(x if self._order is None else x[..., self._order])
        return out[..., : self._width] if self._is_wider else out


def pack_linear(weight: torch.Tensor, bias: torch.Tensor | None, kernels: ModuleType | None) -> PackedLinear:
    return PackedLinear(weight, prepare(_widen(weight.detach()), _widen_bias(bias), kernels))


def _pack_coded(module: CodedLinear, kernels: ModuleType | None) -> PackedLinear:
    codes = module.source.codes()
    wider = codes.in_order().padded(_widened(codes.shape[0]))
    bias = _widen_bias(module.bias)
    product = prepare_codes(wider, bias, module.dtype, kernels, rounds_rows=module.rounds_rows)
    return PackedLinear(module.weight, product, codes.order)


def _widened(outputs: int) -> int:
    return outputs + -outputs % LANES


def _widen_bias(bias: torch.Tensor | None) -> torch.Tensor | None:
    return None if bias is None else _widen(bias.detach())


def _widen(weight: torch.Tensor) -> torch.Tensor:
    missing = _widened(len(weight)) - len(weight)
    return torch.cat([weight, weight.new_zeros(missing, *weight.shape[1:])]) if missing else weight


class FixedRows(nn.Module):
    """Runs a module in pieces of FIXED_ROWS rows, so that torch always chooses the same kernels.

    hidden [T, H] or [1, T, H]; ``shared`` is the same for all rows.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, hidden: torch.Tensor, *shared: Any) -> torch.Tensor | tuple[torch.Tensor, ...]:
        count = hidden.shape[-2]
        padded = nn.functional.pad(hidden, (0, 0, 0, -count % FIXED_ROWS))
        pieces = [self.inner(piece, *shared) for piece in padded.split(FIXED_ROWS, dim=-2)]
        if isinstance(pieces[0], torch.Tensor):
            return _join(pieces, count)
        return tuple(_join(parts, count) for parts in zip(*pieces, strict=True))


def _join(pieces: Sequence[torch.Tensor], count: int) -> torch.Tensor:
    dim = 0 if pieces[0].shape[0] == FIXED_ROWS else 1
    return torch.cat(list(pieces), dim=dim).narrow(dim, 0, count)


class PackedExperts(ExpertLayers):
    """transformers' experts with packed weights."""

    def __init__(self, experts: Any, kernels: ModuleType | None) -> None:
        up, down = (_pack_each(experts, name, kernels) for name in (first_of(experts), DOWN))
        super().__init__(experts, up, down)


class GluExperts(nn.Module):
    """dbrx's experts, whose weights are rows of common matrices, with the attributes of other models' experts."""

    has_gate, is_transposed, has_post_expert_norm = True, False, False

    def __init__(self, experts: Any) -> None:
        super().__init__()
        shape = experts.num_experts, experts.ffn_hidden_size, experts.hidden_size
        gate, up, down = (getattr(experts.mlp, name).detach().view(shape) for name in ("w1", "v1", "w2"))
        self.gate_up_proj = nn.Parameter(torch.cat([gate, up], 1), requires_grad=False)
        self.down_proj = nn.Parameter(down.transpose(1, 2), requires_grad=False)
        # As a method it would have packed experts hold the weights.
        self._apply_gate = partial(_gated, experts.mlp.activation_fn)
        self._original = experts

    def forward(self, hidden: torch.Tensor, *chosen: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self._original(hidden, *chosen)
        return output.view(hidden.shape)


def _gated(activation: nn.Module, gates_and_ups: torch.Tensor) -> torch.Tensor:
    gates, ups = gates_and_ups.chunk(2, -1)
    gated: torch.Tensor = activation(gates) * ups
    return gated


class PackedParallelExperts(nn.Module):
    """jetmoe's experts with packed weights: each multiplies rows that follow those of the expert before.

    An output whose width is no multiple of LANES is a view of a wider tensor, as that of a ``PackedLinear``.
    """

    def __init__(self, experts: Any, kernels: ModuleType | None) -> None:
        super().__init__()
        self._experts = nn.ModuleList(pack_linear(weight, None, kernels) for weight in experts.weight.detach())
        self._width = experts.weight.shape[1]

    def forward(self, inputs: torch.Tensor, expert_size: Sequence[int]) -> torch.Tensor:
        out = inputs.new_empty(len(inputs), self._width + -self._width % LANES)[:, : self._width]
        pieces = zip(self._experts, inputs.split(list(expert_size)), out.split(list(expert_size)), strict=True)
        for expert, rows, part in pieces:
            if len(rows):
                part.copy_(expert(rows))
        return out


@torch.inference_mode()
def _pack_parallel_experts(experts: Any, kernels: ModuleType | None) -> PackedParallelExperts:
    count, _, width = experts.weight.shape
    rows = torch.randn(2 * count, width, generator=torch.Generator().manual_seed(0)).to(experts.weight)
    packed = PackedParallelExperts(experts, kernels)
    check_equal(experts, packed(rows, [2] * count), experts(rows, [2] * count))
    return packed


@torch.inference_mode()
def _pack_experts(experts: Any, kernels: ModuleType | None) -> PackedExperts:
    weight = getattr(experts, first_of(experts))
    count, width = len(weight), weight.shape[1 if experts.is_transposed else 2]
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2 * count, width, generator=generator).to(weight)
    chosen = torch.arange(2 * count)[:, None] + torch.arange(2)
    share = torch.tensor([0.7, 0.3]).to(weight).expand(2 * count, 2)
    del weight  # freed as soon as it is packed
    expected = experts(rows, chosen % count, share)
    packed = PackedExperts(experts, kernels)
    output = packed(rows, chosen % count, share)
    check_equal(experts, output, expected)
    return packed


def _pack_each(experts: Any, name: str, kernels: ModuleType | None) -> nn.ModuleList:
    weights, biases = getattr(experts, name), getattr(experts, f"{name}_bias", None)
    if experts.is_transposed:
        weights = weights.transpose(1, 2)
    return nn.ModuleList(
        pack_linear(weight, None if biases is None else biases[index], kernels) for index, weight in enumerate(weights)
    )


def pack(model: nn.Module, kernels: ModuleType | None) -> None:
    """Replace every module that multiplies rows by a weight; without ``kernels``, torch computes the products.

    Only one module's weights are in memory twice. Remaining parameters are copied from mapped files.
    """
    freed = 0
    for parent in [module for module in model.modules() if next(module.children(), None) is not None]:
        for name in [name for name, _ in parent.named_children()]:
            freed += _replace(parent, name, kernels)
            if freed > FREED_AT_ONCE:
                freed = 0
                release_freed()
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    release_freed()


def _replace(parent: nn.Module, name: str, kernels: ModuleType | None) -> int:
    child = parent.get_submodule(name)
    nbytes = sum(parameter.nbytes for parameter in child.parameters(recurse=False))
    if isinstance(child, CodedLinear):
        nbytes = 4 * child.weight.numel()  # of what reading its codes leaves
    packed = _packed(child, kernels)
    if packed is None:
        return 0
    setattr(parent, name, packed)
    return nbytes


def _has_other_stacks(module: nn.Module) -> bool:
    handled = isinstance(module, ExpertLayers | FixedRows | nn.Conv1d) or hasattr(module, "is_transposed")
    handled = handled or is_parallel_experts(module)
    return not handled and any(parameter.dim() == 3 for parameter in module.parameters(recurse=False))


def _is_glu_experts(module: nn.Module) -> bool:
    weights = dict(module.named_parameters())
    sizes = (getattr(module, name, None) for name in ("num_experts", "ffn_hidden_size", "hidden_size"))
    return weights.keys() == {"mlp.w1", "mlp.v1", "mlp.w2"} and None not in sizes


def _packed(module: nn.Module, kernels: ModuleType | None) -> nn.Module | None:
    if isinstance(module, CodedLinear):
        return _pack_coded(module, kernels)
    if isinstance(module, nn.Linear) and is_plain_linear(module):
        return pack_linear(module.weight, module.bias, kernels)
    if isinstance(module, Conv1D) and type(module).forward is Conv1D.forward:
        return pack_linear(module.weight.T, module.bias, kernels)
    if has_stacked_experts(module):
        return _pack_experts(module, kernels)
    if _is_glu_experts(module):
        return _pack_experts(GluExperts(module), kernels)
    if is_parallel_experts(module):
        return _pack_parallel_experts(module, kernels)
    if any(_has_other_stacks(child) for child in module.children()):
        return FixedRows(module)
    if next(module.children(), None) is not None:
        return None
    own = list(module.parameters(recurse=False))
    matrices = [parameter for parameter in own if parameter.dim() == 2 and min(parameter.shape) > 1]
    if isinstance(module, nn.Embedding | FixedRows | PackedLinear):
        return None
    return FixedRows(module) if any(not _is_elementwise(module, matrix) for matrix in matrices) else None


@torch.inference_mode()
def _is_elementwise(module: nn.Module, weight: torch.Tensor) -> bool:
    """Whether the module takes only as many rows as ``weight`` [a, b] has; a matrix product takes any number."""
    count, width = weight.shape
    try:
        output = module(weight.new_ones(1, count, width))
    except UNSUPPORTED_CALL:
        return False
    if not isinstance(output, torch.Tensor) or output.shape != (1, count, width):
        return False
    try:
        module(weight.new_ones(1, count + 1, width))
    except RuntimeError:  # the shapes can't be broadcast
        return True
    return False
