"""A machine is measured once, before anyone waits: what its steps cost, and with how many threads it is fastest.

    a few steps of the real model ──> seconds of each ──> Costs: the four numbers that are least off

Steps run on the device itself, before an engine gives its blocks an owner: nothing is left behind but bytes in blocks
that are free. A slow machine runs fewer steps, for the time is bounded and the most telling ones go first.
"""

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

PATIENCE_S = 3.0
"""Steps are measured as long as the next one would end within it; the first two in any case."""

ROUNDS = 3
"""How often each step is run, time allowing. The fastest counts: whatever else the machine does only makes slower."""

_CLEARLY = 0.85
"""Fewer threads are taken when they need less than this of the time: they leave cores to others, but noise is no
reason."""

Shape = Sequence[tuple[int, int]]
"""Of a step: for each row the computed tokens before it, and its own."""

DECODE, CHUNK, DECODES = ((0, 1),), ((0, 32),), ((0, 1),) * 8
SHAPES: Sequence[Shape] = (DECODE, CHUNK, DECODES, ((1024, 32),), ((0, 128),), ((1024, 1),) * 8)
"""They tell a step, a token, a row of logits and a pair apart. The most telling first."""

Clock = Callable[[], float]


def measure(device: Device, *, patience: float = PATIENCE_S, clock: Clock = time.perf_counter) -> StepCostModel:
    """What steps of this device cost. Shapes that its blocks have no room for are left out."""
    plans = [_plan(device, shape) for shape in SHAPES if _fits(device, shape)]
    device.run(plans[0])  # the very first step lays out memory
    ends = clock() + patience
    best: dict[int, float] = {}

    def known() -> StepCostModel:
        return fit([(plans[index].work, seconds) for index, seconds in best.items()])

    for index in list(range(len(plans))) * ROUNDS:
        if len(best) < 2 or clock() + known().seconds(plans[index].work) <= ends:
            best[index] = min(best.get(index, float("inf")), _seconds(device, plans[index], clock))
    return known()


def fit(samples: Sequence[tuple[StepWork, float]]) -> StepCostModel:
    """The costs, none of them negative, with the least squares of relative errors over (work, seconds > 0) samples.

    With four unknowns every choice of those that are not nought is tried.
    """
    rows = np.array([[1.0, *work] for work, _ in samples])
    seconds = np.array([took for _, took in samples])
    scaled = rows / seconds[:, None]
    least, found = float("inf"), np.zeros(4)
    for chosen in (list(some) for count in range(1, 5) for some in combinations(range(4), count)):
        values = np.linalg.lstsq(scaled[:, chosen], np.ones(len(samples)), rcond=None)[0]
        error = float(((scaled[:, chosen] @ values - 1.0) ** 2).sum())
        if (values >= 0).all() and error < least:
            least, found = error, np.zeros(4)
            found[chosen] = values
    return StepCostModel(*(float(value) for value in found))


def choose_threads(
    device: Device, cores: int, use: Callable[[int], object], *, clock: Clock = time.perf_counter
) -> int:
    """Try all cores, half and a quarter of them, and ``use`` what is fastest in decodes and chunks together.

    Two hardware threads of one core may be slower than one of them. On a slow machine fewer are tried.
    """
    plans = [_plan(device, shape) for shape in (DECODE, CHUNK, DECODES) if _fits(device, shape)]
    chosen, fastest, began = cores, float("inf"), clock()
    for threads in dict.fromkeys(max(1, cores >> halvings) for halvings in range(3)):
        if threads < cores and clock() - began > PATIENCE_S / 2:
            break
        use(threads)
        device.run(plans[0])  # threads are made at their first use
        ends = clock() + PATIENCE_S / 4
        score = math.prod(_fastest(device, plan, ends, clock) for plan in plans)
        if score < fastest * _CLEARLY ** len(plans):
            chosen, fastest = threads, score
    use(chosen)
    return chosen


def _fastest(device: Device, plan: StepPlan, ends: float, clock: Clock) -> float:
    """Seconds of the fastest of ``ROUNDS`` runs; of those that had begun when the time was over."""
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
    """A step of that shape, on blocks that are nobody's yet."""
    rows, first = list[Row](), 0
    for context, tokens in shape:
        stop = first + -(-(context + tokens) // device.block_size)
        ids = (0,) * (context + tokens)
        rows.append(Row(Request("warm-up", ids), ids, context, len(ids), array("i", range(first, stop)), True))
        first = stop
    return StepPlan(tuple(rows), sum(tokens for _, tokens in shape))


def _fits(device: Device, shape: Shape) -> bool:
    ends = [context + tokens for context, tokens in shape]
    return max(ends) <= device.context_length and sum(-(-end // device.block_size) for end in ends) <= device.num_blocks
