"""State of a process, served by gRPC's health service.

STARTING --mark_ready()--> READY --mark_draining()--> DRAINING --mark_stopped()--> STOPPED     the server ends
    |'--------------------------mark_draining()----------^ |                          ^
    '-----------------'--mark_failed(reason)-----'---------'-> FAILED --mark_stopped()-'

"alive" is SERVING while nothing failed; "", "ready" and each service while READY.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from enum import Enum
from typing import Any

import grpc
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1 import health_pb2_grpc

from decant.runtime.telemetry import logs

ALIVE = "alive"
READY = "ready"

_log = logs.get(__name__)


class State(Enum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"
    STOPPED = "stopped"


class Readiness:
    """State of a process, for the event loop's thread only.

    Health checks and the admin port report it; the process's parts change it when they start, drain or fail.
    """

    def __init__(self) -> None:
        self.state = State.STARTING
        self.reason: str | None = None
        self._changed = asyncio.Event()

    @property
    def is_alive(self) -> bool:
        return self.reason is None

    @property
    def is_ready(self) -> bool:
        return self.state is State.READY

    def mark_ready(self) -> None:
        if self.state is State.STARTING:
            self._become(State.READY)

    def mark_draining(self) -> None:
        if self.state in (State.STARTING, State.READY):
            self._become(State.DRAINING)

    def mark_failed(self, reason: str) -> None:
        if self.state in (State.STARTING, State.READY, State.DRAINING):
            self.reason = reason
            self._become(State.FAILED)

    def mark_stopped(self) -> None:
        if self.state is not State.STOPPED:
            self._become(State.STOPPED)

    async def wait_for_change(self, since: State) -> State:
        while self.state is since:
            await self._changed.wait()
        return self.state

    def _become(self, state: State) -> None:
        self.state = state
        _log.info("readiness", state=state.value, **({} if self.reason is None else {"reason": self.reason}))
        waiters, self._changed = self._changed, asyncio.Event()
        waiters.set()


class HealthService(health_pb2_grpc.HealthServicer):
    def __init__(self, readiness: Readiness, services: Iterable[str]) -> None:
        self._readiness = readiness
        self._names = {"", ALIVE, READY, *services}

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802
        if request.service not in self._names:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return self._response(request.service)

    async def List(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pb.HealthListResponse(statuses={name: self._response(name) for name in self._names})

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        last: int | None = None
        while True:
            state = self._readiness.state
            response = self._response(request.service)
            if response.status != last:
                last = response.status
                yield response
            if state is State.STOPPED:
                return
            await self._readiness.wait_for_change(state)

    def _response(self, service: str) -> Any:
        if service not in self._names:
            return pb.HealthCheckResponse(status=pb.HealthCheckResponse.SERVICE_UNKNOWN)
        serving = self._readiness.is_alive if service == ALIVE else self._readiness.is_ready
        status = pb.HealthCheckResponse.SERVING if serving else pb.HealthCheckResponse.NOT_SERVING
        return pb.HealthCheckResponse(status=status)
