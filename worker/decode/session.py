"""One session with one router: what is said to it, in order, and that it and this worker live.

requests ──> read ──> hear                 tell ──> outgoing ──> write ──> the router
              │  end of the stream                     ^ beats, four a second, whatever the engine does
              └──> over <── end(error) <── too far behind, replaced, drained
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc

from decant.protos import worker_pb2 as wire
from decant.runtime import logs
from decant.runtime.error_details import Reason
from decant.runtime.errors import Aborted, ServiceError
from decant.runtime.heartbeat import HEARTBEAT_SECONDS, Silence
from decant.runtime.peer import UnknownMessages

MAX_BEHIND = 10_000
"""Messages that a router may leave unread; then its session ends, and it can come back for what it lacks."""
MAX_UNREAD_SECONDS = 10.0
"""Age of the oldest message that a router may leave unread. What it lacks comes in fewer messages when it is back."""

LAST_WRITE_SECONDS = 0.5
"""For the write that is under way when a session ends. A router that reads nothing lets it take for ever."""

Write = Callable[[wire.WorkerMessage], Awaitable[None]]

_log = logs.get(__name__)


class RouterSession:
    """The worker's side. ``tell`` may be called at any time: after the end nothing of it is sent."""

    def __init__(self, router: wire.Peer, make_heartbeat: Callable[[RouterSession], wire.Heartbeat]) -> None:
        self.router = router
        self.unknown = UnknownMessages(router.id)
        self.routers_sent: frozenset[tuple[str, int]] = frozenset()
        """Routers with a live session here, as this one was notified of last."""
        self._make_heartbeat = make_heartbeat
        self._outgoing: asyncio.Queue[tuple[int, wire.WorkerMessage] | None] = (
            asyncio.Queue()
        )  # with the tick it came in
        self._ticks = 0
        self._written: int | None = None  # the tick of the message that is being written
        self._over = asyncio.Event()
        self._error: ServiceError | None = None
        self._free_slots: list[int] = []
        self._slots = 0
        self._silence = Silence()
        self._suspect = False

    # -- speaking -----------------------------------------------------------------------------------------------

    def send(self, message: wire.WorkerMessage) -> None:
        """Send a message after all that were told before."""
        if self._over.is_set():
            return
        self._outgoing.put_nowait((self._ticks, message))
        if self._outgoing.qsize() > MAX_BEHIND:
            self.end(Aborted(Reason.QUEUE_FULL, f"the router left more than {MAX_BEHIND} messages unread"))

    def end(self, error: ServiceError | None = None) -> None:
        """The session is over: with ``error`` at once, without one when all that was told has gone out."""
        if error is None:
            self._outgoing.put_nowait(None)
        elif not self._over.is_set():
            self._error = error
            self._over.set()

    def take_slot(self) -> int:
        """A number for an output, the smallest that is free."""
        if self._free_slots:
            return heapq.heappop(self._free_slots)
        self._slots += 1
        return self._slots - 1

    def free_slot(self, slot: int) -> None:
        heapq.heappush(self._free_slots, slot)

    # -- its life -----------------------------------------------------------------------------------------------

    async def serve(
        self,
        requests: AsyncIterator[wire.RouterMessage],
        write: Write,
        handle: Callable[[RouterSession, wire.RouterMessage], None],
    ) -> None:
        """Until either side is through, or raises what ``end`` or ``hear`` brought."""
        writing = asyncio.create_task(self._write(write))
        parts = (self._over.wait(), self._read(requests, handle), self._send_heartbeats())
        jobs: list[asyncio.Task[object]] = [writing, *[asyncio.create_task(part) for part in parts]]
        try:
            await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._over.set()
            self._outgoing.put_nowait(None)
            # Of a write that is cancelled gRPC never hears, and then the call's status may not go out either.
            await asyncio.wait([writing], timeout=LAST_WRITE_SECONDS)
            for job in jobs:
                job.cancel()
            await asyncio.wait(jobs)
        if self._error is not None:
            raise self._error
        for job in jobs:
            if not job.cancelled() and (error := job.exception()):
                raise error

    async def _read(
        self, requests: AsyncIterator[wire.RouterMessage], handle: Callable[[RouterSession, wire.RouterMessage], None]
    ) -> None:
        async for message in requests:
            self._silence.reset()
            if not message.HasField("heartbeat") or message.heartbeat.renew:
                handle(self, message)

    async def _write(self, write: Write) -> None:
        try:
            while (entry := await self._outgoing.get()) is not None and not self._over.is_set():
                self._written, message = entry
                await write(message)
                self._written = None
        except (grpc.aio.InternalError, grpc.aio.UsageError):
            return  # the router has gone

    async def _send_heartbeats(self) -> None:
        """A beat says that this process lives; the step that runs is not asked."""
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            self.send(wire.WorkerMessage(heartbeat=self._make_heartbeat(self)))
            self._silence.tick()
            self._watch()
            self._ticks += 1
            if self._written is not None and (self._ticks - self._written) * HEARTBEAT_SECONDS > MAX_UNREAD_SECONDS:
                self.end(Aborted(Reason.QUEUE_FULL, f"the router read nothing for {MAX_UNREAD_SECONDS:g} s"))

    @property
    def is_lost(self) -> bool:
        """Whether the router has been silent for so long that it no longer counts as alive."""
        return self._silence.is_lost

    def _watch(self) -> None:
        """A silent router is suspect and no more: its runs are orphans only when the session breaks."""
        suspect = self._silence.is_suspect
        if suspect and not self._suspect:
            _log.warning("router is silent", router=self.router.id, seconds=self._silence.seconds)
        elif self._suspect and not suspect:
            _log.info("router is heard again", router=self.router.id)
        self._suspect = suspect
