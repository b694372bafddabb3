"""A bounded priority queue in front of a bounded number of slots, on one event loop.

enter --slot free--------------------------> active --leave--> the first waiter gets the slot
  |--all taken--> waits, ordered by `queue_key` -^
  |                 '--deadline passed, or cancelled--> removed
  '--queue full---> QueueFull
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left, insort
from collections.abc import Callable
from itertools import count

from decant.runtime.connections.channel import Deadline
from decant.runtime.errors import RETRY_AFTER_SECONDS, DeadlineExceeded, QueueFull
from decant.runtime.priority import queue_key

_Waiter = tuple[float, int, asyncio.Future[None]]
"""Sort key, arrival number, and a future for the slot."""


class Admission:
    def __init__(self, max_active: int, queue_limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.active = 0
        self._max_active = max_active
        self._queue_limit = queue_limit
        self._queue: list[_Waiter] = []  # sorted; empty whenever a slot is free
        self._numbers = count()
        self._clock = clock

    @property
    def waiting(self) -> int:
        return len(self._queue)

    async def enter(self, priority: int, deadline: Deadline) -> AdmissionSlot:
        """Wait for a slot, which the caller must ``leave``. Raises QueueFull, DeadlineExceeded."""
        deadline.check()
        if self.active < self._max_active:
            self.active += 1
            return AdmissionSlot(self)
        if len(self._queue) >= self._queue_limit:
            raise QueueFull(self._queue_limit, retry_after=RETRY_AFTER_SECONDS)
        await self._wait(queue_key(self._clock(), priority), deadline)
        return AdmissionSlot(self)

    def enter_at_once(self) -> AdmissionSlot:
        """Take a slot for a request that another router admitted, also beyond ``max_active``."""
        self.active += 1
        return AdmissionSlot(self)

    async def _wait(self, order: float, deadline: Deadline) -> None:
        granted = asyncio.get_running_loop().create_future()
        waiter = (order, next(self._numbers), granted)
        insort(self._queue, waiter)
        try:
            async with asyncio.timeout(deadline.remaining()) as limit:
                await granted
        except (TimeoutError, asyncio.CancelledError):
            # The slot may have been granted in the same moment.
            if granted.done() and not granted.cancelled():
                self._grant_next()
            else:
                self._forget(waiter)
            if limit.expired():
                raise DeadlineExceeded from None
            raise

    def _grant_next(self) -> None:
        while self._queue and self.active <= self._max_active:
            granted = self._queue.pop(0)[2]
            if not granted.cancelled():
                granted.set_result(None)
                return
        self.active -= 1

    def _forget(self, waiter: _Waiter) -> None:
        index = bisect_left(self._queue, waiter)
        if index < len(self._queue) and self._queue[index] is waiter:
            del self._queue[index]


class AdmissionSlot:
    """An active request; ``leave`` is idempotent."""

    def __init__(self, admission: Admission) -> None:
        self._admission: Admission | None = admission

    def leave(self) -> None:
        if self._admission is not None:
            admission, self._admission = self._admission, None
            admission._grant_next()
