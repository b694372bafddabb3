from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import grpc

from decant.protos import worker_pb2 as wire
from decant.protos import worker_pb2_grpc as services
from decant.runtime.connections.heartbeat import loop_timeout
from decant.runtime.connections.peer import same_incarnation
from decant.runtime.error_details import Reason
from decant.runtime.errors import RETRY_ELSEWHERE_SECONDS, Aborted, FailedPrecondition, InvalidArgument, Unavailable
from decant.runtime.protocol import is_compatible
from decant.runtime.telemetry import logs
from decant.worker.decode.run_manager import DecodeRunManager
from decant.worker.decode.session import RouterSession, SessionLimits
from decant.worker.engine_host import EngineHost
from decant.worker.wire_codec import other_request

_Context = grpc.aio.ServicerContext[wire.RouterMessage, wire.WorkerMessage]
_log = logs.get(__name__)


class DecodeService(services.DecodeServicer):
    def __init__(self, host: EngineHost, session_limits: SessionLimits | None = None) -> None:
        self._host = host
        self._session_limits = session_limits or SessionLimits()
        self.run_manager = DecodeRunManager(host)
        self._sessions: dict[str, RouterSession] = {}  # by the router's id
        self._is_drained = False

    async def Session(  # noqa: N802 - the name on the wire
        self, requests: AsyncIterator[wire.RouterMessage], context: _Context
    ) -> None:
        hello = await _hello(requests, self._session_limits.hello_s)
        if hello is None:
            return
        self._check(hello)
        session = self._open_session(hello)
        try:
            self._welcome(session, hello)
            await session.serve(requests, context.write, self._handle)
        finally:
            self._close_session(session)

    # -- audit and drain ----------------------------------------------------------------------------------------

    def runs(self) -> Iterator[tuple[wire.Run, int, wire.RunStatus.Phase, str]]:
        for run in dict.fromkeys((*self.run_manager.runs, *self.run_manager.executor.executing)):
            for output in run.outputs:
                yield run.ref, output.index, run.phase, output.request.id

    @property
    def sessions(self) -> int:
        return len(self._sessions)

    @property
    def fetches_receiving(self) -> int:
        return sum(run.phase == wire.RunStatus.PHASE_ARRIVING for run in self.run_manager.runs)

    @property
    def orphans(self) -> int:
        return sum(run.owner.session is None and not run.has_ended for run in self.run_manager.runs)

    @property
    def cancel_tombstones(self) -> int:
        return len(self.run_manager.runs.cancel_tombstones)

    @property
    def ended_runs(self) -> int:
        return sum(run.has_ended for run in self.run_manager.runs)

    async def drain(self) -> None:
        self._host.draining = True
        await self.run_manager.runs.wait_empty()
        self._is_drained = True
        for session in self._sessions.values():
            session.finish()

    async def close(self) -> None:
        """End all sessions and runs; the engine must still run."""
        self._is_drained = True
        for session in self._sessions.values():
            session.close(_draining_error())
        await self.run_manager.close()

    # -- a session begins and ends ------------------------------------------------------------------------------

    def _check(self, hello: wire.Hello) -> None:
        if self._is_drained:
            raise _draining_error()
        if not same_incarnation(hello.worker, self._host.peer):
            raise FailedPrecondition(Reason.WRONG_PEER, f"another incarnation than {hello.worker.incarnation:x}")
        if not is_compatible(hello.router.protocol):
            raise FailedPrecondition(Reason.WRONG_PROTOCOL, f"protocol {hello.router.protocol} is not supported")
        if not hello.router.id:
            raise InvalidArgument("hello.router.id", "not empty", "")

    def _open_session(self, hello: wire.Hello) -> RouterSession:
        session = RouterSession(hello.router, self._make_heartbeat, self._session_limits)
        older = self._sessions.get(hello.router.id)
        self._sessions[hello.router.id] = session
        self._host.cache.add_session(session)
        if older is not None:
            older.close(Aborted(Reason.SUPERSEDED, "a newer session of this router is open"))
            self.run_manager.ownership.on_session_end(older)
        return session

    def _close_session(self, session: RouterSession) -> None:
        self._host.cache.remove_session(session)
        if self._sessions.get(session.router.id) is session:
            del self._sessions[session.router.id]
        self.run_manager.ownership.on_session_end(session)

    def _welcome(self, session: RouterSession, hello: wire.Hello) -> None:
        host, manager = self._host, self.run_manager
        welcome = wire.Welcome(worker=host.peer, role=host.role, model=host.model, layout_hash=host.layout_hash)
        runs_here, refusals = [], []
        for owned in hello.owned:
            if refusal := self._refusal(owned.run):
                refusals.append(refusal)
            elif run := manager.runs.get(owned.run):
                welcome.runs.append(manager.ownership.attach(run, session, owned.run, owned.resume))
                runs_here.append((run, owned.resume))
            else:
                welcome.unknown_runs.append(owned.run)
        welcome.orphans.extend(run.ref for run in manager.ownership.orphans_of(session.router))
        session.send(wire.WorkerMessage(welcome=welcome))
        for refusal in refusals:
            session.send(refusal)
        for run, resume in runs_here:
            manager.ownership.catch_up(run, resume)
        _log.info("session opened", router=session.router.id, runs=len(runs_here), orphans=len(welcome.orphans))

    # -- messages -----------------------------------------------------------------------------------------------

    def _handle(self, session: RouterSession, message: wire.RouterMessage) -> None:
        match message.WhichOneof("message"):
            case "forget":
                for ref in message.forget.runs:
                    if self._owns(session, ref):
                        self.run_manager.forget(ref)
            case "heartbeat":
                for ticket in message.heartbeat.renew:
                    self._host.sender.leases.renew_unopened(ticket)
            case "set_role" if message.set_role.role in (wire.ROLE_PREFILL, wire.ROLE_DECODE):
                self._host.set_role(message.set_role.role)
            case "hello":
                raise InvalidArgument("message", "hello once, as the first", "hello")
            case None:
                session.unknown.ignore()
            case _:
                self._handle_command(session, message)

    def _handle_command(self, session: RouterSession, message: wire.RouterMessage) -> None:
        """Pass a command to the manager of runs, unless another router owns the request."""
        manager = self.run_manager
        match message.WhichOneof("message"):
            case "start" if self._owns(session, message.start.run):
                manager.start(session, message.start)
            case "cancel" if self._owns(session, message.cancel.run):
                manager.cancel(session, message.cancel)
            case "adopt" if self._owns(session, message.adopt.run):
                manager.adopt(session, message.adopt)
            case "resend" if self._owns(session, message.resend.run):
                manager.resend(session, message.resend)
            case "migrate" if self._owns(session, message.migrate.run):
                manager.migrate(session, message.migrate)

    def _owns(self, session: RouterSession, ref: wire.Run) -> bool:
        refusal = self._refusal(ref)
        if refusal is not None:
            session.send(refusal)
        return refusal is None

    def _refusal(self, ref: wire.Run) -> wire.WorkerMessage | None:
        epochs = self._host.epochs
        if epochs.is_other_request(ref):
            return wire.WorkerMessage(refused=wire.Refused(run=ref, failure=other_request()))
        superseded = epochs.check(ref)
        return None if superseded is None else wire.WorkerMessage(superseded=superseded)

    def _make_heartbeat(self, session: RouterSession) -> wire.Heartbeat:
        heartbeat = self._host.heartbeat()
        heartbeat.renew.extend(self.run_manager.ownership.unopened_tickets_of(session))
        update = self._host.cache.next_update(session)
        if update is not None:
            heartbeat.cache.CopyFrom(update)
        routers = [each.router for each in self._sessions.values() if not each.is_lost]
        names = frozenset((router.id, router.incarnation) for router in routers)
        if names != session.routers_sent:
            session.routers_sent = names
            heartbeat.routers.extend(routers)
        return heartbeat


async def _hello(requests: AsyncIterator[wire.RouterMessage], seconds: float) -> wire.Hello | None:
    try:
        async with loop_timeout(seconds):
            message = await anext(requests)
    except StopAsyncIteration:
        return None
    except TimeoutError:
        raise InvalidArgument("hello", f"within {seconds:g} s", "nothing") from None
    if not message.HasField("hello"):
        raise InvalidArgument("hello", "the first message", message.WhichOneof("message"))
    return message.hello


def _draining_error() -> Unavailable:
    return Unavailable(Reason.DRAINING, "this worker is draining", retry_after=RETRY_ELSEWHERE_SECONDS)
