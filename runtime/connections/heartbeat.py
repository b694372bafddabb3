"""Detection of a lost peer. Its silence is counted in ticks of this event loop, as messages stay unread while the loop
stalls; a stall of any length is one tick.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from math import ceil

HEARTBEAT_SECONDS = 0.25
"""Interval of heartbeats, in both directions; default length of a tick."""
SUSPECT_SECONDS = 1.0
"""A peer silent for so long gets no new work."""
SILENT_SECONDS = 3.0
"""A peer silent for so long is lost."""


class HeartbeatMonitor:
    """Time since a peer's last message. The owner calls ``tick`` every ``tick_seconds``, and ``reset`` on a message."""

    def __init__(self, tick_seconds: float = HEARTBEAT_SECONDS) -> None:
        self._ticks = 0
        self._tick_seconds = tick_seconds

    @property
    def seconds(self) -> float:
        return self._ticks * self._tick_seconds

    @property
    def is_suspect(self) -> bool:
        return self.seconds >= SUSPECT_SECONDS

    @property
    def is_lost(self) -> bool:
        return self.seconds >= SILENT_SECONDS

    def tick(self) -> None:
        self._ticks += 1

    def reset(self) -> None:
        self._ticks = 0


class LoopTimer:
    def __init__(self, seconds: float, then: Callable[[], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._left = max(1, ceil(seconds / HEARTBEAT_SECONDS))
        self._tick_seconds = seconds / self._left
        self._then = then
        self._handle = self._loop.call_later(self._tick_seconds, self._tick)

    def cancel(self) -> None:
        self._handle.cancel()

    def _tick(self) -> None:
        self._left -= 1
        if self._left:
            self._handle = self._loop.call_later(self._tick_seconds, self._tick)
        else:
            self._then()


@asynccontextmanager
async def loop_timeout(seconds: float) -> AsyncIterator[None]:
    """Limit a block as `asyncio.timeout` does, but in ticks. Raises TimeoutError."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as limit:
        timer = LoopTimer(seconds, lambda: limit.reschedule(loop.time()))
        try:
            yield
        finally:
            timer.cancel()
