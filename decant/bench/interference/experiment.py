from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from statistics import median
from typing import Any

from decant.bench.interference import trial
from decant.bench.interference.configurations import Configuration, InterferenceOptions, configurations
from decant.bench.interference.trial import Trial
from decant.bench.interference.verdict import sentence
from decant.client.async_client import AsyncClient
from decant.runtime.cores import usable_cores

Start = Callable[[Configuration], AbstractContextManager[Sequence[str]]]
"""Runs a deployment for the ``with``; gives its routers' addresses."""

Notify = Callable[[str, int, int], None]


def measure(model: str, options: InterferenceOptions, start: Start, notify: Notify) -> dict[str, Any]:
    """Measure each configuration and return the document. Raises InvalidBenchmark, ServiceError, TimeoutError."""
    chosen = configurations(options)
    parts, done = len(chosen) * (1 + options.trials), 0
    rows = []
    for configuration in chosen:
        notify(f"{configuration.name}: starting", done, parts)
        with start(configuration) as addresses:
            trials: list[Trial] = []
            for number in range(options.trials):
                done += 1
                notify(f"{configuration.name}: trial {number + 1}", done, parts)
                trials.append(asyncio.run(_trial(addresses, options, number)))
        done += 1
        rows.append(figures(configuration, trials))
    notify("done", parts, parts)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "model_id": model,
        "cores": len(usable_cores()),
        "load_average": os.getloadavg()[0],
        "running": options.running,
        "prompt_tokens": options.prompt_tokens,
        "trials": options.trials,
        "configurations": rows,
        "sentence": sentence(rows, options),
    }


def figures(configuration: Configuration, trials: Sequence[Trial]) -> dict[str, Any]:
    """Return medians over the trials and the worst gap; `gaps` are (seconds after the send, ms) of the first trial."""
    first = trials[0]
    return {
        "name": configuration.name,
        "mixed": configuration.is_mixed,
        "chunk": configuration.chunk,
        "longest_gap_ms": median(max(gap for _, gap in one.during) for one in trials) * 1e3,
        "worst_gap_ms": max(gap for one in trials for _, gap in one.during) * 1e3,
        "median_gap_ms": median(gap for one in trials for _, gap in one.during) * 1e3,
        "median_gap_before_ms": median(gap for one in trials for _, gap in one.before) * 1e3,
        "ttft_ms": median(one.ttft for one in trials) * 1e3,
        "output_throughput": median(one.during_rate for one in trials),
        "output_throughput_before": median(one.before_rate for one in trials),
        "gaps": [[end, gap * 1e3] for end, gap in sorted((*first.before, *first.during))],
    }


async def _trial(addresses: Sequence[str], options: InterferenceOptions, number: int) -> Trial:
    async with AsyncClient(addresses) as client:
        return await trial.measure(client, options, number)


def by_name(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    row: Mapping[str, Any] = next(row for row in document["configurations"] if row["name"] == name)
    return row
