from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from decant.bench.batching import curve, queues, slots
from decant.bench.batching.contenders import (
    CONTENDERS,
    PAGED,
    STATIC_ALL,
    STATIC_BATCH,
    Run,
    Setup,
    run,
    sample,
)
from decant.bench.batching.queues import Queue
from decant.bench.counts import parse_counts
from decant.bench.errors import InvalidBenchmark
from decant.engine.plan import Device
from decant.runtime.cores import usable_cores

QUEUE_PROMPT, SHORT, LONG, EQUAL = 64, 16, 256, 64
"""Tokens, in the queues of 32."""

PUBLISHED_REQUESTS = 1000

Notify = Callable[[str, int, int], None]
"""Gets a part's name, tokens of a step, tokens of the part."""


@dataclass(frozen=True)
class BatchingOptions:
    caps: tuple[int, ...] = (32, 128, 512, 1536)
    prompt_tokens: int = 512
    kv_tokens: int = 8704
    requests: int = 128
    token_budget: int = 256
    threads: int = 1
    seed: int = 0


def parse_caps(text: str) -> tuple[int, ...]:
    return parse_counts("--caps", text, 2)


def plan(options: BatchingOptions, context_length: int) -> list[Queue]:
    planned = [queues.every_eighth_long(QUEUE_PROMPT, SHORT, LONG), queues.uniform(QUEUE_PROMPT, EQUAL)]
    planned += [_exponential(options, cap, options.requests) for cap in options.caps]
    for queue in planned:
        queues.check(queue, context_length)
    return planned


def measure(model: str, device: Device, options: BatchingOptions, notify: Notify) -> dict[str, Any]:
    """Run the experiment and return its document. Raises InvalidBenchmark."""
    planned = plan(options, device.context_length)
    _check_memory(planned, device)
    points = []
    for size in curve.SIZES:
        name, tokens = f"batch size {size}", size * curve.OUTPUT
        points.append(curve.measure(size, _setup(device, options, name, tokens, notify)))
    measured = [_queue(queue, device, options, notify) for queue in planned]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "model_id": Path(model).resolve().name,
        "cores": len(usable_cores()),
        "threads": options.threads,
        "load_average": os.getloadavg()[0],
        "token_budget": options.token_budget,
        "batch_sizes": points,
        "queues": measured,
        "sentence": sentence(measured),
    }


def sentence(measured: Sequence[Mapping[str, Any]]) -> str:
    eighth, equal = measured[0], measured[1]
    runs = eighth["runs"]
    latency = {name: runs[name]["p50_latency_ms"] / 1e3 for name in (PAGED, STATIC_BATCH)}
    return (
        f"with every eighth answer long, continuous batching gives {eighth['over_batch']['throughput']:.1f} times the "
        f"output tokens/s of static batches (p50 latency {latency[PAGED]:.3g} s instead of "
        f"{latency[STATIC_BATCH]:.3g} s); with equal answers {equal['over_batch']['throughput']:.1f} times"
    )


def total_tokens(contender: str, queue: Queue) -> int:
    batches = queue.batches
    if contender not in (STATIC_ALL, STATIC_BATCH):
        return sum(queue.outputs)
    longest = max(queue.outputs)
    chosen = [batches[index] for index in sample(len(batches))]
    return sum(len(batch) * (longest if contender == STATIC_ALL else max(batch)) for batch in chosen)


def _exponential(options: BatchingOptions, cap: int, count: int) -> Queue:
    return queues.exponential(options.prompt_tokens, options.kv_tokens, cap, count, options.seed)


def _setup(device: Device, options: BatchingOptions, name: str, total: int, notify: Notify) -> Setup:
    notify(name, 0, total)
    return Setup(device, options.token_budget, options.seed, lambda tokens: notify(name, tokens, total))


def _queue(queue: Queue, device: Device, options: BatchingOptions, notify: Notify) -> dict[str, Any]:
    runs: dict[str, Run] = {}
    for contender in CONTENDERS:
        name, total = f"{queue.name}: {contender}", total_tokens(contender, queue)
        runs[contender] = run(contender, queue, _setup(device, options, name, total, notify))
    summaries = {name: one.summary(queue) for name, one in runs.items()}
    return {
        "name": queue.name,
        "requests": len(queue.outputs),
        "prompt_tokens": queue.prompt_len,
        "limit": queue.limit,
        "kv_tokens": queue.kv_tokens,
        "batch_size": queue.batch_size,
        "reserved": queue.reserved,
        "runs": summaries,
        "spans": {name: _spans(one) for name, one in runs.items()},
        **_ratios(queue, summaries, options),
    }


def _spans(one: Run) -> list[list[float]]:
    return [[answer.begun_at, answer.tokens[0], answer.tokens[-1], answer.freed_at] for answer in one.answers]


def _ratios(
    queue: Queue, runs: Mapping[str, Mapping[str, Any]], options: BatchingOptions
) -> dict[str, dict[str, float]]:
    arithmetic = dict(zip(("over_all", "over_batch"), slots.ratios(queue), strict=True))
    published = arithmetic
    if queue.is_exponential:
        of_1000 = _exponential(options, queue.limit, PUBLISHED_REQUESTS)
        published = dict(zip(("over_all", "over_batch"), slots.ratios(of_1000), strict=True))
    ours = runs[PAGED]
    return {
        key: {
            "throughput": ours["output_throughput"] / runs[static]["output_throughput"],
            "useful_per_step": ours["useful_per_step"] / runs[static]["useful_per_step"],
            "slots": arithmetic[key],
            "slots_of_1000": published[key],
        }
        for key, static in (("over_all", STATIC_ALL), ("over_batch", STATIC_BATCH))
    }


def _check_memory(planned: Sequence[Queue], device: Device) -> None:
    size = device.block_size
    has = device.num_blocks // len(device.windows) * size
    needed = max(curve.kv_tokens(size), *(queue.kv_tokens + size * queue.batch_size for queue in planned))
    if has < needed:
        raise InvalidBenchmark("--kv-memory", f"memory for at least {needed:,} tokens", f"{has:,}")
