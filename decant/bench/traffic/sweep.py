from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

MAX_DOUBLINGS = 8
HALVINGS = 3
"""Result: within an eighth of the last doubling."""

Run = dict[str, Any]


async def sweep(begin: float, run: Callable[[float], Awaitable[Run]], keeps: Callable[[Run], bool]) -> None:
    """Double the rate until a run misses, then halve the interval. Only `begin` runs if it misses."""
    low, high = 0.0, begin
    for _ in range(MAX_DOUBLINGS + 1):
        if not keeps(await run(high)):
            break
        low, high = high, 2 * high
    else:
        return
    if not low:
        return
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if keeps(await run(middle)) else (low, middle)
