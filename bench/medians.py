from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

LONG = ("requests", "schedule", "weights")


def of(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {key: _median([run[key] for run in runs]) for key in runs[0]}


def _median(values: Sequence[Any]) -> Any:
    if isinstance(values[0], Mapping):
        return of(values)
    return statistics.median(values) if isinstance(values[0], float) else values[0]


def run_of_median(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    ordered = sorted(runs, key=lambda run: run["output_throughput"])
    chosen = ordered[(len(ordered) - 1) // 2]
    brief = [{key: value for key, value in run.items() if key not in LONG} for run in runs]
    return {**chosen, "peak_rss_gb": max(run["peak_rss_bytes"] for run in runs) / 1e9, "runs": brief}


def in_turn(contenders: Sequence[Callable[[], object]], runs: int) -> list[float]:
    """Median milliseconds of each contender, run in turn after one warm-up."""
    times: list[list[float]] = [[] for _ in contenders]
    for run in range(runs + 1):
        for place, contender in enumerate(contenders):
            began = time.perf_counter()
            contender()
            if run:
                times[place].append((time.perf_counter() - began) * 1e3)
    return [statistics.median(each) for each in times]
