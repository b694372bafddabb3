"""Writes requests to Redis, after their tokens: no token waits for it.

    tokens    a b c d e f g h |end
    writes    ----abc----defg-h           every flush_ms the news of all requests, an end at once

While Redis is unavailable, requests go on and their news stays here. The next try comes after a growing pause, in round
trips of limited size, each of which counts. Slow flushes come less often. A request whose write Redis refuses with an
error is tried again alone: others do not wait for it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from decant.router.execution.token_stream import TokenStream
from decant.runtime import logs
from decant.state.errors import StateError, StoreFault
from decant.state.journal import Entry
from decant.state.owned import OwnedRequest
from decant.state.requests import Displaced, Lost, Requests

AWAY_SECONDS = 0.5
AWAY_MOST_SECONDS = 4.0
"""Between two tries while Redis is unavailable: the first and the longest pause, each up to half shorter at random."""
BUSY_SHARE = 0.2
"""Slow flushes take at most this share of the time..."""
BUSY_MOST_SECONDS = 1.0
"""...with at most this pause between them."""
FAULT_SECONDS = 1.0
FAULT_MOST_SECONDS = 30.0
"""Between two writes of a request that Redis refuses with an error."""
FAULT_TRIES = 3
"""Refused writes of an ended request before it is given up."""
MOST_DOUBLINGS = 10
"""Of a pause, until it is the longest."""
KEPT_ENDED = 10_000
"""Ended requests that are kept while Redis is unavailable; the oldest are dropped first."""

_log = logs.get(__name__)


class JournaledRequest(Protocol):
    """An execution, as far as it is written."""

    owned: OwnedRequest
    stream: TokenStream

    def superseded(self, error: Displaced) -> None:
        """The store reports another owner, or another request with this id."""

    def mark_persisted(self) -> None:
        """Nothing more is written."""


@dataclass(slots=True)
class _Fault:
    """A request whose write Redis refused with an error."""

    tries: int
    again_at: float  # the event loop's clock


class JournalWriter:
    """The only writer of this router's requests. Its owner runs `run` in a background task, then calls `close`."""

    def __init__(self, requests: Requests, flush_ms: int) -> None:
        self.is_unavailable = False
        self._requests = requests
        self._interval = flush_ms / 1000
        self._running: dict[OwnedRequest, JournaledRequest] = {}
        self._ended: dict[OwnedRequest, JournaledRequest] = {}
        self._faults: dict[OwnedRequest, _Fault] = {}
        self._failures = 0  # in a row, of whole flushes
        self._took_seconds = 0.0  # the last flush of all requests
        self._has_work = asyncio.Event()  # there is something that is not ended
        self._has_ended = asyncio.Event()  # something ended
        self._idle = asyncio.Event()
        self._idle.set()

    def begin(self, request: JournaledRequest) -> None:
        """Write it from now on, until its end is written."""
        self._running[request.owned] = request
        self._idle.clear()
        self._has_work.set()

    def end(self, request: JournaledRequest) -> None:
        """It is complete: write it soon, then forget it. No effect on a request that did not ``begin``."""
        if self._running.pop(request.owned, None) is not None:
            self._ended[request.owned] = request
            while len(self._ended) > KEPT_ENDED:
                self.forget(next(iter(self._ended.values())))
            self._has_ended.set()
            self._has_work.set()

    def forget(self, request: JournaledRequest) -> None:
        """Write nothing more of it."""
        self._running.pop(request.owned, None)
        self._ended.pop(request.owned, None)
        self._faults.pop(request.owned, None)
        self._check_idle()
        request.mark_persisted()

    def rewrite(self) -> None:
        """Redis was emptied: write everything that is here again."""
        for owned in (*self._running, *self._ended):
            owned.synced_entries, owned.synced_state = 0, None
        self._faults.clear()
        self._has_work.set()
        self._has_ended.set()

    async def idle(self) -> None:
        """Wait until nothing is left to write."""
        await self._idle.wait()

    async def close(self) -> None:
        """Write once more, after `run` was cancelled."""
        await self._flush([*self._running, *self._ended])

    async def run(self) -> None:
        """Ends are written as they come, everything at each tick."""
        clock = asyncio.get_running_loop().time
        while True:
            await self._has_work.wait()
            tick = clock() + self._pause()
            while not self.is_unavailable and clock() < tick and await self._ended_before(tick):
                await self._flush(list(self._ended))
            await asyncio.sleep(tick - clock())
            began = clock()
            await self._flush([*self._running, *self._ended])
            self._took_seconds = clock() - began
            if not self._running and not self._ended:
                self._has_work.clear()

    def _pause(self) -> float:
        """Seconds until the next flush of all requests."""
        if self.is_unavailable:
            return _doubled(AWAY_SECONDS, self._failures - 1, AWAY_MOST_SECONDS) * random.uniform(0.5, 1.0)
        busy = self._took_seconds * (1 - BUSY_SHARE) / BUSY_SHARE
        return max(self._interval, min(busy, BUSY_MOST_SECONDS))

    async def _ended_before(self, tick: float) -> bool:
        """Whether something ends before that time."""
        try:
            async with asyncio.timeout_at(tick):
                await self._has_ended.wait()
        except TimeoutError:
            return False
        return True

    async def _flush(self, requests: Collection[OwnedRequest]) -> None:
        """Write those that have news. What Redis acknowledged counts, even if it becomes unavailable meanwhile."""
        self._has_ended.clear()
        now = asyncio.get_running_loop().time()
        for owned in requests:
            if (request := self._running.get(owned)) is not None:
                append_new(owned, request.stream)
        batch = [owned for owned in requests if owned.needs_write and self._is_due(owned, now)]
        lost: Mapping[OwnedRequest, Lost] = {}
        try:
            lost = await self._requests.flush(batch) if batch else {}
        except StateError as error:
            self._failed(error)
        else:
            self._answered(len(batch))
        self._settle(requests, lost)

    def _is_due(self, owned: OwnedRequest, now: float) -> bool:
        fault = self._faults.get(owned)
        return fault is None or fault.again_at <= now

    def _settle(self, requests: Collection[OwnedRequest], lost: Mapping[OwnedRequest, Lost]) -> None:
        for owned in requests:
            request = self._running.get(owned) or self._ended.get(owned)
            if request is None:
                continue
            match lost.get(owned):
                case None if not owned.needs_write:
                    self._faults.pop(owned, None)
                    if owned in self._ended:
                        self.forget(request)
                case None:
                    pass
                case StoreFault() as fault:
                    self._set_aside(request, fault)
                case error:
                    request.superseded(error)
                    self.forget(request)
        self._check_idle()

    def _set_aside(self, request: JournaledRequest, error: StoreFault) -> None:
        """Redis refused this request's write: try it again alone, after a growing pause."""
        owned = request.owned
        tries = self._faults[owned].tries + 1 if owned in self._faults else 1
        if tries == 1:
            _log.error("a request can't be written to the state store", request_id=owned.key.id, error=str(error))
        pause = _doubled(FAULT_SECONDS, tries - 1, FAULT_MOST_SECONDS)
        self._faults[owned] = _Fault(tries, asyncio.get_running_loop().time() + pause)
        if owned in self._ended and tries >= FAULT_TRIES:
            _log.error("an ended request is given up unwritten", request_id=owned.key.id, tries=tries)
            self.forget(request)

    def _failed(self, error: StateError) -> None:
        if not self.is_unavailable:
            _log.warning("the state store is away: requests go on", error=str(error))
        self.is_unavailable = True
        self._failures += 1

    def _answered(self, written: int) -> None:
        if not written:
            return
        self._failures = 0
        if self.is_unavailable:
            self.is_unavailable = False
            _log.info("the state store is back", requests=written)

    def _check_idle(self) -> None:
        if not self._running and not self._ended:
            self._idle.set()


def _doubled(seconds: float, times: int, most: float) -> float:
    """At most ``most``, after any number of failures: a float overflows after 1,023 doublings."""
    return min(seconds * float(2 ** min(times, MOST_DOUBLINGS)), most)


def append_new(owned: OwnedRequest, stream: TokenStream) -> None:
    """Append the stream's new tokens to the journal, with their logprobs."""
    if not owned.has_prompt_logprobs and stream.has_prompt_logprobs:
        owned.add_prompt_logprobs(stream.prompt_logprobs.packed())
    if len(stream.tokens) > owned.length:
        first = owned.length
        owned.append((Entry(0, token) for token in stream.tokens[first:]), stream.logprobs.packed(first))
