"""Order of requests in queues; `engine.scheduler.priority_key` is the same rule in steps."""

from __future__ import annotations

SECONDS_PER_PRIORITY = 2.5
"""The engine's 256 steps at 10 ms."""


def queue_key(arrived_at: float, priority: int) -> float:
    """Smallest first; `arrived_at` in seconds. It never changes, so no request starves."""
    return arrived_at - priority * SECONDS_PER_PRIORITY
