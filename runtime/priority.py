"""Order of requests in the queues of routers and workers.

The engine orders its sequences by the same rule. It counts steps, because it has no clock: see
`engine.scheduler.priority_key`.
"""

from __future__ import annotations

SECONDS_PER_PRIORITY = 2.5
"""Waiting time that one level of priority is worth. The engine's 256 steps take about as long, at 10 ms each."""


def queue_key(arrived_at: float, priority: int) -> float:
    """Sort key, most urgent first. It never changes, so no request starves: each is ahead of all that come late enough.

    `arrived_at`: seconds on the clock of the queue's process.
    """
    return arrived_at - priority * SECONDS_PER_PRIORITY
