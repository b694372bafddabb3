"""Compiled norms, gated MLPs and rotary embedding. They replace a module only if a trial has the same result."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch import nn

from decant.engine.cpu.linear import PackedLinear
from decant.engine.cpu.threads import num_threads

PROBE_SCALES = (1e-2, 1.0, 30.0)

TOLERANCE = {torch.bfloat16: 2**-11, torch.float32: 1e-5}
"""Largest difference relative to the norm of the result: less than one more rounding causes."""

Rotate: TypeAlias = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""(query, key, cos, sin, ...) -> rotated query and key."""


class RmsNorm(nn.Module):
    def __init__(self, kernels: ModuleType, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self._kernel = kernels.rms_norm
        self._weight = weight.detach().contiguous()
        self.weight = nn.Parameter(self._weight, requires_grad=False)
        self.eps = eps
        self.width, self.dtype = len(weight), weight.dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] != self.width or x.dtype not in TOLERANCE:
            raise ValueError(f"x: bfloat16 or float32 [..., {self.width}], got {x.dtype} {list(x.shape)}")
        x = x.contiguous()
        weight = self._weight if x.dtype == self.dtype else self._weight.to(x.dtype)
        out, width = torch.empty_like(x), x.shape[-1]
        half = x.dtype == torch.bfloat16
        rows, threads = x.numel() // width, num_threads()
        self._kernel(half, x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, width, self.eps, threads)
        return out


class GatedMlp(nn.Module):
    def __init__(self, kernels: ModuleType, gate: PackedLinear, up: PackedLinear, down: PackedLinear) -> None:
        super().__init__()
        self._kernel = kernels.gate
        self.gate_proj, self.up_proj, self.down_proj = gate, up, down
        self.width, self.dtype = gate.weight.shape[1], gate.weight.dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        out, width, stride = gate.new_empty(gate.shape), gate.shape[-1], gate.stride(-2)
        half = gate.dtype == torch.bfloat16
        rows, threads = gate.numel() // width, num_threads()
        self._kernel(half, gate.data_ptr(), up.data_ptr(), out.data_ptr(), rows, width, stride, threads)
        result: torch.Tensor = self.down_proj(out)
        return result


class Rotation:
    def __init__(self, kernels: ModuleType, original: Rotate) -> None:
        self._kernel = kernels.rotate
        self._original = original

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if args or kwargs or not all(_is_supported(x, cos, sin) for x in (query, key)):
            return self._original(query, key, cos, sin, *args, **kwargs)
        return self._rotate(query, cos, sin), self._rotate(key, cos, sin)

    def _rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        _, heads, tokens, width = x.shape
        out = x.new_empty(1, tokens, heads, width)
        addresses = x.data_ptr(), cos.data_ptr(), sin.data_ptr(), out.data_ptr()
        strides = x.stride(2), x.stride(1)
        threads = num_threads()
        self._kernel(x.dtype == torch.bfloat16, *addresses, tokens, heads, width, *strides, threads)
        return out.transpose(1, 2)


def _is_supported(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    return (
        (1, *x.shape[2:]) == cos.shape == sin.shape
        and len(x) == 1
        and x.shape[3] % 2 == 0
        and x.stride(3) == 1
        and x.dtype == cos.dtype == sin.dtype
        and x.dtype in TOLERANCE
        and cos.is_contiguous()
        and sin.is_contiguous()
    )


def fuse(model: nn.Module, dtype: torch.dtype, kernels: ModuleType) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            fused = _norm(kernels, child) or _mlp(kernels, child)
            if fused is not None and _is_like(child, fused, dtype):
                setattr(parent, name, fused)


def _norm(kernels: ModuleType, module: nn.Module) -> RmsNorm | None:
    eps: Any = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    own = dict(module.named_parameters())
    if not isinstance(eps, float) or own.keys() != {"weight"} or own["weight"].dim() != 1:
        return None
    return RmsNorm(kernels, own["weight"], eps)


def _mlp(kernels: ModuleType, module: nn.Module) -> GatedMlp | None:
    parts = dict(module.named_children())
    gate, up, down = (parts.pop(name, None) for name in ("gate_proj", "up_proj", "down_proj"))
    if any(True for part in parts.values() for _ in part.parameters()):
        return None
    if not (isinstance(gate, PackedLinear) and isinstance(up, PackedLinear) and isinstance(down, PackedLinear)):
        return None
    return GatedMlp(kernels, gate, up, down)


@torch.inference_mode()
def has_same_bits(rotation: Rotate, original: Rotate, width: int, dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(0)
    query, key, cos, sin = (
        torch.randn(1, *shape, width, generator=generator).to(dtype) for shape in ((3, 5), (2, 5), (5,), (5,))
    )
    try:
        expected = original(query, key, cos, sin)
    except (RuntimeError, TypeError):  # it takes other arguments
        return False
    return all(torch.equal(one, other) for one, other in zip(rotation(query, key, cos, sin), expected, strict=True))


@torch.inference_mode()
def _is_like(original: nn.Module, fused: RmsNorm | GatedMlp, dtype: torch.dtype) -> bool:
    if fused.dtype != dtype:
        return False
    rows = torch.randn(len(PROBE_SCALES), fused.width, generator=torch.Generator().manual_seed(0))
    rows = (rows * torch.tensor(PROBE_SCALES)[:, None]).to(dtype)[None]
    expected, result = original(rows), fused(rows)
    if not isinstance(expected, torch.Tensor) or expected.shape != result.shape or expected.dtype != result.dtype:
        return False
    difference = (result.double() - expected.double()).norm(dim=-1)
    return bool((difference <= TOLERANCE[dtype] * expected.double().norm(dim=-1)).all())
