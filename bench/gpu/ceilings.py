from __future__ import annotations

import time
from collections.abc import Callable

import torch

RUNS = 8


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def bandwidth(device: torch.device, size: int) -> float:
    """Bytes per second that a copy reads and writes."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _best(lambda: target.copy_(source), device)


def product_rate(device: torch.device, size: int) -> float:
    """Multiplications and additions per second of a bfloat16 product."""
    left, right = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    return 2 * size**3 / _best(lambda: left @ right, device)


def _best(run: Callable[[], object], device: torch.device) -> float:
    best = float("inf")
    for _ in range(RUNS):
        synchronize(device)
        began = time.perf_counter()
        run()
        synchronize(device)
        best = min(best, time.perf_counter() - began)
    return best
