"""Who may be at work, and who waits: a bounded queue before a bounded number of places.

    enter --place free-------------------------> at work --leave--> the place goes to the first who waits
      |--all taken--> waits, the first by order ----^
      |                 |--deadline over, or cancelled--> gone, nothing is left behind
      '--queue full---> QueueFull

The order of a request never changes: the time of its arrival, moved forward by a fixed time for each level of its
priority. So a level is worth that much waiting, and whoever waits is in the end before everyone who comes later.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left, insort
from itertools import count

from decant.runtime.channel import Deadline
from decant.runtime.errors import RETRY_AFTER_SECONDS, DeadlineExceeded, QueueFull
from decant.runtime.priority import queue_key

_Waiter = tuple[float, int, asyncio.Future[None]]
"""Order, number of arrival (which breaks ties), and the future that is done when the place is given."""


class Admission:
    """At most ``max_active`` requests at work, at most ``queue_limit`` that wait. Belongs to one event loop."""

    def __init__(self, max_active: int, queue_limit: int) -> None:
        self.active = 0
        self._max_active = max_active
        self._queue_limit = queue_limit
        self._queue: list[_Waiter] = []  # sorted; empty whenever a place is free
        self._numbers = count()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    async def enter(self, priority: int, deadline: Deadline) -> AdmissionSlot:
        """Waits for a place, which the caller gives back with ``leave``. Raises QueueFull, DeadlineExceeded."""
        deadline.check()
        if self.active < self._max_active:
            self.active += 1
            return AdmissionSlot(self)
        if len(self._queue) >= self._queue_limit:
            raise QueueFull(self._queue_limit, retry_after=RETRY_AFTER_SECONDS)
        await self._turn(queue_key(time.monotonic(), priority), deadline)
        return AdmissionSlot(self)

    def enter_at_once(self) -> AdmissionSlot:
        """A place for what was admitted elsewhere, beyond the number if need be."""
        self.active += 1
        return AdmissionSlot(self)

    async def _turn(self, order: float, deadline: Deadline) -> None:
        given = asyncio.get_running_loop().create_future()
        waiter = (order, next(self._numbers), given)
        insort(self._queue, waiter)
        try:
            async with asyncio.timeout(deadline.remaining()) as limit:
                await given
        except (TimeoutError, asyncio.CancelledError):
            # The place may have been given at the very moment that its taker left.
            if given.done() and not given.cancelled():
                self._pass_on()
            else:
                self._forget(waiter)
            if limit.expired():
                raise DeadlineExceeded from None
            raise

    def _pass_on(self) -> None:
        """A place is free: it goes to the first who still waits, unless there are too many at work already."""
        while self._queue and self.active <= self._max_active:
            given = self._queue.pop(0)[2]
            if not given.cancelled():
                given.set_result(None)
                return
        self.active -= 1

    def _forget(self, waiter: _Waiter) -> None:
        index = bisect_left(self._queue, waiter)
        if index < len(self._queue) and self._queue[index] is waiter:
            del self._queue[index]


class AdmissionSlot:
    """A place. Whoever holds it gives it back once; more often does no harm."""

    def __init__(self, admission: Admission) -> None:
        self._admission: Admission | None = admission

    def leave(self) -> None:
        if self._admission is not None:
            admission, self._admission = self._admission, None
            admission._pass_on()
