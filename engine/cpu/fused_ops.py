"""A model's small operations, compiled: a norm, a gated activation, a rotation, each in one pass instead of ten.

A decode step of a small model on a CPU spends much of its time in operations that compute next to nothing, each of
which is called, finds memory and writes it. A module is replaced only where it does what ours does: that is looked up
in nothing, but tried, on rows of small, usual and large numbers. The bits of a row are its own in either.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

import torch
from torch import nn

from decant.engine.cpu.kernels import KERNELS
from decant.engine.cpu.linear import PackedLinear
from decant.engine.cpu.threads import team

TRIED_ON = (1e-2, 1.0, 30.0)
"""How large the numbers of the rows are on which a module is compared with ours."""

ROOM = {torch.bfloat16: 2**-11, torch.float32: 1e-5}
"""How far ours may be from a module's answer, in parts of its length: less than one rounding more would bring."""

ROTATION = "apply_rotary_pos_emb"
Rotate: TypeAlias = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""(query, key, cos, sin, ...) -> query and key, turned."""


class RmsNorm(nn.Module):
    """x [..., width] -> the same: each row by its root mean square, rounded, times weight [width]."""

    def __init__(self, kernels: ModuleType, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self._kernel = kernels.rms_norm
        self._weight = weight.detach().contiguous()
        self.weight = nn.Parameter(self._weight, requires_grad=False)
        self.eps = eps
        self.width, self.dtype = len(weight), weight.dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] != self.width or x.dtype not in ROOM:
            raise ValueError(f"x: bfloat16 or float32 [..., {self.width}], got {x.dtype} {list(x.shape)}")
        x = x.contiguous()
        weight = self._weight if x.dtype == self.dtype else self._weight.to(x.dtype)
        out, width = torch.empty_like(x), x.shape[-1]
        half = x.dtype == torch.bfloat16
        rows, threads = x.numel() // width, team()
        self._kernel(half, x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, width, self.eps, threads)
        return out


class GatedMlp(nn.Module):
    """x [..., width] -> the same: down(silu(gate(x)), rounded, times up(x))."""

    def __init__(self, kernels: ModuleType, gate: PackedLinear, up: PackedLinear, down: PackedLinear) -> None:
        super().__init__()
        self._kernel = kernels.gate
        self.gate_proj, self.up_proj, self.down_proj = gate, up, down
        self.width, self.dtype = gate.weight.shape[1], gate.weight.dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        out, width, stride = gate.new_empty(gate.shape), gate.shape[-1], gate.stride(-2)
        half = gate.dtype == torch.bfloat16
        rows, threads = gate.numel() // width, team()
        self._kernel(half, gate.data_ptr(), up.data_ptr(), out.data_ptr(), rows, width, stride, threads)
        result: torch.Tensor = self.down_proj(out)
        return result


class Rotation:
    """What attention modules of transformers call by the name ROTATION: query and key [1, heads, T, width] by cos and
    sin [1, T, width]. What is not laid out like this, ``theirs`` turns."""

    def __init__(self, kernels: ModuleType, theirs: Rotate) -> None:
        self._kernel = kernels.rotate
        self._theirs = theirs

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *more: Any, **named: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if more or named or not all(_is_plain(x, cos, sin) for x in (query, key)):
            return self._theirs(query, key, cos, sin, *more, **named)
        return self._turned(query, cos, sin), self._turned(key, cos, sin)

    def _turned(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """In the order in which a linear layer wrote it: a token's heads side by side."""
        _, heads, tokens, width = x.shape
        out = x.new_empty(1, tokens, heads, width)
        addresses = x.data_ptr(), cos.data_ptr(), sin.data_ptr(), out.data_ptr()
        apart = x.stride(2), x.stride(1)
        threads = team()
        self._kernel(x.dtype == torch.bfloat16, *addresses, tokens, heads, width, *apart, threads)
        return out.transpose(1, 2)


