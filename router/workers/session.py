"""The one session between this router and one worker, for as long as both processes run.

opening --welcome--> open --breaks--> opening ... after 100 ms, 200 ms, ... 1 s
   |                                  |
   |                                  |-- the connection is refused: the runs there have lost their worker now
   |                                  '-- still not open after `reconnect_s`: then
   '-- another incarnation answers, or nothing needs the session any more: over
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc

from decant.protos import worker_pb2 as wire
from decant.protos import worker_pb2_grpc as services
from decant.router.timings import WorkerTimings
from decant.router.workers.liveness import Liveness
from decant.router.workers.outgoing import Outgoing
from decant.router.workers.session_runs import SessionRuns
from decant.router.workers.stream_io import StreamBroken, read, write
from decant.router.workers.subscription import MoveTest, RunSubscription, SessionDependent, SessionObserver, key_of
from decant.runtime.connections.heartbeat import LoopTimer, loop_timeout
from decant.runtime.connections.peer import UnknownMessages, same_incarnation
from decant.runtime.error_details import Reason
from decant.runtime.serving.shutdown import race
from decant.runtime.telemetry import logs

_log = logs.get(__name__)


class WorkerSession:
    """Connects to a worker, sends what legs ask for, and dispatches what it receives to their runs.

    ``WorkerMembership`` owns it and runs it. It calls legs, which are listeners of runs, and one observer; it uses
    ``Outgoing``, the messages to send, and ``SessionRuns``, the runs, neither of which knows the session.
    """

    def __init__(
        self,
        router: wire.Peer,
        worker: wire.Peer,
        channel: grpc.aio.Channel,
        observer: SessionObserver,
        timings: WorkerTimings = WorkerTimings(),
    ) -> None:
        self.worker = worker
        self.is_final = False
        """Never opened again: another incarnation, another protocol, or the router's end."""
        self.break_reason = ""
        """Why the session is not open, if that is known."""
        self.attempted = asyncio.Event()
        """Set once the session was opened, or could not be."""
        self.dependents: set[SessionDependent] = set()
        self.unclaimed: set[bytes] = set()
        """The worker's tickets that no decode worker has yet."""
        self.renewed: set[bytes] = set()
        """Tickets that decode workers renewed since the last heartbeat."""
        self.unknown = UnknownMessages(worker.id)
        self._router = router
        self._stub = services.DecodeStub(channel)
        self._observer = observer
        self._timings = timings
        self._outgoing = Outgoing(timings.forget_batch)
        self._runs = SessionRuns(worker.id, self._outgoing)
        self._liveness: Liveness | None = None
        """Of the present connection."""
        self._reconnect_grace: LoopTimer | None = None

    @property
    def is_open(self) -> bool:
        return self._outgoing.is_open

    @property
    def is_usable(self) -> bool:
        return self._outgoing.is_open and (self._liveness is None or self._liveness.is_healthy)

    @property
    def is_busy(self) -> bool:
        return bool(self._runs.table or self.dependents)

    @property
    def is_suspect(self) -> bool:
        return self._liveness is not None and self._liveness.messages.is_suspect

    @property
    def is_stuck(self) -> bool:
        return self._liveness is not None and self._liveness.step.is_stuck

    # What legs ask for

    def start(self, run: RunSubscription) -> None:
        """Start or adopt a run, in the next session if none is open."""
        self._runs.table.add(run)
        if self.is_open:
            self._outgoing.send(run.opening_message())
        else:
            self._start_reconnect_grace()

    def close_run(self, run: RunSubscription, cancel: wire.Cancel) -> None:
        """Cancel a run in any state; its listener gets no more events."""
        if self._runs.table.remove(run):
            self._outgoing.cancel(cancel)

    def forget(self, run: RunSubscription) -> None:
        """Let the worker forget a run that another worker has, with all its tokens."""
        if self._runs.table.remove(run):
            self._outgoing.forget(run.run)

    def migrate(self, message: wire.Migrate) -> None:
        if self.is_open:
            self._outgoing.send(wire.RouterMessage(migrate=message))

    def cancel(self, cancel: wire.Cancel) -> None:
        self._outgoing.cancel(cancel)

    def move_away(self, count: int, is_worth: MoveTest) -> int:
        """Let up to ``count`` running sequences move to another worker; return how many will try."""
        return self._runs.on_crowded(count, is_worth) if self.is_usable else 0

    def set_role(self, role: wire.Role) -> None:
        if self.is_open:
            self._outgoing.send(wire.RouterMessage(set_role=wire.SetRole(role=role)))

    def finish(self) -> None:
        """Send all that is queued, then end the session for good."""
        self.is_final = True
        self._outgoing.finish()

    # Connections

    async def run(self, is_wanted: Callable[[], bool]) -> None:
        """Keep the session open while it is wanted, which is checked after each break; then fail what is left."""
        failures = 0
        try:
            while not self.is_final and is_wanted():
                if await self._run_connection():
                    failures = 0
                if not self.is_final:
                    failures += 1
                    await asyncio.sleep(self._timings.session_backoff.seconds(failures))
        finally:
            self.attempted.set()
            self._fail_runs()

    async def _run_connection(self) -> bool:
        """Connect once, until the connection breaks; return whether the worker sent its welcome."""
        call, is_lost = self._stub.Session(), False
        self._liveness = Liveness(self._timings)
        try:
            await self._open(call)
            await race(self._receive(call), self._outgoing.write(call), self._send_heartbeats(self._liveness))
        except (StreamBroken, TimeoutError) as error:
            self._log_break(error)
            is_lost = isinstance(error, StreamBroken) and error.is_of_dead_process
        except ValueError as error:  # malformed arrays: the worker would send them again
            self._log_break(error)
            is_lost = True
        finally:
            was_open = self.is_open
            self._liveness = None
            self._outgoing.close()
            call.cancel()
            self.attempted.set()
            self._runs.table.clear_slots()
            if self.is_busy:
                self._start_reconnect_grace()
        if is_lost:
            self._fail_runs()
        return was_open

    async def _open(self, call: Any) -> None:
        self._outgoing.begin()
        owned = self._runs.owned()
        async with loop_timeout(self._timings.welcome_s):
            hello = wire.Hello(router=self._router, worker=self.worker, owned=owned)
            await write(call, wire.RouterMessage(hello=hello))
            answer = await read(call)
        if answer is None or not answer.HasField("welcome"):
            raise StreamBroken("no welcome")
        welcome = answer.welcome
        if not same_incarnation(welcome.worker, self.worker):
            raise StreamBroken("the welcome is of another incarnation", Reason.WRONG_PEER)
        self._outgoing.open(list(welcome.orphans))
        self._cancel_reconnect_grace()
        self.break_reason = ""
        self.attempted.set()
        self._runs.on_welcome(welcome, {key_of(each.run) for each in owned})
        _log.info("session opened", worker=self.worker.id, runs=len(welcome.runs), orphans=len(welcome.orphans))
        self._observer.on_opened(self)

    async def _receive(self, call: Any) -> None:
        while (message := await read(call)) is not None:
            self.on_message(message)

    async def _send_heartbeats(self, liveness: Liveness) -> None:
        while True:
            await asyncio.sleep(self._timings.heartbeat_s)
            liveness.messages.tick()
            if liveness.messages.is_lost:
                raise StreamBroken("no message was received for too long")
            self._outgoing.heartbeat(wire.Heartbeat(renew=self.unclaimed | self.renewed))
            self.renewed.clear()

    def on_message(self, message: wire.WorkerMessage) -> None:
        if self._liveness is not None:
            self._liveness.on_message(message)
        if self._runs.handle(message):
            return
        if not message.HasField("heartbeat"):
            self.unknown.ignore()
            return
        heartbeat = message.heartbeat
        if self._liveness is not None and self._liveness.step.is_lost and self.is_busy:
            age_ms = heartbeat.step_age_ms
            _log.warning("a step is stuck, its runs go elsewhere", worker=self.worker.id, age_ms=age_ms)
            self._fail_runs(f"its step is stuck: {age_ms} ms old")
        self._observer.on_heartbeat(self, heartbeat)
        if heartbeat.load.draining:
            self._runs.on_draining()

    def _log_break(self, error: Exception) -> None:
        self.break_reason = str(error) or "no welcome in time"
        if isinstance(error, StreamBroken) and error.reason in (Reason.WRONG_PEER, Reason.WRONG_PROTOCOL):
            self.is_final = True
        if self.is_open or self.is_final:
            _log.warning("session broken", worker=self.worker.id, error=str(error), is_final=self.is_final)
        elif not self.attempted.is_set():
            _log.warning("session can't be opened", worker=self.worker.id, error=self.break_reason)

    def _start_reconnect_grace(self) -> None:
        if self._reconnect_grace is None:
            self._reconnect_grace = LoopTimer(self._timings.reconnect_s, self._fail_runs)

    def _cancel_reconnect_grace(self) -> None:
        if self._reconnect_grace is not None:
            self._reconnect_grace.cancel()
            self._reconnect_grace = None

    def _fail_runs(self, detail: str = "the session broke and was not opened again") -> None:
        self._cancel_reconnect_grace()
        self._runs.fail_all(detail)
        for dependent in list(self.dependents):
            dependent.on_session_lost()
