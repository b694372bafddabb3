"""Requests of a model that no worker serves: each waits for a first worker, within its own time limit.

A pool that is scaled to zero starts again for them: the queue metrics of the router count them.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from decant.runtime.connections.channel import Deadline
from decant.runtime.error_details import Reason
from decant.runtime.errors import RETRY_AFTER_SECONDS, DeadlineExceeded, QueueFull, Unavailable


@dataclass(frozen=True, slots=True, eq=False)
class WaitingForWorker:
    """A request that is not validated yet."""

    model: str
    prompt_tokens: int
    """A lower bound."""
    since: float
    """By the event loop's clock."""


class FirstWorkerQueue:
    """``is_served`` says whether a worker takes requests of a model, ``why_unserved`` why none does."""

    def __init__(
        self,
        limit_s: float,
        queue_limit: int,
        is_served: Callable[[str], bool],
        why_unserved: Callable[[str], Unavailable],
    ) -> None:
        self._limit_s = limit_s
        self._queue_limit = queue_limit
        self._is_served = is_served
        self._why_unserved = why_unserved
        self._waiting: dict[str, dict[WaitingForWorker, asyncio.Event]] = defaultdict(dict)
        self._is_closed = False

    def __iter__(self) -> Iterator[WaitingForWorker]:
        return (waiting for of_model in self._waiting.values() for waiting in of_model)

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def may_wait(self, model: str) -> bool:
        """Whether a request of ``model`` has to wait, and waiting can help: no incompatible worker is the reason."""
        if self._limit_s == 0 or self._is_served(model):
            return False
        return self._why_unserved(model).reason is Reason.NO_WORKER

    async def wait(
        self, model: str, prompt_tokens: int, deadline: Deadline, on_waiting: Callable[[], Awaitable[None]]
    ) -> None:
        """Return once a worker serves ``model``. Calls ``on_waiting`` first, unless the queue is full.

        Raises QueueFull; Unavailable after the limit, and when the router drains; DeadlineExceeded.
        """
        deadline.check()
        if len(self) >= self._queue_limit:
            raise QueueFull(self._queue_limit, retry_after=RETRY_AFTER_SECONDS)
        waiting = WaitingForWorker(model, prompt_tokens, asyncio.get_running_loop().time())
        changed = self._waiting[model][waiting] = asyncio.Event()
        try:
            await on_waiting()
            await self._wait_while_unserved(model, changed, deadline)
        finally:
            del self._waiting[model][waiting]
        if self._is_closed:
            raise Unavailable(Reason.DRAINING, "this router is draining", retry_after=RETRY_AFTER_SECONDS)
        if not self._is_served(model):
            raise self._why_unserved(model)

    async def _wait_while_unserved(self, model: str, changed: asyncio.Event, deadline: Deadline) -> None:
        left = deadline.remaining()
        is_deadline_first = left is not None and left < self._limit_s
        try:
            async with asyncio.timeout(left if is_deadline_first else self._limit_s):
                while self.may_wait(model) and not self._is_closed:
                    changed.clear()
                    await changed.wait()
        except TimeoutError:
            if is_deadline_first:
                raise DeadlineExceeded from None

    def notify(self, model: str) -> None:
        """Look again at ``model``: its workers have changed."""
        for changed in self._waiting[model].values():
            changed.set()

    def close(self) -> None:
        """Refuse the requests that wait, and those to come."""
        self._is_closed = True
        for model in self._waiting:
            self.notify(model)