def _is_plain(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """Whether a rotation is of one sequence, over its whole width, in one dtype, and lies as the kernel reads it."""
    return (
        (1, *x.shape[2:]) == cos.shape == sin.shape
        and len(x) == 1
        and x.shape[3] % 2 == 0
        and x.stride(3) == 1
        and x.dtype == cos.dtype == sin.dtype
        and x.dtype in ROOM
        and cos.is_contiguous()
        and sin.is_contiguous()
    )


def fuse(model: nn.Module, dtype: torch.dtype) -> None:
    """Replace the modules of a packed CPU model that do what ours do, in ``dtype`` as all of the model."""
    if KERNELS is None or dtype not in ROOM:
        return
    for module in model.modules():
        _turn(KERNELS, module, dtype)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            ours = _norm(KERNELS, child) or _mlp(KERNELS, child)
            if ours is not None and _is_like(child, ours, dtype):
                setattr(parent, name, ours)


def _norm(kernels: ModuleType, module: nn.Module) -> RmsNorm | None:
    """What a norm might be."""
    eps: Any = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    own = dict(module.named_parameters())
    if not isinstance(eps, float) or own.keys() != {"weight"} or own["weight"].dim() != 1:
        return None
    return RmsNorm(kernels, own["weight"], eps)


def _mlp(kernels: ModuleType, module: nn.Module) -> GatedMlp | None:
    """What a gated layer might be."""
    parts = dict(module.named_children())
    gate, up, down = (parts.pop(name, None) for name in ("gate_proj", "up_proj", "down_proj"))
    if any(True for part in parts.values() for _ in part.parameters()):
        return None
    if not (isinstance(gate, PackedLinear) and isinstance(up, PackedLinear) and isinstance(down, PackedLinear)):
        return None
    return GatedMlp(kernels, gate, up, down)


def _turn(kernels: ModuleType, module: nn.Module, dtype: torch.dtype) -> None:
    """Have an attention module call our rotation where it does what theirs does: its own code, with another function
    under the name."""
    forward, width = type(module).forward, getattr(module, "head_dim", None)
    if not isinstance(forward, FunctionType) or ROTATION not in forward.__code__.co_names or not isinstance(width, int):
        return
    theirs = forward.__globals__[ROTATION]
    if _turns_alike(theirs, ours := Rotation(kernels, theirs), width, dtype):
        known = {**forward.__globals__, ROTATION: ours}
        own = FunctionType(forward.__code__, known, forward.__name__, forward.__defaults__, forward.__closure__)
        own.__kwdefaults__ = forward.__kwdefaults__
        module.forward = MethodType(own, module)


@torch.inference_mode()
def _turns_alike(theirs: Rotate, ours: Rotate, width: int, dtype: torch.dtype) -> bool:
    """Whether both give the same bits."""
    generator = torch.Generator().manual_seed(0)
    query, key, cos, sin = (
        torch.randn(1, *shape, width, generator=generator).to(dtype) for shape in ((3, 5), (2, 5), (5,), (5,))
    )
    try:
        expected = theirs(query, key, cos, sin)
    except (RuntimeError, TypeError):  # it wants other arguments
        return False
    return all(torch.equal(one, other) for one, other in zip(ours(query, key, cos, sin), expected, strict=True))


@torch.inference_mode()
def _is_like(theirs: nn.Module, ours: RmsNorm | GatedMlp, dtype: torch.dtype) -> bool:
    """Whether both answer rows alike, up to the order of sums."""
    if ours.dtype != dtype:
        return False
    rows = torch.randn(len(TRIED_ON), ours.width, generator=torch.Generator().manual_seed(0))
    rows = (rows * torch.tensor(TRIED_ON)[:, None]).to(dtype)[None]
    expected, got = theirs(rows), ours(rows)
    if not isinstance(expected, torch.Tensor) or expected.shape != got.shape or expected.dtype != got.dtype:
        return False
    apart = (got.double() - expected.double()).norm(dim=-1)
    return bool((apart <= ROOM[dtype] * expected.double().norm(dim=-1)).all())
