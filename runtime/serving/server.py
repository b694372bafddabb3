"""States of a process that serves gRPC.

serving --- SIGTERM, SIGINT ---> draining -------------> stopping ---------------> ended
   |                             health NOT_SERVING,     watches end,            port closed
   |                             no new work,            running calls continue
   |                             `drain` runs            |
   |                             |------ drain_seconds in all -----| then what is left is cancelled
   '--- Readiness.mark_failed, or a second signal, in any state: everything is cancelled

The port stays open to refuse late calls with a reason; a stopping gRPC server would send CANCELLED.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc

from decant.runtime.error_details import Reason
from decant.runtime.errors import RETRY_ELSEWHERE_SECONDS, Unavailable
from decant.runtime.serving.admin import AdminServer
from decant.runtime.serving.health import HealthService, Readiness, State
from decant.runtime.serving.interceptor import ErrorInterceptor
from decant.runtime.serving.reflection import add_reflection
from decant.runtime.serving.roles import CallerRoles
from decant.runtime.serving.server_settings import ServerSettings, bind, join_address, server_options
from decant.runtime.serving.shutdown import Shutdown, race
from decant.runtime.settings import SettingError
from decant.runtime.telemetry import logs
from decant.runtime.telemetry.metrics import ProcessMetrics, Registry

CLEANUP_SECONDS = 5.0
"""Time for cancelled calls to clean up."""
FLUSH_SECONDS = 1.0
"""Time for gRPC to send the last statuses. Reflection may stay open."""

_HEALTH: str = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
_log = logs.get(__name__)

Drain = Callable[[], Awaitable[None]]
WarmUp = Callable[["Server"], Awaitable[None]]


@dataclass(frozen=True)
class Service:
    descriptor: ServiceDescriptor
    add: Callable[[grpc.aio.Server], None]
    admission_methods: frozenset[str] = frozenset()
    is_administrative: bool = False
    """Whether only administrators may call it, where the settings name them."""

    def __post_init__(self) -> None:
        if unknown := self.admission_methods - set(self.descriptor.methods_by_name):
            raise ValueError(f"{self.name} has no {', '.join(sorted(unknown))}")

    @property
    def name(self) -> str:
        return self.descriptor.full_name


async def serve(
    services: Sequence[Service],
    settings: ServerSettings,
    readiness: Readiness,
    registry: Registry,
    *,
    warm_up: WarmUp,
    drain: Drain | None = None,
) -> bool:
    """Run a process from listening to its end. Returns False if calls had to be cancelled.

    Raises SettingError for an address or TLS file that can't be used.
    """

    async def warm(server: Server) -> None:
        await warm_up(server)
        freeze_gc()

    server = Server(services, settings, readiness, registry)
    server.shutdown.on_signals()
    await server.start()
    return await server.run(warm_up=warm, drain=drain)


def freeze_gc() -> None:
    """Exclude present objects from collection: a full one with torch stops every stream for 0.25 s."""
    gc.collect()
    gc.freeze()


class Server:
    """The gRPC server of a process, with what each owes: health, reflection, errors, metrics, TLS and a drain.

    The router's and the workers' ``main`` make one and give it their services; its shutdown ends the process.
    """

    def __init__(
        self, services: Sequence[Service], settings: ServerSettings, readiness: Readiness, registry: Registry
    ) -> None:
        self.readiness = readiness
        self.shutdown = Shutdown()
        self.port = 0
        self.admin_port: int | None = None
        self._settings = settings
        self._services = tuple(services)
        self._admission_methods = {
            f"/{service.name}/{method}" for service in services for method in service.admission_methods
        }
        self._roles = CallerRoles(
            settings.admin_name,
            [service.name for service in services if service.is_administrative],
            [service.name for service in services if not service.is_administrative],
        )
        self._interceptor = ErrorInterceptor(
            ProcessMetrics(registry).count_error, gate=self._gate, services=[service.name for service in services]
        )
        self._server = grpc.aio.server(interceptors=[self._interceptor], options=server_options(settings))
        self._admin = AdminServer(readiness, registry)

    @property
    def address(self) -> str:
        return join_address(self._settings.host, self.port)

    async def start(self) -> None:
        """Begin to serve: alive, not ready. Raises SettingError."""
        names = [service.name for service in self._services]
        for service in self._services:
            service.add(self._server)
        health_pb2_grpc.add_HealthServicer_to_server(HealthService(self.readiness, names), self._server)
        add_reflection(self._server, (*names, _HEALTH))
        try:
            self.port = bind(self._server, self._settings)
            await self._server.start()
            if self._settings.admin_port is not None:
                self.admin_port = await self._bind_admin(self._settings.admin_port)
        except SettingError:
            await self._end()
            raise
        _log.info("serving", address=self.address, tls=self._settings.tls, admin_port=self.admin_port)

    async def run(self, *, warm_up: WarmUp | None = None, drain: Drain | None = None) -> bool:
        try:
            if not await race(self._live(warm_up), self._failed()):
                return False
            self.readiness.mark_draining()
            return await race(self._drain(drain), self._forced(), self._failed())
        finally:
            await self._end()

    async def _live(self, warm_up: WarmUp | None) -> bool:
        if warm_up is None or await race(self._warm(warm_up), self._requested()):
            self.readiness.mark_ready()
            await self.shutdown.wait_requested()
        return True

    async def _drain(self, drain: Drain | None) -> bool:
        seconds = self._settings.drain_seconds
        try:
            async with asyncio.timeout(seconds) as limit:
                if drain is not None:
                    await drain()
                self.readiness.mark_stopped()
                await self._interceptor.wait_idle()
                await race(self._server.stop(seconds), asyncio.sleep(FLUSH_SECONDS))
                return True
        except TimeoutError:
            if not limit.expired():
                raise
            _log.warning("drain took too long", limit_seconds=seconds, calls=self._interceptor.active)
            return False

    async def _end(self) -> None:
        self.readiness.mark_stopped()
        await self._server.stop(None)
        try:
            async with asyncio.timeout(CLEANUP_SECONDS):
                await self._interceptor.wait_idle()
        except TimeoutError:
            _log.error("calls did not end when cancelled", calls=self._interceptor.active)
        await self._admin.close()
        _log.info("ended")

    async def _warm(self, warm_up: WarmUp) -> bool:
        await warm_up(self)
        return True

    async def _requested(self) -> bool:
        await self.shutdown.wait_requested()
        return False

    async def _forced(self) -> bool:
        await self.shutdown.wait_forced()
        return False

    async def _failed(self) -> bool:
        state = self.readiness.state
        while self.readiness.is_alive:
            state = await self.readiness.wait_for_change(state)
        return False

    def _gate(self, method: str, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self._roles.check(method, context)
        if method in self._admission_methods and self.readiness.state not in (State.STARTING, State.READY):
            raise Unavailable(Reason.DRAINING, "this process is draining", retry_after=RETRY_ELSEWHERE_SECONDS)

    async def _bind_admin(self, port: int) -> int:
        host = self._settings.admin_host or self._settings.host
        try:
            return await self._admin.start(host, port)
        except OSError as error:
            address = join_address(host, port)
            raise SettingError(
                "admin_port", f"an address that can be listened on ({error.strerror})", address
            ) from None
