"""A router's process: `close` ends in reverse what `start` begins.

settings, logs -> models -> listening -> Redis, registered -> workers found -> ready -> SIGTERM -> drained -> ended
"""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from functools import partial
from importlib.metadata import version
from typing import Any

from decant.protos import worker_pb2 as wire
from decant.protos.router_admin_pb2 import ListRequestsResponse
from decant.protos.state_pb2 import RouterRegistration
from decant.router.administration import RouterAdminService
from decant.router.admission.control import AdmissionControl
from decant.router.admission.quota import QuotaLeases
from decant.router.api.auth import Authenticator
from decant.router.api.auth import load as load_callers
from decant.router.api.generation_calls import GenerationCalls
from decant.router.api.prompt_calls import PromptCalls
from decant.router.api.service import InferenceService, ServerInfoSource
from decant.router.execution.journal_writer import JournalWriter
from decant.router.execution.queue_depth import set_queue_metrics
from decant.router.execution.registry import RequestRegistry
from decant.router.execution.request_list import list_requests, requests_page
from decant.router.execution.result_memory import ResultMemory
from decant.router.execution.services import RouterServices
from decant.router.kserve.service import KServeService
from decant.router.kv_events.publisher import make_kv_events
from decant.router.limits import limits
from decant.router.prompt_runs.runner import PromptRunner
from decant.router.recovery.open_requests import OpenEntries
from decant.router.recovery.registration import RouterRegistrar
from decant.router.recovery.restore import make_request_restorer
from decant.router.recovery.takeover import OrphanRecovery
from decant.router.settings import RouterSettings
from decant.router.text.served_model import Models, load
from decant.router.timings import RouterTimings
from decant.router.vllm.engine_info import EngineInfoSource
from decant.router.vllm.service import VllmEngineService
from decant.router.workers.pool import WorkerPool
from decant.router.workers.pool_balancer import PoolBalancer
from decant.runtime.background import BackgroundTask, run_restarting
from decant.runtime.connections.peer import default_id, new_peer
from decant.runtime.enum_names import enum_label, enum_labels
from decant.runtime.model_files import ModelUnreadable
from decant.runtime.serving import shutdown
from decant.runtime.serving.health import Readiness
from decant.runtime.serving.server import Server, serve
from decant.runtime.serving.server_settings import is_every_address, join_address
from decant.runtime.settings import InvalidSettings, SettingError, flag_name
from decant.runtime.settings_sources import load_or_exit
from decant.runtime.telemetry import logs, tracing
from decant.runtime.telemetry.metrics import Registry, RequestMetrics
from decant.state.errors import StateError, StoreFault, StoreUnavailable
from decant.state.ids import Incarnation
from decant.state.keys import Ttls
from decant.state.store import Store, StoreSettings

PROGRAM = "decant router"
VERSION = version("decant-llm")
DRAIN_SHARE = 0.8
"""Share of a drain for requests to end; the rest is for handing the others over."""

