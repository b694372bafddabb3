"""Order of requests in queues; `engine.scheduler.priority_key` is the same rule in steps."""

from __future__ import annotations

SECONDS_PER_PRIORITY = 2.5
"""About as long as the engine's STEPS_PER_PRIORITY steps of 10 ms; requests outside an engine have no step to count."""


def queue_key(arrived_at: float, priority: int) -> float:
    """Sort key, smallest first, with `arrived_at` in seconds. It never changes, so no request starves."""
    return arrived_at - priority * SECONDS_PER_PRIORITY
