"""cos and sin of a step's positions in one kernel. A module is replaced if they are close to its own in a trial."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from decant.engine.cuda import layer_kernels as kernels
from decant.engine.cuda.attention import power_of_two

Angles = tuple[torch.Tensor, torch.Tensor]
"""cos and sin [1, T, head width]."""

TRIAL_POSITIONS = (0, 1, 77, 4095, 131_071)

TOLERANCE = 1e-3
"""Largest difference in float32. At high positions the last bit of an angle matters."""


class RotaryForward:
    """Forward of a module of rotary angles; calls with other arguments go to the original."""

    def __init__(self, original: Callable[..., Angles], frequencies: torch.Tensor, scaling: float) -> None:
        self._original = original
        self._frequencies = frequencies
        self._scaling = scaling

    def __call__(self, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Angles:
        if args or kwargs or position_ids.shape[0] != 1 or position_ids.stride(1) != 1:
            return self._original(x, position_ids, *args, **kwargs)
        half, count = len(self._frequencies), position_ids.shape[1]
        cos, sin = (torch.empty(1, count, 2 * half, dtype=x.dtype, device=x.device) for _ in range(2))
        kernels.rotary_angles[(count,)](
            *(position_ids, self._frequencies, cos, sin, self._scaling),
            HALF=half,
            PAD=power_of_two(half),
            num_warps=1,
            num_stages=3,
        )
        return cos, sin


@torch.inference_mode()
def try_rotary(module: nn.Module) -> RotaryForward | None:
    """Return a forward of the module if it computes one set of angles, whatever the positions of the others."""
    frequencies: Any = dict(module.named_buffers(recurse=False)).get("inv_freq")
    scaling, kind = getattr(module, "attention_scaling", None), getattr(module, "rope_type", None)
    if frequencies is None or frequencies.dim() != 1 or not isinstance(scaling, (float, int)):
        return None
    if not isinstance(kind, str) or "dynamic" in kind or "longrope" in kind:
        return None
    forward = RotaryForward(module.forward, frequencies.float().contiguous(), float(scaling))
    positions = torch.tensor([TRIAL_POSITIONS], device=frequencies.device)
    x = torch.zeros(1, device=frequencies.device)
    try:
        expected = module.forward(x, positions)
    except TypeError:  # it wants more arguments
        return None
    pairs = zip(forward(x, positions), expected, strict=True)
    is_close = all(one.shape == other.shape and bool(((one - other).abs() < TOLERANCE).all()) for one, other in pairs)
    return forward if is_close else None
