from __future__ import annotations

from collections.abc import Callable, Iterable

import torch


def gaps_share(spans: Iterable[tuple[float, float]]) -> float:
    first = last = covered = 0.0
    for index, (begin, end) in enumerate(sorted(spans)):
        if index == 0:
            first = last = begin
        covered += max(0.0, end - max(begin, last))
        last = max(last, end)
    return 1 - covered / (last - first) if last > first else 0.0


def share(run: Callable[[], object]) -> float:
    """Idle share of the second half of the GPU's work, after the prompts."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
    events = [event for event in profile.events() or () if str(event.device_type).endswith("CUDA")]
    spans = sorted((event.time_range.start, event.time_range.end) for event in events)
    return gaps_share(spans[len(spans) // 2 :])
