"""Time of kernels on a GPU: replays of a CUDA graph, so that the host does not count."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

Call = Callable[[], object]

REPLAYS = 5


def microseconds(calls: Sequence[Call], device: torch.device) -> float:
    """Median time of one call. Calls over different memory keep each other's out of the caches."""
    if device.type != "cuda":
        began = time.perf_counter()
        calls[0]()
        return (time.perf_counter() - began) * 1e6
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    times = []
    for _ in range(REPLAYS):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        times.append(float(first.elapsed_time(last)) * 1e3 / len(calls))
    return median(times)
