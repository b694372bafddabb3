from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

MAX_DOUBLINGS = 8
HALVINGS = 3
"""Result: within an eighth of the last doubling."""

Run = dict[str, Any]


async def sweep(begin: float, run: Callable[[float], Awaitable[Run]], keeps: Callable[[Run], bool]) -> list[Run]:
    """Double the rate until a run misses, then halve the interval; return the runs by rate. Only `begin` runs if it
    misses.
    """
    runs = [await run(begin)]
    low = high = begin
    for _ in range(MAX_DOUBLINGS):
        if not keeps(runs[-1]):
            break
        low, high = high, 2 * high
        runs.append(await run(high))
    if low == high or keeps(runs[-1]):
        return runs
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        runs.append(await run(middle))
        low, high = (middle, high) if keeps(runs[-1]) else (low, middle)
    return sorted(runs, key=lambda one: float(one["request_rate"]))
