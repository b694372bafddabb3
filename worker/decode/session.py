"""The worker's side of a session with a router: ordered messages and heartbeats."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import grpc

from decant.protos import worker_pb2 as wire
from decant.runtime.connections.heartbeat import HEARTBEAT_SECONDS, HeartbeatMonitor
from decant.runtime.connections.peer import UnknownMessages
from decant.runtime.error_details import Reason
from decant.runtime.errors import Aborted, ServiceError
from decant.runtime.telemetry import logs


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Limits of a session; it ends when the router leaves more messages unread, or one of them for longer."""

    heartbeat_s: float = HEARTBEAT_SECONDS
    max_unread: int = 10_000
    max_unread_s: float = 10.0
    hello_s: float = 5.0
    """Time for the hello after a call begins."""
    last_write_s: float = 0.5
    """Time for the write in progress at the end: a router that does not read would block it."""


Write = Callable[[wire.WorkerMessage], Awaitable[None]]

_log = logs.get(__name__)


class RouterSession:
    """One router's session at this worker: a queue of messages to it, its heartbeats, and the slots of its runs.

    `DecodeService` makes it for a call and closes it. Runs send by it; it ends by itself if its router reads too
    slowly.
    """

    def __init__(
        self,
        router: wire.Peer,
        make_heartbeat: Callable[[RouterSession], wire.Heartbeat],
        limits: SessionLimits | None = None,
    ) -> None:
        self.router = router
        self._limits = limits or SessionLimits()
        self.unknown = UnknownMessages(router.id)
        self.routers_sent: frozenset[tuple[str, int]] = frozenset()
        """Id and incarnation, as in the last heartbeat with `routers`."""
        self._make_heartbeat = make_heartbeat
        self._outgoing = asyncio.Queue[tuple[int, wire.WorkerMessage] | None]()  # with the tick of `send`
        self._ticks = 0
        self._write_tick: int | None = None  # tick of the message that is being written
        self._ended = asyncio.Event()
        self._error: ServiceError | None = None
        self._free_slots: list[int] = []
        self._slots = 0
        self._heartbeat_monitor = HeartbeatMonitor(self._limits.heartbeat_s)
        self._was_suspect = False

    def send(self, message: wire.WorkerMessage) -> None:
        if self._ended.is_set():
            return
        self._outgoing.put_nowait((self._ticks, message))
        if self._outgoing.qsize() > self._limits.max_unread:
            detail = f"the router left more than {self._limits.max_unread} messages unread"
            self.close(Aborted(Reason.QUEUE_FULL, detail))

    def finish(self) -> None:
        """Close the session after the queued messages."""
        self._outgoing.put_nowait(None)

    def close(self, error: ServiceError) -> None:
        """Close the session at once, with ``error``; the first counts."""
        if not self._ended.is_set():
            self._error = error
            self._ended.set()

    def take_slot(self) -> int:
        if self._free_slots:
            return heapq.heappop(self._free_slots)
        self._slots += 1
        return self._slots - 1

    def free_slot(self, slot: int) -> None:
        heapq.heappush(self._free_slots, slot)

    async def serve(
        self,
        requests: AsyncIterator[wire.RouterMessage],
        write: Write,
        handle: Callable[[RouterSession, wire.RouterMessage], None],
    ) -> None:
        writing = asyncio.create_task(self._write(write))
        parts = (self._ended.wait(), self._read(requests, handle), self._send_heartbeats())
        jobs: list[asyncio.Task[object]] = [writing, *[asyncio.create_task(part) for part in parts]]
        try:
            await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._ended.set()
            self._outgoing.put_nowait(None)
            # gRPC loses a cancelled write, and possibly the call's status with it.
            await asyncio.wait([writing], timeout=self._limits.last_write_s)
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
            self._heartbeat_monitor.reset()
            if not message.HasField("heartbeat") or message.heartbeat.renew:
                handle(self, message)

    async def _write(self, write: Write) -> None:
        try:
            while (entry := await self._outgoing.get()) is not None and not self._ended.is_set():
                self._write_tick, message = entry
                await write(message)
                self._write_tick = None
        except (grpc.aio.InternalError, grpc.aio.UsageError):
            return  # the router has left

    async def _send_heartbeats(self) -> None:
        limits = self._limits
        while True:
            await asyncio.sleep(limits.heartbeat_s)
            self.send(wire.WorkerMessage(heartbeat=self._make_heartbeat(self)))
            self._heartbeat_monitor.tick()
            self._watch()
            self._ticks += 1
            if (
                self._write_tick is not None
                and (self._ticks - self._write_tick) * limits.heartbeat_s > limits.max_unread_s
            ):
                self.close(Aborted(Reason.QUEUE_FULL, f"the router read nothing for {limits.max_unread_s:g} s"))

    @property
    def is_lost(self) -> bool:
        return self._heartbeat_monitor.is_lost

    def _watch(self) -> None:
        is_suspect = self._heartbeat_monitor.is_suspect
        if is_suspect and not self._was_suspect:
            _log.warning("router is silent", router=self.router.id, seconds=self._heartbeat_monitor.seconds)
        elif self._was_suspect and not is_suspect:
            _log.info("router is no longer silent", router=self.router.id)
        self._was_suspect = is_suspect
