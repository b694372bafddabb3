"""The one stream between this router and one worker, for as long as both live.

    opening --welcome--> open --breaks--> opening ... after 100 ms, 200 ms, ... 1 s
       |                   |                 |
       |                   |                 |-- the connection is refused: the runs there have lost their worker now
       |                   |                 '-- still not open after RECONNECT_SECONDS: then
       |                   '-- silent: suspect after 1 s, broken after 3 s
       '-- another incarnation answers, or nothing needs the session any more: over

What the router sends leaves in one queue (`outgoing`). Heartbeats have a task of their own; they carry the renewals of
tickets and the runs to forget.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc

from decant.protos import worker_pb2 as wire
from decant.protos import worker_pb2_grpc as services
from decant.router.workers.outgoing import Outgoing
from decant.router.workers.session_runs import SessionRuns
from decant.router.workers.stream_io import StreamBroken, read, write
from decant.router.workers.subscription import RunSubscription, SessionDependent, SessionObserver, key_of
from decant.runtime import logs
from decant.runtime.error_details import Reason
from decant.runtime.heartbeat import HEARTBEAT_SECONDS, LoopTimer, Silence, loop_timeout
from decant.runtime.peer import UnknownMessages, same_incarnation
from decant.runtime.shutdown import race

RECONNECT_SECONDS = 1.0
"""After a break, before the runs there are given up."""
WELCOME_SECONDS = 5.0
FIRST_BACKOFF_SECONDS = 0.1
LAST_BACKOFF_SECONDS = 1.0
STUCK_MS = 2_000
GIVEN_UP_MS = 10_000
STUCK_STEPS = 8
"""A step is stuck when it is older than STUCK_MS and than so many of the longest steps of its size; runs move elsewhere
when it is also older than GIVEN_UP_MS."""

_log = logs.get(__name__)


class WorkerSession:
    """Lives on one event loop, in the task that calls ``run``."""

    def __init__(
        self, router: wire.Peer, worker: wire.Peer, channel: grpc.aio.Channel, observer: SessionObserver
    ) -> None:
        self.worker = worker
        self.over = False
        """The worker is another incarnation or speaks another protocol, or the router leaves: never open again."""
        self.tried = asyncio.Event()
        """Set once the session was opened, or could not be."""
        self.guests: set[SessionDependent] = set()
        self.unclaimed: set[bytes] = set()
        """The worker's tickets that no decode worker has yet."""
        self.renewed: set[bytes] = set()
        """The worker's tickets that decode workers renewed since the last heartbeat."""
        self.unknown = UnknownMessages(worker.id)
        self._router = router
        self._stub = services.DecodeStub(channel)
        self._observer = observer
        self._heartbeat = wire.Heartbeat()
        self._silence = Silence()
        self._outgoing = Outgoing()
        self._runs = SessionRuns(worker.id, self._outgoing)
        self._reconnect_grace: LoopTimer | None = None

    @property
    def is_open(self) -> bool:
        return self._outgoing.is_open

    @property
    def is_busy(self) -> bool:
        """Whether the worker has anything of this router's."""
        return bool(self._runs or self.guests)

    @property
    def is_suspect(self) -> bool:
        return self._silence.is_suspect

    @property
    def is_stuck(self) -> bool:
        return self._has_step_older_than(STUCK_MS)

    @property
    def conflicts(self) -> int:
        """Tokens that differed from the known ones at their position."""
        return self._runs.conflicts

    # What the router sends

    def start(self, run: RunSubscription) -> None:
        """Start a run, or adopt it; while no session is open, the next one does."""
        self._runs.add(run)
        if self.is_open:
            self._outgoing.send(run.opening_message())
        else:
            self._start_reconnect_grace()

    def abandon(self, run: RunSubscription, cancel: wire.Cancel) -> None:
        """Cancel a run, in any state. Nothing more is reported of it."""
        if self._runs.remove(run):
            self.cancel(cancel)

    def retire(self, run: RunSubscription) -> None:
        """Have the worker forget a run that another one has, with all its tokens. Nothing more is reported of it."""
        if self._runs.remove(run):
            self._outgoing.forget(run.run)

    def migrate(self, message: wire.Migrate) -> None:
        """Ask for a ticket for a run, or withdraw that."""
        if self.is_open:
            self._outgoing.send(wire.RouterMessage(migrate=message))

    def cancel(self, cancel: wire.Cancel) -> None:
        """Cancel whatever the worker has of a run."""
        self._outgoing.cancel(cancel)

    def finish(self) -> None:
        """End the session once the worker has received all that is queued. It is not opened again."""
        self.over = True
        self._outgoing.finish()

    # Its connections

    async def run(self, is_wanted: Callable[[], bool]) -> None:
        """Open the session, and again when it breaks, until it is over or not wanted. Cancel the task to end it."""
        backoff = FIRST_BACKOFF_SECONDS
        try:
            while not self.over and is_wanted():
                if await self._run_connection():
                    backoff = FIRST_BACKOFF_SECONDS
                if not self.over:
                    await asyncio.sleep(backoff)
                    backoff = min(2 * backoff, LAST_BACKOFF_SECONDS)
        finally:
            self.tried.set()
            self._give_up()

    async def _run_connection(self) -> bool:
        """From hello to break; whether it was ever open."""
        call = self._stub.Session()
        is_lost = False
        try:
            await self._open(call)
            await race(self._receive(call), self._outgoing.write(call), self._send_heartbeats())
        except (StreamBroken, TimeoutError) as error:
            self._log_break(error)
            is_lost = isinstance(error, StreamBroken) and error.is_of_dead_process
        except ValueError as error:  # malformed arrays: the worker would send them again
            self._log_break(error)
            is_lost = True
        finally:
            was_open = self.is_open
            self._outgoing.close()
            call.cancel()
            self.tried.set()
            self._on_disconnect()
        if is_lost:
            self._give_up()
        return was_open

    async def _open(self, call: Any) -> None:
        self._outgoing.begin()
        owned = self._runs.owned()
        hello = wire.Hello(router=self._router, worker=self.worker, owned=owned)
        async with loop_timeout(WELCOME_SECONDS):
            await write(call, wire.RouterMessage(hello=hello))
            answer = await read(call)
        if answer is None or not answer.HasField("welcome"):
            raise StreamBroken("no welcome")
        welcome = answer.welcome
        if not same_incarnation(welcome.worker, self.worker):
            raise StreamBroken("the welcome is of another incarnation", Reason.WRONG_PEER)
        self._outgoing.open(list(welcome.orphans))
        self._silence.reset()
        self._end_reconnect_grace()
        self.tried.set()
        self._runs.on_welcome(welcome, {key_of(each.run) for each in owned})
        _log.info("session open", worker=self.worker.id, held=len(welcome.runs), orphans=len(welcome.orphans))
        self._observer.opened(self)

    def _on_disconnect(self) -> None:
        self._heartbeat = wire.Heartbeat()
        self._runs.on_disconnect()
        if self.is_busy:
            self._start_reconnect_grace()

    def _log_break(self, error: Exception) -> None:
        if isinstance(error, StreamBroken) and error.reason in (Reason.WRONG_PEER, Reason.WRONG_PROTOCOL):
            self.over = True
        if self.is_open or self.over:
            _log.warning("session broke", worker=self.worker.id, error=str(error), over=self.over)

    def _start_reconnect_grace(self) -> None:
        """Keep the runs for RECONNECT_SECONDS while the session reconnects."""
        if self._reconnect_grace is None:
            self._reconnect_grace = LoopTimer(RECONNECT_SECONDS, self._give_up)

    def _end_reconnect_grace(self) -> None:
        if self._reconnect_grace is not None:
            self._reconnect_grace.cancel()
            self._reconnect_grace = None

    def _give_up(self, detail: str = "the session broke and did not come back") -> None:
        """All requests here go to other workers."""
        self._end_reconnect_grace()
        self._runs.fail_all(detail)
        for dependent in list(self.guests):
            dependent.on_session_lost()

    # The tasks of an open session, beside the one that writes the queue

    async def _send_heartbeats(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            self._silence.tick()
            if self._silence.is_lost:
                raise StreamBroken("no message was received for too long")
            self._outgoing.heartbeat(wire.Heartbeat(renew=self.unclaimed | self.renewed))
            self.renewed.clear()

    async def _receive(self, call: Any) -> None:
        while (message := await read(call)) is not None:
            self._silence.reset()
            self._handle(message)

    def _handle(self, message: wire.WorkerMessage) -> None:
        if self._runs.handle(message):
            return
        if message.HasField("heartbeat"):
            self._on_heartbeat(message.heartbeat)
        else:
            self.unknown.ignore()

    def _on_heartbeat(self, heartbeat: wire.Heartbeat) -> None:
        self._heartbeat = heartbeat
        if self._has_step_older_than(GIVEN_UP_MS) and self.is_busy:
            age_ms = heartbeat.step_age_ms
            _log.warning("a step is stuck, its runs go elsewhere", worker=self.worker.id, age_ms=age_ms)
            self._give_up(f"its step is stuck: {age_ms} ms old")
        self._observer.heard(self, heartbeat)
        if heartbeat.load.draining:
            self._runs.on_draining()

    def _has_step_older_than(self, ms: int) -> bool:
        heartbeat = self._heartbeat
        limit_ms = max(ms, STUCK_STEPS * heartbeat.longest_step_ms)
        return heartbeat.HasField("step_age_ms") and heartbeat.step_age_ms > limit_ms
