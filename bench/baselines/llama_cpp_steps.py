"""Milliseconds of single steps of llama.cpp with ``job.weights``: plain, int8 or int4, each on a GGUF file of its own.

Items whose ids are equal up to the last "/" are one case, as in ``openvino_steps``: they run together, a token each a
step, or those of one token one after the other, each from its start to that token.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from bench.baselines.llama_cpp import Context, Model, libraries
from bench.baselines.llama_cpp_file import export
from bench.comparison.subprocess_runner import Job, OnProgress
from bench.workloads import Item


def measure(job: Job, on_progress: OnProgress) -> dict[str, Any]:
    model, found = Model(export(Path(job.model), job.weights), libraries()), dict[str, float]()
    cases = [(name, list(items)) for name, items in groupby(job.items, lambda item: item.id.rpartition("/")[0])]
    for name, items in cases:
        is_prompt = items[0].output_len == 1
        longest = max(len(item.prompt_token_ids) + item.output_len for item in items)
        context = Context(model, 1 if is_prompt else len(items), longest, job.threads, job.token_budget)
        times = first_tokens(context, items) if is_prompt else steps(context, items)
        context.close()
        found[name] = statistics.median(times) * 1e3
        on_progress(len(found) / len(cases))
    return found


def first_tokens(context: Context, items: Sequence[Item]) -> list[float]:
    times = []
    for item in items:
        context.clear()
        began = time.perf_counter()
        prefill(context, item, 0)
        times.append(time.perf_counter() - began)
    return times


def steps(context: Context, items: Sequence[Item]) -> list[float]:
    for sequence, item in enumerate(items):
        prefill(context, item, sequence)
    times = []
    for step in range(items[0].output_len):
        rows = [
            (item.prompt_token_ids[step % len(item.prompt_token_ids)], len(item.prompt_token_ids) + step, sequence)
            for sequence, item in enumerate(items)
        ]
        began = time.perf_counter()
        context.decode(rows, len(rows))
        times.append(time.perf_counter() - began)
    return times[1:]


def prefill(context: Context, item: Item, sequence: int) -> None:
    context.decode([(token, at, sequence) for at, token in enumerate(item.prompt_token_ids)], 1)
