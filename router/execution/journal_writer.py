"""Writer of requests to Redis, behind their tokens: changes every flush_ms, an end at once. No token waits for a write.

While Redis is unavailable, changes stay here. Every `JournalTimings.probe_s` the smallest of them is written, and all
once that succeeds: until then, they are lost with this router. A request that Redis refuses with an error has a growing
pause of its own and delays no other.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from decant.router.request.token_stream import TokenStream
from decant.router.timings import JournalTimings
from decant.runtime.telemetry import logs
from decant.state.errors import StateError, StoreFault
from decant.state.journal import Entry
from decant.state.owned import OwnedRequest
from decant.state.requests import Displaced, Requests, WriteFailure

BUSY_SHARE = 0.2
"""Share of the time that slow flushes take at most..."""
MAX_BUSY_SECONDS = 1.0
"""...while this pause between them suffices."""
MAX_FAULTS = 3
"""Refused writes of an ended request, after which it is dropped."""
MAX_ENDED = 10_000
"""Kept while Redis is unavailable; the oldest are dropped first."""

_log = logs.get(__name__)


class JournaledRequest(Protocol):
    owned: OwnedRequest
    stream: TokenStream

    def on_superseded(self, error: Displaced) -> None:
        """Called if another router owns the request, or another request has its id."""

    def mark_persisted(self) -> None:
        """Called once nothing more of the request will be written."""


@dataclass(slots=True)
class _Fault:
    failures: int
    retry_at: float  # the event loop's clock


class JournalWriter:
    """Only writer of this router's accepted requests; `close` writes once more, after `run`."""

    def __init__(self, requests: Requests, flush_ms: int, timings: JournalTimings = JournalTimings()) -> None:
        self.is_unavailable = False
        self._requests = requests
        self._interval = flush_ms / 1000
        self._timings = timings
        self._running: dict[OwnedRequest, JournaledRequest] = {}
        self._ended: dict[OwnedRequest, JournaledRequest] = {}
        self._faults: dict[OwnedRequest, _Fault] = {}
        self._flush_seconds = 0.0  # the last flush of all requests
        self._has_work = asyncio.Event()  # any request is registered
        self._has_ended = asyncio.Event()  # a request has ended
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_unwritten(self) -> int:
        return len(self._ended)

    def begin(self, request: JournaledRequest) -> None:
        self._running[request.owned] = request
        self._idle.clear()
        self._has_work.set()

    def finish(self, request: JournaledRequest) -> None:
        if self._running.pop(request.owned, None) is not None:
            self._ended[request.owned] = request
            while len(self._ended) > MAX_ENDED:
                self.forget(next(iter(self._ended.values())))
            self._has_ended.set()
            self._has_work.set()

    def forget(self, request: JournaledRequest) -> None:
        self._running.pop(request.owned, None)
        self._ended.pop(request.owned, None)
        self._faults.pop(request.owned, None)
        self._check_idle()
        request.mark_persisted()

    def resync_all(self) -> None:
        """Write everything again, after Redis was emptied."""
        for owned in (*self._running, *self._ended):
            owned.synced_entries, owned.synced_state = 0, None
        self._faults.clear()
        self._has_work.set()
        self._has_ended.set()

    async def wait_idle(self) -> None:
        await self._idle.wait()

    async def close(self) -> None:
        await self._flush([*self._running, *self._ended])

    async def run(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            await self._has_work.wait()
            tick = clock() + self._pause()
            while not self.is_unavailable and clock() < tick and await self._ended_before(tick):
                await self._flush(list(self._ended))
            await asyncio.sleep(tick - clock())
            num_probed = await self._probe() if self.is_unavailable else 0
            if num_probed is None:
                continue
            began = clock()
            num_written = await self._flush([*self._running, *self._ended])
            self._flush_seconds = clock() - began
            if self.is_unavailable and num_written is not None and num_probed + num_written:
                self.is_unavailable = False
                _log.info("the state store is available again", requests=num_probed + num_written)
            if not self._running and not self._ended:
                self._has_work.clear()
                self.is_unavailable = False  # the next request finds out: no write is left

    def _pause(self) -> float:
        if self.is_unavailable:
            return self._timings.probe_s * random.uniform(0.5, 1.0)
        busy = self._flush_seconds * (1 - BUSY_SHARE) / BUSY_SHARE
        return max(self._interval, min(busy, MAX_BUSY_SECONDS))

    async def _probe(self) -> int | None:
        """Write the smallest change, if there is any; return the number of writes, None if Redis is unavailable."""
        due = self._due([*self._running, *self._ended])
        smallest = [min(due, key=lambda owned: owned.write_bytes)] if due else []
        return await self._write(smallest, smallest)

    async def _ended_before(self, tick: float) -> bool:
        try:
            async with asyncio.timeout_at(tick):
                await self._has_ended.wait()
        except TimeoutError:
            return False
        return True

    async def _flush(self, requests: Collection[OwnedRequest]) -> int | None:
        """Write what is due; return the number of requests, None if Redis is unavailable."""
        self._has_ended.clear()
        return await self._write(self._due(requests), requests)

    def _due(self, requests: Collection[OwnedRequest]) -> list[OwnedRequest]:
        """Append new tokens; return the requests that have something to write now."""
        now = asyncio.get_running_loop().time()
        for owned in requests:
            if (request := self._running.get(owned)) is not None and self._is_due(owned, now):
                try:
                    append_new(owned, request.stream)
                except ValueError as error:  # of this request: the others are written
                    self._schedule_retry(request, StoreFault(str(error)))
        return [owned for owned in requests if owned.needs_write and self._is_due(owned, now)]

    async def _write(self, batch: Sequence[OwnedRequest], requests: Collection[OwnedRequest]) -> int | None:
        """Write ``batch``, and handle the results of ``requests``, which contain it."""
        failures: Mapping[OwnedRequest, WriteFailure] = {}
        num_written: int | None = len(batch)
        try:
            failures = await self._requests.flush(batch) if batch else {}
        except StateError as error:  # a request with a reply before it counts as written
            self._on_unavailable(error)
            num_written = None
        self._handle_results(requests, failures)
        return num_written

    def _is_due(self, owned: OwnedRequest, now: float) -> bool:
        fault = self._faults.get(owned)
        return fault is None or fault.retry_at <= now

    def _handle_results(
        self, requests: Collection[OwnedRequest], failures: Mapping[OwnedRequest, WriteFailure]
    ) -> None:
        now = asyncio.get_running_loop().time()
        for owned in requests:
            request = self._running.get(owned) or self._ended.get(owned)
            if request is None:
                continue
            match failures.get(owned):
                case None if not owned.needs_write and self._is_due(owned, now):
                    self._faults.pop(owned, None)
                    if owned in self._ended:
                        self.forget(request)
                case None:
                    pass
                case StoreFault() as fault:
                    self._schedule_retry(request, fault)
                case error:
                    request.on_superseded(error)
                    self.forget(request)
        self._check_idle()

    def _schedule_retry(self, request: JournaledRequest, error: StoreFault) -> None:
        owned = request.owned
        failures = self._faults[owned].failures + 1 if owned in self._faults else 1
        if failures == 1:
            _log.error("a request can't be written to the state store", request_id=owned.key.id, error=str(error))
        retry_at = asyncio.get_running_loop().time() + self._timings.fault.seconds(failures)
        self._faults[owned] = _Fault(failures, retry_at)
        if owned in self._ended and failures >= MAX_FAULTS:
            _log.error("an ended request is dropped unwritten", request_id=owned.key.id, failures=failures)
            self.forget(request)

    def _on_unavailable(self, error: StateError) -> None:
        if not self.is_unavailable:
            _log.warning("the state store is unavailable: requests continue", error=str(error))
        self.is_unavailable = True

    def _check_idle(self) -> None:
        if not self._running and not self._ended:
            self._idle.set()


def append_new(owned: OwnedRequest, stream: TokenStream) -> None:
    if not owned.has_prompt_logprobs and stream.has_prompt_logprobs:
        owned.add_prompt_logprobs(stream.prompt_logprobs.packed())
    if stream.num_tokens > owned.length:
        for output in stream.outputs:
            first = owned.num_entries(output.index)
            if first < len(output.tokens):
                tokens = output.tokens[first:]
                owned.append((Entry(output.index, token) for token in tokens), output.logprobs.packed(first))
