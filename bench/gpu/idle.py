from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

LEAST_GAP_US = 5.0
"""Shorter gaps are between kernels of one CUDA graph: a launch costs the GPU about a microsecond."""


def gaps_share(spans: Iterable[tuple[float, float]], least: float) -> float:
    """Share of the time that no span covers for at least ``least``."""
    first = last = gaps = 0.0
    for index, (begin, end) in enumerate(sorted(spans)):
        if index == 0:
            first = last = begin
        if begin - last >= least:
            gaps += begin - last
        last = max(last, end)
    return gaps / (last - first) if last > first else 0.0


def share(run: Callable[[], object]) -> float:
    """Idle share of the second half of the GPU's work, after the prompts, without gaps inside CUDA graphs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
    events = [event for event in profile.events() or () if str(event.device_type).endswith("CUDA")]
    spans = sorted((event.time_range.start, event.time_range.end) for event in events)
    return gaps_share(spans[len(spans) // 2 :], LEAST_GAP_US)
