from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

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


class Profile(NamedTuple):
    """Of the second half of the GPU's work, after the prompts.

    ``idle`` is the share of the time without a kernel, gaps inside CUDA graphs left out; ``kernels`` has the seconds
    of the kernels that took longest, by name.
    """

    idle: float
    seconds: float
    kernels: dict[str, float]


def profile(run: Callable[[], object], most: int = 12) -> Profile:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        run()
    events = [event for event in profiled.events() or () if str(event.device_type).endswith("CUDA")]
    events.sort(key=lambda event: event.time_range.start)
    decodes = events[len(events) // 2 :]
    spans = [(event.time_range.start, event.time_range.end) for event in decodes]
    times = Counter[str]()
    for event in decodes:
        times[event.name[:60]] += (event.time_range.end - event.time_range.start) / 1e6
    seconds = (max(end for _, end in spans) - spans[0][0]) / 1e6 if spans else 0.0
    return Profile(gaps_share(spans, LEAST_GAP_US), seconds, dict(times.most_common(most)))
