"""Milliseconds of single steps of OpenVINO, computed in ``job.dtype`` with ``job.weights``: plain, int8 or int4.

Items whose ids are equal up to the last "/" are one case. They run together, and a step in which each gets a token
counts; those that end with their first token run one after the other, each from its start to that token.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from bench.baselines.openvino import Server, export, make_pipeline
from bench.comparison.subprocess_runner import Job, OnProgress
from bench.workloads import Item


def measure(job: Job, on_progress: OnProgress) -> dict[str, Any]:
    server, found = Server(make_pipeline(export(Path(job.model), job.weights), job)), dict[str, float]()
    cases = [(name, list(items)) for name, items in groupby(job.items, lambda item: item.id.rpartition("/")[0])]
    for name, items in cases:
        times = first_tokens(server, items) if items[0].output_len == 1 else steps(server, items)
        found[name] = statistics.median(times) * 1e3
        on_progress(len(found) / len(cases))
    return found


def first_tokens(server: Server, items: Sequence[Item]) -> list[float]:
    times = []
    for item in items:
        began = time.perf_counter()
        server.add(item)
        while item.id not in server.step():
            pass
        times.append(time.perf_counter() - began)
    return times


def steps(server: Server, items: Sequence[Item]) -> list[float]:
    times = []
    for item in items:
        server.add(item)
    left = Counter({item.id: item.output_len for item in items})
    while +left:
        began = time.perf_counter()
        tokens = list(server.step())
        if len(set(tokens)) == len(items):
            times.append(time.perf_counter() - began)
        left.subtract(tokens)
    return times[1:]  # the first one ends a prompt
