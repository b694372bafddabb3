"""A model's small operations, compiled: a norm, a gated activation, each in one pass instead of ten.

A decode step of a small model on a CPU spends much of its time in operations that compute next to nothing, each of
which is called, finds memory and writes it. A module is replaced only where it does what ours does: that is looked up
in nothing, but tried, on rows of small, usual and large numbers. The bits of a row are its own in either.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import nn

from engine.linears import PackedLinear
from engine.native import KERNELS

TRIED_ON = (1e-2, 1.0, 30.0)
"""How large the numbers of the rows are on which a module is compared with ours."""

ROOM = {torch.bfloat16: 2**-11, torch.float32: 1e-5}
"""How far ours may be from a module's answer, in parts of its length: less than one rounding more would bring."""


class RmsNorm(nn.Module):
    """x [..., width] -> the same: each row by its root mean square, rounded, times weight [width]."""

    def __init__(self, kernels: ModuleType, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self._kernel = kernels.rms_norm
        self.weight = nn.Parameter(weight.detach().contiguous(), requires_grad=False)
        self.eps = eps
        self.width, self.dtype = len(weight), weight.dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, weight = x.contiguous(), self.weight.to(x.dtype)
        out, width = torch.empty_like(x), x.shape[-1]
        half = x.dtype == torch.bfloat16
        rows, threads = x.numel() // width, torch.get_num_threads()
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
        rows, threads = gate.numel() // width, torch.get_num_threads()
        self._kernel(half, gate.data_ptr(), up.data_ptr(), out.data_ptr(), rows, width, stride, threads)
        result: torch.Tensor = self.down_proj(out)
        return result


def fuse(model: nn.Module, dtype: torch.dtype) -> None:
    """Replace the modules of a packed CPU model that do what ours do, in ``dtype`` as all of the model."""
    if KERNELS is None or dtype not in ROOM:
        return
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
