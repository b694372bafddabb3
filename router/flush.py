"""Requests into Redis, behind the tokens: nothing waits for it but whoever accepts a request.

    tokens    a b c d e f g h |end
    writes    ----abc----defg-h           every flush_ms what is new of all requests at once, an end soon

While Redis is away nothing stops: what was not written stays here, and the first write that gets through brings it all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from typing import Protocol

from router.request import Course
from runtime import logs
from state.errors import StateError, Superseded
from state.journal import Entry
from state.owned import OwnedRequest
from state.requests import Requests

AWAY_SECONDS = 0.5
"""Between two tries while Redis is away."""
KEPT_ENDED = 10_000
"""Ended requests that are kept for a Redis that is away; the oldest go first."""

_log = logs.get(__name__)


class Written(Protocol):
    """A request that is written: its owner's side of it, and what is answered."""

    owned: OwnedRequest
    course: Course

    def superseded(self, error: Superseded) -> None:
        """Another router owns it."""

    def settled(self) -> None:
        """Nothing more of it is written."""


class Flusher:
    """The one writer of requests. ``close`` ends its task after one last write."""

    def __init__(self, requests: Requests, flush_ms: int) -> None:
        self.is_away = False
        self._requests = requests
        self._interval = flush_ms / 1000
        self._running: dict[OwnedRequest, Written] = {}
        self._ended: dict[OwnedRequest, Written] = {}
        self._something = asyncio.Event()  # there is something that is not ended
        self._soon = asyncio.Event()  # something ended
        self._idle = asyncio.Event()
        self._idle.set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> asyncio.Task[None]:
        self._task = asyncio.create_task(self._run())
        return self._task

    def begin(self, written: Written) -> None:
        """It is written from now on, until it has ended and that is written too."""
        self._running[written.owned] = written
        self._idle.clear()
        self._something.set()

    def end(self, written: Written) -> None:
        """It is complete: written soon, then forgotten. Nothing happens for one that is not written."""
        if self._running.pop(written.owned, None) is not None:
            self._ended[written.owned] = written
            while len(self._ended) > KEPT_ENDED:
                self._ended.pop(next(iter(self._ended))).settled()
            self._soon.set()
            self._something.set()

    def forget(self, written: Written) -> None:
        """Write nothing more of it."""
        self._running.pop(written.owned, None)
        self._ended.pop(written.owned, None)
        self._see_if_idle()
        written.settled()

    def rewrite(self) -> None:
        """Redis was emptied: all that is here is written whole."""
        for owned in (*self._running, *self._ended):
            owned.stored, owned.told = 0, None
        self._something.set()
        self._soon.set()

    async def idle(self) -> None:
        """Waits until nothing is left to write."""
        await self._idle.wait()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await self._flush([*self._running, *self._ended])

    async def _run(self) -> None:
        """Ends are written as they come, everything at each tick."""
        clock = asyncio.get_running_loop().time
        while True:
            await self._something.wait()
            tick = clock() + (AWAY_SECONDS if self.is_away else self._interval)
            while not self.is_away and await self._ended_before(tick):
                await self._flush(list(self._ended))
            await asyncio.sleep(tick - clock())
            await self._flush([*self._running, *self._ended])
            if not self._running and not self._ended:
                self._something.clear()

    async def _ended_before(self, tick: float) -> bool:
        """Whether something ends before that time."""
        try:
            async with asyncio.timeout_at(tick):
                await self._soon.wait()
        except TimeoutError:
            return False
        return True

    async def _flush(self, requests: Collection[OwnedRequest]) -> None:
        """One round trip for all of these that have news."""
        self._soon.clear()
        for owned in requests:
            if (written := self._running.get(owned)) is not None:
                append_new(owned, written.course)
        batch = [owned for owned in requests if owned.unwritten]
        try:
            lost = await self._requests.flush(batch) if batch else {}
        except StateError as error:
            self._failed(error)
            return
        if batch and self.is_away:
            self.is_away = False
            _log.info("the state store is back", requests=len(batch))
        self._settle(requests, lost)

    def _settle(self, requests: Collection[OwnedRequest], lost: Mapping[OwnedRequest, Superseded]) -> None:
        for owned in requests:
            written = self._running.get(owned) or self._ended.get(owned)
            if written is not None and owned in lost:
                self.forget(written)
                written.superseded(lost[owned])
            elif owned in self._ended and not owned.unwritten:
                self._ended.pop(owned).settled()
        self._see_if_idle()

    def _failed(self, error: StateError) -> None:
        if not self.is_away:
            _log.warning("the state store is away: requests go on", error=str(error))
        self.is_away = True

    def _see_if_idle(self) -> None:
        if not self._running and not self._ended:
            self._idle.set()


def append_new(owned: OwnedRequest, course: Course) -> None:
    """The course's new tokens become entries of the journal, with their logprobs if they have any."""
    if not owned.is_explained and course.is_explained:
        owned.explain(course.prompt_logprobs.packed())
    if len(course.tokens) > owned.length:
        first = owned.length
        owned.append((Entry(0, token) for token in course.tokens[first:]), course.logprobs.packed(first))
