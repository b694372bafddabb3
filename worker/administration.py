"""The Admin service: audit, a drain that keeps the process, a change of role, and adapters.

in service --Drain--> drained --Undrain--> in service
    |                    |
    '------ SIGTERM -----'--> the process drains and ends
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import grpc

from decant.engine.errors import AdapterRefused
from decant.protos import worker_pb2 as wire
from decant.protos import worker_pb2_grpc as services
from decant.runtime.connections.peer import same_incarnation
from decant.runtime.error_details import Reason
from decant.runtime.errors import RETRY_ELSEWHERE_SECONDS, FailedPrecondition, InvalidArgument, NotFound, Unavailable
from decant.runtime.serving.health import Readiness, State
from decant.runtime.telemetry import logs
from decant.worker.adapters import NAME, NAME_LIMIT
from decant.worker.engine_host import EngineHost
from decant.worker.report.audit import Auditor

_log = logs.get(__name__)


class AdminService(services.AdminServicer):
    """Changes what the host reports to routers; ``renew`` writes it to the directory soon."""

    def __init__(self, host: EngineHost, auditor: Auditor, readiness: Readiness, renew: Callable[[], None]) -> None:
        self._host = host
        self._auditor = auditor
        self._readiness = readiness
        self._renew = renew

    async def Audit(  # noqa: N802 - the names on the wire
        self, _: wire.AuditRequest, __: grpc.aio.ServicerContext[wire.AuditRequest, wire.AuditResponse]
    ) -> wire.AuditResponse:
        return await self._auditor.audit()

    async def Drain(  # noqa: N802
        self, request: wire.DrainRequest, _: grpc.aio.ServicerContext[wire.DrainRequest, wire.DrainResponse]
    ) -> wire.DrainResponse:
        self._check(request.worker)
        self._set_draining(True)
        return wire.DrainResponse(runs=self._auditor.num_runs())

    async def Undrain(  # noqa: N802
        self, request: wire.UndrainRequest, _: grpc.aio.ServicerContext[wire.UndrainRequest, wire.UndrainResponse]
    ) -> wire.UndrainResponse:
        self._check(request.worker)
        if self._readiness.state not in (State.STARTING, State.READY):
            raise Unavailable(Reason.DRAINING, "this worker's process is ending", retry_after=RETRY_ELSEWHERE_SECONDS)
        self._set_draining(False)
        return wire.UndrainResponse()

    async def SetRole(  # noqa: N802
        self, request: wire.SetRoleRequest, _: grpc.aio.ServicerContext[wire.SetRoleRequest, wire.SetRoleResponse]
    ) -> wire.SetRoleResponse:
        self._check(request.worker)
        if request.role not in (wire.ROLE_PREFILL, wire.ROLE_DECODE):
            raise InvalidArgument("role", "ROLE_PREFILL or ROLE_DECODE", request.role)
        previous = self._host.role
        self._host.set_role(request.role)
        return wire.SetRoleResponse(previous=previous)

    async def AddAdapter(  # noqa: N802
        self,
        request: wire.AddAdapterRequest,
        _: grpc.aio.ServicerContext[wire.AddAdapterRequest, wire.AddAdapterResponse],
    ) -> wire.AddAdapterResponse:
        self._check(request.worker)
        if NAME.fullmatch(request.name) is None:
            raise InvalidArgument("name", NAME_LIMIT, request.name)
        if not request.folder:
            raise InvalidArgument("folder", "a folder of the worker's machine", "nothing")
        try:
            adapter = await self._host.adapters.offer(request.name, Path(request.folder))
        except AdapterRefused as refused:
            raise InvalidArgument("folder", f"an adapter that is served: {refused.reason}", request.folder) from None
        return wire.AddAdapterResponse(adapter=adapter)

    async def RemoveAdapter(  # noqa: N802
        self,
        request: wire.RemoveAdapterRequest,
        _: grpc.aio.ServicerContext[wire.RemoveAdapterRequest, wire.RemoveAdapterResponse],
    ) -> wire.RemoveAdapterResponse:
        self._check(request.worker)
        adapters = self._host.adapters
        try:
            adapter = adapters.withdraw(request.name)
        except AdapterRefused as refused:
            raise InvalidArgument("name", f"one that is not watched: {refused.reason}", request.name) from None
        if adapter is None:
            raise NotFound("adapter", request.name, [each.name for each in adapters.announcements])
        return wire.RemoveAdapterResponse(adapter=adapter)

    def _check(self, worker: wire.Peer) -> None:
        if not same_incarnation(worker, self._host.peer):
            raise FailedPrecondition(
                Reason.WRONG_PEER, f"another incarnation of {self._host.peer.id} than {worker.incarnation:x}"
            )

    def _set_draining(self, is_draining: bool) -> None:
        if self._host.draining != is_draining:
            _log.info("drained by an administrator" if is_draining else "put back by an administrator")
            self._host.draining = is_draining
            self._renew()
