"""Order of requests in the queues of routers and workers.

`engine.scheduler.priority_key` is the same rule in steps, because the engine has no clock.
"""

from __future__ import annotations

SECONDS_PER_PRIORITY = 2.5
"""Waiting time that one level of priority is worth; the engine's 256 steps at 10 ms."""


def queue_key(arrived_at: float, priority: int) -> float:
    """Sort key, most urgent first, for an arrival in seconds. It never changes, so no request starves."""
    return arrived_at - priority * SECONDS_PER_PRIORITY