_log = logs.get(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a router; return 0 after a graceful end, 1 if calls were cancelled, 2 for unusable settings or models."""
    settings = load_or_exit(RouterSettings, sys.argv[1:] if arguments is None else arguments, program=PROGRAM)
    logs.start("router", settings)
    try:
        models = load(settings.models, settings.add_bos)
        callers = load_callers(settings.credentials, models)
    except SettingError as error:
        return _refuse(f"{flag_name(error.field)}: {error.limit}, got {error.value}")
    except (ModelUnreadable, InvalidSettings, ValueError) as error:
        return _refuse(error)
    try:
        with tracing.exporting("decant-router"):
            return 0 if shutdown.run(_serve(settings, models, callers)) else 1
    except tracing.CannotExport as error:
        return _refuse(error)
    except SettingError as error:
        return _refuse(f"{flag_name(error.field)}: {error.limit}, got {error.value}")
    except StateError as error:
        return _refuse(f"--redis-url: {error}")


def _refuse(error: object) -> int:
    print(f"{PROGRAM}: {error}", file=sys.stderr)
    return 2


async def _serve(settings: RouterSettings, models: Models, callers: Authenticator) -> bool:
    async with Store(StoreSettings(settings.redis_url)) as store, AsyncExitStack() as stack:
        process = RouterProcess(settings, models, callers, store)
        stack.push_async_callback(process.close)
        ended = await serve(
            process.services,
            settings,
            process.readiness,
            process.registry,
            warm_up=process.start,
            drain=partial(process.requests.drain, DRAIN_SHARE * settings.drain_seconds),
        )
        return ended and not process.requests.num_left_behind


def _reached_at(host: str) -> str:
    return socket.gethostname() if is_every_address(host) else host


class RouterProcess:
    def __init__(
        self,
        settings: RouterSettings,
        models: Models,
        callers: Authenticator,
        store: Store,
        timings: RouterTimings = RouterTimings(),
    ) -> None:
        self.readiness = Readiness()
        self.registry = Registry(gateway_names=settings.gateway_metrics)
        self.peer = new_peer(settings.id or default_id("router"))
        hashes = {id: model.hashes for id, model in models.by_id.items()}
        self.pool = WorkerPool(self.peer, store.workers, hashes, settings, settings.handoff_min_tokens, timings.workers)
        self.journal_writer = JournalWriter(store.requests, settings.flush_ms, timings.journal)
        self.quota_leases = QuotaLeases(store.quotas, callers.limits)
        admission = AdmissionControl(settings, models.by_id, self.pool.capacity)
        restore = make_request_restorer(models, self.pool.max_context_length)
        metrics = RequestMetrics(self.registry, callers.tenants, enum_labels(wire.Cause))
        router = RouterServices(
            peer=self.peer,
            settings=settings,
            admission=admission,
            pool=self.pool,
            requests=store.requests,
            journal_writer=self.journal_writer,
            quota_leases=self.quota_leases,
            restore=restore,
            metrics=metrics,
            ended_s=Ttls().ended_s,
            timings=timings,
            kv_events=make_kv_events(settings.kv_event_bytes, self.pool.membership.prefix_indexes),
        )
        self.requests = RequestRegistry(router)
        self.pool.on_capacity_changed = self.requests.on_workers_changed
        self._metrics = metrics
        self.registry.before_scrape(self._set_gauges)
        self.registry.pages["/requests"] = lambda: requests_page(self._list_requests())
        info = self._server_info(settings)
        keepalive_s = settings.stream_keepalive_seconds
        calls = GenerationCalls(models, self.requests, metrics, timings.unread_s, keepalive_s)
        prompts = PromptCalls(self.requests, PromptRunner(router), metrics)
        administration = (RouterAdminService(self._list_requests).service(),) if settings.admin_name else ()
        self.services = (
            InferenceService(calls, self.requests, info, callers, prompts).service(),
            VllmEngineService(
                calls, self.requests, self._engine_info(), callers, settings.priorities, prompts
            ).service(),
            KServeService(calls, self.requests, callers, VERSION, lambda: self.readiness.is_ready).service(),
            *administration,
        )
        self._settings = settings
        self._timings = timings
        self._store = store
        self._ends = AsyncExitStack()
        self._registrar: RouterRegistrar | None = None

    async def start(self, server: Server) -> None:
        await self._reach_store()
        address = self._settings.advertise or join_address(_reached_at(self._settings.host), server.port)
        registration = RouterRegistration(peer=self.peer, address=address, version=VERSION)
        replaced = partial(self.readiness.mark_failed, "another process has this router's id")
        self._registrar = registrar = RouterRegistrar(
            self._store,
            registration,
            self.journal_writer.resync_all,
            replaced,
            self.requests.load,
            self.pool.membership.unused,
        )
        incarnation, timings = Incarnation.of(self.peer), self._timings
        takeover = OrphanRecovery(
            self._store, self.requests, incarnation, self.pool.is_connected, Ttls(), timings.takeover
        )
        results = ResultMemory(
            self._store.results,
            self._settings.result_bytes,
            self._metrics.results,
            timings.memory_check_s,
            timings.store_retry_s,
        )
        entries = OpenEntries(self._store, incarnation, timings.sweep_every_s)
        await self._run("sessions", self.pool.membership.run, self.pool.membership.close)
        await self._run("registration", partial(registrar.run, Ttls().renew_every_s), registrar.close)
        await self._run("journal writer", self.journal_writer.run, self.journal_writer.close)
        await self._run("quota leases", self.quota_leases.run, self.quota_leases.close)
        self._ends.push_async_callback(self.requests.close)
        await self._run("takeover", takeover.run)
        await self._run("open entries", entries.run)
        await self._run("result memory", results.run)
        if self._settings.balance_pools:
            await self._run("pool balancer", PoolBalancer(self.pool, self._store.pool_moves, incarnation).run)
        try:
            async with asyncio.timeout(timings.settle_s):
                await self.pool.membership.wait_settled()
        except TimeoutError:
            _log.warning("not all workers could be reached", limit_seconds=timings.settle_s)

    async def close(self) -> None:
        await self._ends.aclose()

    async def _reach_store(self) -> None:
        is_logged = False
        while True:
            try:
                await self._store.ping()
                return
            except StoreFault:
                raise
            except StoreUnavailable as error:
                if not is_logged:
                    _log.warning("waiting for the state store", error=str(error))
                is_logged = True
            await asyncio.sleep(self._timings.store_retry_s)

    async def _run(
        self, name: str, run: Callable[[], Coroutine[Any, Any, None]], *closes: Callable[[], Awaitable[None]]
    ) -> None:
        for close in closes:
            self._ends.push_async_callback(close)
        task = BackgroundTask(name, partial(run_restarting, name, run), self._part_failed)
        await self._ends.enter_async_context(task)

    def _part_failed(self, name: str, error: BaseException) -> None:
        self.readiness.mark_failed(f"{name} failed")

    def _set_gauges(self) -> None:
        metrics, pool = self._metrics, self.pool
        now = asyncio.get_running_loop().time()
        executions, first = self.requests.executions.open.values(), self.requests.first_workers
        set_queue_metrics(metrics.queues, executions, first, pool, now)
        for model in pool.costs:
            for role in (wire.ROLE_PREFILL, wire.ROLE_DECODE):
                workers = [worker for worker in pool.of(model) if worker.load.role == role]
                labels = (model, enum_label(wire.Role, role))
                metrics.known_workers.labels(*labels).set(len(workers))
                metrics.ready_workers.labels(*labels).set(sum(worker.is_usable for worker in workers))
            metrics.cache_usage.labels(model).set(pool.cache_usage(model))
        metrics.kv_events.bytes.set(self.requests.kv_events.num_bytes)
        metrics.kv_events.subscribers.set(self.requests.kv_events.num_subscribers)
        metrics.store_available.set(self._is_store_available())
        metrics.store_unwritten.set(self.journal_writer.num_unwritten)

    def _is_store_available(self) -> bool:
        """Whether Redis answered the last renewal of the registration, and no write waits for it."""
        is_renewed = self._registrar is not None and self._registrar.is_store_available
        return is_renewed and not self.journal_writer.is_unavailable

    def _list_requests(self) -> ListRequestsResponse:
        return list_requests(self.requests.executions.open.values(), asyncio.get_running_loop().time())

    def _engine_info(self) -> EngineInfoSource:
        start = time.monotonic()
        return EngineInfoSource(
            version=VERSION,
            pool=self.pool,
            load=self.requests.load,
            is_ready=lambda: self.readiness.is_ready,
            uptime_s=lambda: time.monotonic() - start,
        )

    def _server_info(self, settings: RouterSettings) -> ServerInfoSource:
        return ServerInfoSource(
            incarnation=Incarnation.of(self.peer),
            version=VERSION,
            limits=limits(
                max_queued_requests=settings.queue_limit,
                resume_grace_ms=settings.resume_grace_ms,
                result_ttl_ms=round(Ttls().ended_s * 1000),
            ),
            store_available=self._is_store_available,
            draining=lambda: self.requests.is_draining,
        )
