"""Measures step costs and the best number of threads, before an engine uses the device's blocks."""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Sequence
from itertools import combinations

import numpy as np

from decant.engine.costs import StepCostModel, StepWork
from decant.engine.plan import Device, Row, StepPlan
from decant.engine.request import Request

TIME_LIMIT_S = 3.0
"""Seconds of all steps. The first two run in any case."""

ROUNDS = 3
"""The fastest run counts."""

_CLEAR_GAIN = 0.85
"""Fewer threads must take less than this share of the time."""

Shape = Sequence[tuple[int, int]]
"""Context and tokens of each row."""

DECODE, CHUNK, DECODES = ((0, 1),), ((0, 32),), ((0, 1),) * 8
SHAPES: Sequence[Shape] = (DECODE, CHUNK, DECODES, ((1024, 32),), ((0, 128),), ((1024, 1),) * 8)
"""They separate the four costs. The most informative first."""

Clock = Callable[[], float]


def measure(device: Device, *, time_limit_s: float = TIME_LIMIT_S, clock: Clock = time.perf_counter) -> StepCostModel:
    plans = [_plan(device, shape) for shape in SHAPES if _fits(device, shape)]
    device.run(plans[0])  # the first step allocates memory
    ends = clock() + time_limit_s
    best: dict[int, float] = {}

    def known() -> StepCostModel:
        return fit([(plans[index].work, seconds) for index, seconds in best.items()])

    for index in list(range(len(plans))) * ROUNDS:
        if len(best) < 2 or clock() + known().seconds(plans[index].work) <= ends:
            best[index] = min(best.get(index, float("inf")), _seconds(device, plans[index], clock))
    return known()


def fit(samples: Sequence[tuple[StepWork, float]]) -> StepCostModel:
    """Non-negative least squares of relative errors over (work, seconds > 0), by all subsets of non-zero costs."""
    rows = np.array([[1.0, *work] for work, _ in samples])
    seconds = np.array([took for _, took in samples])
    scaled = rows / seconds[:, None]
    least, costs = float("inf"), np.zeros(4)
    for chosen in (list(some) for count in range(1, 5) for some in combinations(range(4), count)):
        values = np.linalg.lstsq(scaled[:, chosen], np.ones(len(samples)), rcond=None)[0]
        error = float(((scaled[:, chosen] @ values - 1.0) ** 2).sum())
        if (values >= 0).all() and error < least:
            least, costs = error, np.zeros(4)
            costs[chosen] = values
    return StepCostModel(*(float(value) for value in costs))


def choose_threads(
    device: Device, cores: int, use: Callable[[int], object], *, clock: Clock = time.perf_counter
) -> int:
    plans = [_plan(device, shape) for shape in (DECODE, CHUNK, DECODES) if _fits(device, shape)]
    chosen, fastest, began = cores, float("inf"), clock()
    for threads in dict.fromkeys(max(1, cores >> halvings) for halvings in range(3)):
        if threads < cores and clock() - began > TIME_LIMIT_S / 2:
            break
        use(threads)
        device.run(plans[0])  # the first use creates threads
        ends = clock() + TIME_LIMIT_S / 4
        score = math.prod(_fastest(device, plan, ends, clock) for plan in plans)
        if score < fastest * _CLEAR_GAIN ** len(plans):
            chosen, fastest = threads, score
    use(chosen)
    return chosen


def _fastest(device: Device, plan: StepPlan, ends: float, clock: Clock) -> float:
    best = _seconds(device, plan, clock)
    for _ in range(ROUNDS - 1):
        if clock() < ends:
            best = min(best, _seconds(device, plan, clock))
    return best


def _seconds(device: Device, plan: StepPlan, clock: Clock) -> float:
    began = clock()
    device.run(plan)
    return max(clock() - began, 1e-9)


def _plan(device: Device, shape: Shape) -> StepPlan:
    rows, first = list[Row](), 0
    for context, tokens in shape:
        ids, blocks = (0,) * (context + tokens), list["array[int]"]()
        for _ in device.windows:
            stop = first + -(-len(ids) // device.block_size)
            blocks.append(array("i", range(first, stop)))
            first = stop
        rows.append(Row(Request("warm-up", ids), ids, context, len(ids), tuple(blocks), True))
    return StepPlan(tuple(rows), sum(tokens for _, tokens in shape))


def _fits(device: Device, shape: Shape) -> bool:
    ends = [context + tokens for context, tokens in shape]
    blocks = len(device.windows) * sum(-(-end // device.block_size) for end in ends)
    return max(ends) <= device.context_length and blocks <= device.num_blocks
