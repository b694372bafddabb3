"""Linear layers whose rows do not see each other, and fast: weights laid out once (``engine/cpu/gemm.py``).

Modules that multiply rows in ways of their own are run in pieces of one fixed number of rows instead. On CUDA the
model's own layers stay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from decant.engine.cpu.gemm import PackedWeight, prepare
from decant.engine.cpu.huge_pages import release_freed

FIXED_ROWS = 32
"""Rows of every call of a module that is run in pieces of one shape."""

FREED_AT_ONCE = 64 << 20
"""Bytes of replaced weights after which the allocator gives freed memory back."""

LANES = 64
"""Elements that the widest vector loop takes at once (bf16, AVX512, twice unrolled)."""


ANOTHER = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What a module raises that is called in a way that is not its own."""


class PackedLinear(nn.Module):
    """x [..., in] -> [..., out], as ``nn.Linear`` with weight [out, in] would.

    Elementwise functions give other last bits in the scalar tail of a vector loop (a gate's sigmoid does), and where
    the tail of a dense tensor begins depends on the number of rows. So a width that is no multiple of LANES comes
    out as part of a wider tensor: then loops go row by row.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self._product = prepare(_widen(weight.detach()), None if bias is None else _widen(bias.detach()))
        self.weight = torch.empty_like(weight, device="meta")  # dtype and shape, for callers that look at them
        self._dtype, self._width = weight.dtype, len(weight)
        self._is_wider = bool(self._width % LANES)

    @property
    def panels(self) -> PackedWeight | None:
        """The product by itself, where it is one of ours and as wide as the layer."""
        return self._product if isinstance(self._product, PackedWeight) and not self._is_wider else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != self._dtype:
            return self.forward(x.to(self._dtype)).to(x.dtype)
        out = self._product(x)
        return out[..., : self._width] if self._is_wider else out


def _widen(weight: torch.Tensor) -> torch.Tensor:
    """Zeros after the last output until there is a multiple of LANES of them."""
    missing = -weight.shape[0] % LANES
    return torch.cat([weight, weight.new_zeros(missing, *weight.shape[1:])]) if missing else weight


class FixedRows(nn.Module):
    """Runs a module that treats rows alone in pieces of FIXED_ROWS rows, so that its kernels never change.

    hidden [T, H] or [1, T, H]; ``shared`` is the same for all rows (a router's bias, say); whatever the module
    answers has its rows first, or second after a 1.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        """What callers read off the module (a router's bias, say) stays readable."""
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
    """The first ``count`` rows of what the pieces gave."""
    dim = 0 if pieces[0].shape[0] == FIXED_ROWS else 1
    return torch.cat(list(pieces), dim=dim).narrow(dim, 0, count)


EXPERTS_ROOM = {torch.bfloat16: 0.05, torch.float32: 1e-3}
"""How far packed experts may be from a module's own, in parts of an answer's length: more than rounding, and far less
than another order of parts or another activation."""


class PackedExperts(nn.Module):
    """A transformers experts module (``use_experts_implementation``) with each expert's weights packed.

    hidden [T, H], top_k_index [T, k], top_k_weights [T, k] -> [T, H]. A token's experts are added in the order in
    which its router names them, so its sum does not depend on who else chose them.
    """

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self._gate: Callable[[torch.Tensor], torch.Tensor] = experts._apply_gate if experts.has_gate else experts.act_fn
        self._post = experts.post_expert_norm if experts.has_post_expert_norm else nn.Identity()
        first = "gate_up_proj" if experts.has_gate else "up_proj"
        self._up = _pack_each(experts, first)
        self._down = _pack_each(experts, "down_proj")
        for name in (first, "down_proj"):
            delattr(experts, name)

    def forward(self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        count, top_k = top_k_index.shape
        outputs = hidden.new_zeros(count * top_k, hidden.shape[-1])
        chosen = top_k_index.flatten()
        for expert in torch.unique(chosen).tolist():
            places = (chosen == expert).nonzero().flatten()
            inner = self._gate(self._up[expert](hidden[places // top_k]))
            outputs[places] = self._post(self._down[expert](inner))
        weighted = (outputs * top_k_weights.reshape(-1, 1)).unflatten(0, (count, top_k))
        total: torch.Tensor = weighted[:, 0]
        for rank in range(1, top_k):
            total = total + weighted[:, rank]
        return total.to(hidden.dtype)


@torch.inference_mode()
def _pack_experts(experts: Any) -> PackedExperts:
    """Packed experts that were compared with the module's own, each expert on rows chosen for it, so that no router's
    tie takes part. Raises ValueError where they differ."""
    weight = experts.gate_up_proj if experts.has_gate else experts.up_proj
    count, dtype, width = len(weight), weight.dtype, weight.shape[1 if experts.is_transposed else 2]
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2 * count, width, generator=generator).to(weight)
    chosen = torch.arange(2 * count)[:, None] + torch.arange(2)
    share = torch.tensor([0.7, 0.3]).to(weight).expand(2 * count, 2)
    del weight  # so that it is freed as soon as it is packed
    expected = experts(rows, chosen % count, share)
    ours = PackedExperts(experts)
    answer = ours(rows, chosen % count, share)
    apart = (answer.float() - expected.float()).norm(dim=-1)
    if not (apart <= EXPERTS_ROOM[dtype] * expected.float().norm(dim=-1)).all():
        raise ValueError(f"packed {type(experts).__name__} answer otherwise than its own")
    return ours


def _pack_each(experts: Any, name: str) -> nn.ModuleList:
    weights, biases = getattr(experts, name), getattr(experts, f"{name}_bias", None)
    if experts.is_transposed:
        weights = weights.transpose(1, 2)
    return nn.ModuleList(
        PackedLinear(weight, None if biases is None else biases[index]) for index, weight in enumerate(weights)
    )


def pack(model: nn.Module) -> None:
    """Replace every module of a CPU model that multiplies rows by a weight with one that keeps rows apart.

    A replaced module is freed at once, so that weights are in memory once but for those of one module. What is left of
    them is copied: a view of a mapped file keeps all of the file's pages in memory.
    """
    freed = 0
    for parent in [module for module in model.modules() if next(module.children(), None) is not None]:
        for name in [name for name, _ in parent.named_children()]:
            freed += _replace(parent, name)
            if freed > FREED_AT_ONCE:
                freed = 0
                release_freed()
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    release_freed()


def _replace(parent: nn.Module, name: str) -> int:
    """Pack a child. Returns the bytes of the parameters that it had."""
    child = parent.get_submodule(name)
    held = sum(parameter.nbytes for parameter in child.parameters(recurse=False))
    packed = _packed(child)
    if packed is None:
        return 0
    setattr(parent, name, packed)
    return held


def _stacks(module: nn.Module) -> bool:
    """Whether a module holds the weights of several experts and takes rows sorted by expert: as it depends on all
    rows at once, what calls it is run on a fixed number of them."""
    known = isinstance(module, PackedExperts | FixedRows | nn.Conv1d) or hasattr(module, "is_transposed")
    return not known and any(parameter.dim() == 3 for parameter in module.parameters(recurse=False))


def _packed(module: nn.Module) -> nn.Module | None:
    """What takes a module's place; None to leave it (and look at its children)."""
    # A router may be a Linear whose forward does more.
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        return PackedLinear(module.weight, module.bias)
    if isinstance(module, Conv1D) and type(module).forward is Conv1D.forward:
        return PackedLinear(module.weight.T, module.bias)
    if hasattr(module, "is_transposed") and hasattr(module, "has_gate"):
        return _pack_experts(module)
    if any(_stacks(child) for child in module.children()):
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
    """Whether a module multiplies its input by ``weight`` [a, b] element by element, as a norm over heads does.

    It then takes exactly as many rows as the weight has; a matrix that rows are multiplied by takes any number.
    """
    count, width = weight.shape
    try:
        answer = module(weight.new_ones(1, count, width))
    except ANOTHER:
        return False
    if not isinstance(answer, torch.Tensor) or answer.shape != (1, count, width):
        return False
    try:
        module(weight.new_ones(1, count + 1, width))
    except RuntimeError:  # the shapes can't be broadcast
        return True
    return False
