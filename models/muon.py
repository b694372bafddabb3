"""Muon: momentum whose update is the nearest orthogonal matrix (Jordan et al., 2024).

Unlike ``torch.optim.Muon`` it works in float32, as a CPU may lack bfloat16 products, and on all matrices of a shape at
once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch

# Keller Jordan's quintic: its slope at zero is steep, and singular values end between 0.7 and 1.2.
QUINTIC = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


def orthogonalise(matrices: torch.Tensor) -> torch.Tensor:
    """Move the singular values of ``[n, rows, columns]`` towards one by Newton-Schulz iteration."""
    a, b, c = QUINTIC
    tall = matrices.size(-2) > matrices.size(-1)
    x: torch.Tensor = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum with decoupled weight decay, for matrices only."""

    def __init__(
        self, params: Iterable[torch.Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update all matrices; tall ones get larger steps, so that their outputs change by a similar amount."""
        for group in self.param_groups:
            by_shape = defaultdict(list)
            for param in group["params"]:
                by_shape[param.shape].append(param)
            for (rows, columns), params in by_shape.items():
                directions = [self._direction(param, group["momentum"]) for param in params]
                updates = orthogonalise(torch.stack(directions))
                scale = max(1.0, rows / columns) ** 0.5
                for param, update in zip(params, updates, strict=True):
                    param.mul_(1 - group["lr"] * group["weight_decay"])
                    param.add_(update, alpha=-group["lr"] * scale)

    def _direction(self, param: torch.Tensor, momentum: float) -> torch.Tensor:
        assert param.grad is not None
        state = self.state[param]
        if not state:
            state["average"] = torch.zeros_like(param)
        average = state["average"].lerp_(param.grad, 1 - momentum)
        return param.grad.lerp(average, momentum)
