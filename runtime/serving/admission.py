"""A bounded priority queue in front of a bounded number of slots, on one event loop.

enter --slot free--------------------------> active --release--> the first waiters get the free slots
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
    """``may_start`` may keep slots empty; its owner calls ``grant`` when its answer may have changed to true."""

    def __init__(
        self,
        max_active: int,
        queue_limit: int,
        clock: Callable[[], float] = time.monotonic,
        may_start: Callable[[], bool] = lambda: True,
    ) -> None:
        self.active = 0
        self._max_active = max_active
        self._queue_limit = queue_limit
        self._queue: list[_Waiter] = []  # sorted; empty whenever a slot is free
        self._numbers = count()
        self._clock = clock
        self._may_start = may_start

    @property
    def waiting(self) -> int:
        return len(self._queue)

    async def enter(self, priority: int, deadline: Deadline) -> AdmissionSlot:
        """Wait for a slot, which the caller must ``release``. Raises QueueFull, DeadlineExceeded."""
        deadline.check()
        self.grant()  # a new request never overtakes one that may start now
        if not self._queue and self._has_free_slot():
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
                self._release()
            else:
                self._remove(waiter)
            if limit.expired():
                raise DeadlineExceeded from None
            raise

    def grant(self) -> None:
        """Give free slots to the first waiters."""
        while self._queue and self._has_free_slot():
            granted = self._queue.pop(0)[2]
            if not granted.done():
                self.active += 1
                granted.set_result(None)

    def _has_free_slot(self) -> bool:
        return self.active < self._max_active and self._may_start()

    def _release(self) -> None:
        self.active -= 1
        self.grant()

    def _remove(self, waiter: _Waiter) -> None:
        index = bisect_left(self._queue, waiter)
        if index < len(self._queue) and self._queue[index] is waiter:
            del self._queue[index]


class AdmissionSlot:
    """An active request; ``release`` is idempotent."""

    def __init__(self, admission: Admission) -> None:
        self._admission: Admission | None = admission

    def release(self) -> None:
        if self._admission is not None:
            admission, self._admission = self._admission, None
            admission._release()
