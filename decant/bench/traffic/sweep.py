from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

MAX_DOUBLINGS = 8
HALVINGS = 3
"""Result: within an eighth of the last doubling."""

Run = dict[str, Any]


async def sweep(begin: float, run: Callable[[float], Awaitable[Run]], keeps: Callable[[Run], bool]) -> None:
    """Double the rate until a run misses, then halve the interval. Only `begin` runs if it misses."""
    kept, missed = 0.0, begin
    for _ in range(MAX_DOUBLINGS + 1):
        if not keeps(await run(missed)):
            break
        kept, missed = missed, 2 * missed
    else:
        return
    if not kept:
        return
    for _ in range(HALVINGS):
        middle = (kept + missed) / 2
        kept, missed = (middle, missed) if keeps(await run(middle)) else (kept, middle)
