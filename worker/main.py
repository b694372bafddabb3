"""A worker's process, of either role.

listen ── load and measure (in a thread; calls are refused) ── warm-up ── services ── register ── ready
end <── deregister <── no runs, sessions end <── draining <── SIGTERM
exit status 1 <── the engine crashed, or another incarnation registered

SIGTERM during loading or warm-up ends the process at once: no other process knows it yet.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from decant.engine.engine import Engine
from decant.engine.errors import AdapterRefused, DeviceFailed, EngineStopped, InvalidConfig, ModelRefused
from decant.engine.guides.compiler import GrammarCompiler
from decant.engine.output import StepOutput
from decant.engine.plan import Device
from decant.engine.request import FinishReason, Request, StopParams
from decant.engine.scheduler import Limits
from decant.handoff.packing import checksum
from decant.handoff.service import KvSourceService
from decant.protos import worker_pb2 as wire
from decant.protos import worker_pb2_grpc as services
from decant.protos.state_pb2 import Capacity, WorkerRegistration
from decant.runtime import model_files
from decant.runtime.background import BackgroundTask, run_restarting
from decant.runtime.connections.peer import default_id, new_peer
from decant.runtime.enum_names import enum_label
from decant.runtime.model_files import ModelFiles, ModelUnreadable
from decant.runtime.serving import shutdown
from decant.runtime.serving.health import Readiness
from decant.runtime.serving.server import Server, Service, serve
from decant.runtime.serving.server_settings import is_every_address
from decant.runtime.settings import SettingError, flag_name
from decant.runtime.settings_sources import load_or_exit
from decant.runtime.telemetry import logs, tracing
from decant.runtime.telemetry.metrics import Registry
from decant.state.errors import StoreFault
from decant.state.keys import Ttls
from decant.state.store import Store, StoreSettings
from decant.worker import adapters
from decant.worker.adapter_directory import AdapterDirectory
from decant.worker.administration import AdminService
from decant.worker.decode.service import DecodeService
from decant.worker.engine_host import EngineHost, Identity, WorkerLimits
from decant.worker.health_trial import HealthTrial
from decant.worker.prefill.service import PrefillService
from decant.worker.report.audit import Auditor
from decant.worker.report.metrics import WorkerMetrics
from decant.worker.settings import WorkerSettings
from decant.worker.startup.deferred_service import DeferredService
from decant.worker.startup.handoff_transport import make_transport
from decant.worker.startup.load_model import in_own_thread, limits_of, load_guides, load_model
from decant.worker.startup.registration import Registrar

CRASH_REPLY_S = 0.25
"""Time after a crash for the answers to callers."""

SWITCH_S = 0.0005
"""Interpreter switch interval: the engine's thread waits for the event loop's at every call."""

LoadDevice = Callable[[WorkerSettings, ModelFiles], Device]

_log = logs.get(__name__)


@dataclass(frozen=True, slots=True)
class WorkerRole:
    role: wire.Role
    program: str
    settings: type[WorkerSettings]


def main(role: WorkerRole, arguments: Sequence[str] | None, load_device: LoadDevice | None = None) -> int:
    """Run a worker; return 0 after a graceful end, 1 after a failure, 2 for invalid settings or an unusable model."""
    argv = sys.argv[1:] if arguments is None else arguments
    settings = load_or_exit(role.settings, argv, program=role.program)
    logs.start(role.program, settings)
    try:
        with tracing.exporting(f"decant-{role.program.replace('_', '-')}"):
            is_graceful = shutdown.run(run(settings, role.role, load_device or load_model))
    except tracing.CannotExport as error:
        return _refused(role, str(error))
    except (InvalidConfig, SettingError) as error:
        return _refused(role, f"{flag_name(error.field)}: {error.limit}, got {error.value}")
    except AdapterRefused as error:
        return _refused(role, f"--adapters: {error}")
    except (ModelRefused, ModelUnreadable) as error:
        return _refused(role, f"--model: {error}")
    except StoreFault as error:
        return _refused(role, f"--redis-url: {error}")
    except (DeviceFailed, EngineStopped) as error:
        _log.error("load or warm-up failed", reason=str(error))
        return 1
    return 0 if is_graceful else 1


def _refused(role: WorkerRole, reason: str) -> int:
    print(f"{role.program}: {reason}", file=sys.stderr)
    return 2


async def run(settings: WorkerSettings, role: wire.Role, load_device: LoadDevice) -> bool:
    sys.setswitchinterval(SWITCH_S)
    _check(settings)
    if settings.is_open:
        _log.warning(
            "callers are not authenticated: any of them can read and take over any request", host=settings.host
        )
    async with AsyncExitStack() as stack:
        worker = Worker(settings, role, load_device, stack)
        is_graceful = await serve(
            worker.services(),
            settings,
            worker.readiness,
            worker.registry,
            warm_up=worker.warm_up,
            drain=worker.drain,
        )
        if not worker.is_announced:
            # The end came while the model was loading: its thread cannot be interrupted.
            shutdown.end_process(0 if is_graceful else 1)
        return is_graceful


@dataclass(frozen=True, slots=True)
class _Parts:
    host: EngineHost
    prefill: PrefillService
    decode: DecodeService
    registrar: Registrar


class Worker:
    """A worker's process: serves while the model loads, opens the services on its engine, registers, and drains.

    The server calls it at start, drain and end; it owns everything that it opens, on one exit stack.
    """

    def __init__(
        self, settings: WorkerSettings, role: wire.Role, load_device: LoadDevice, stack: AsyncExitStack
    ) -> None:
        self.readiness = Readiness()
        self.registry = Registry(gateway_names=settings.gateway_metrics)
        self.is_announced = False
        self._settings = settings
        self._role = role
        self._load_device = load_device
        self._stack = stack
        self._parts: _Parts | None = None  # None until warm-up
        self._deferred = {
            name: DeferredService(descriptor) for name, descriptor in wire.DESCRIPTOR.services_by_name.items()
        }

    def services(self) -> list[Service]:
        """Return services that stay open in a drain: a prompt is answered with Refused, and routers may reconnect."""
        descriptors = wire.DESCRIPTOR.services_by_name
        return [
            Service(descriptors[name], service.add_to, is_administrative=name == "Admin")
            for name, service in self._deferred.items()
        ]

    # -- start ---------------------------------------------------------------------------------------------------

    async def warm_up(self, server: Server) -> None:
        settings = self._settings
        server.shutdown.ends_process = True
        files = await asyncio.to_thread(model_files.find, settings.model, settings.model_revision, id=settings.model_id)
        device = await in_own_thread(lambda settings: self._load_device(settings, files), settings)
        engine = Engine(device, limits_of(settings, device), checksum=checksum)
        guides = await in_own_thread(partial(load_guides, files), device)
        host = await self._make_host(engine, files, server, guides)
        for name, folder in adapters.parse(settings.adapters):
            await host.adapters.offer(name, folder)
        await _warm_up_engine(host)
        prefill, decode = await self._open(host)
        server.shutdown.ends_process = False
        directory = None
        if settings.adapter_directory is not None:
            directory = AdapterDirectory(settings.adapter_directory, host.adapters)
            await directory.begin()
        registrar = await self._register(host, files)
        if directory is not None:
            await self._run("adapter directory", directory.run)
        self._parts = _Parts(host, prefill, decode, registrar)
        admin = AdminService(host, Auditor(host, prefill, decode), self.readiness, registrar.renew_now)
        self._deferred["Admin"].attach(partial(services.add_AdminServicer_to_server, admin))

    async def _make_host(
        self, engine: Engine, files: ModelFiles, server: Server, guides: GrammarCompiler
    ) -> EngineHost:
        settings = self._settings
        name = enum_label(wire.Role, self._role)
        peer = new_peer(settings.id or default_id(name))
        transport = await make_transport(settings, engine.device, peer, self._stack)
        identity = Identity(
            peer=peer,
            role=self._role,
            model=files.id,
            address=settings.advertise or server.address,
        )
        limits = WorkerLimits(settings.lease_ms, settings.max_waiting, adapter_bytes=settings.adapter_memory)
        host = EngineHost(engine, identity, transport, limits, guides)
        return await self._stack.enter_async_context(host)

    async def _open(self, host: EngineHost) -> tuple[PrefillService, DecodeService]:
        host.crashes.subscribe(self._on_crash)
        WorkerMetrics(self.registry, host)
        prefill, decode = PrefillService(host), DecodeService(host)
        self._stack.push_async_callback(prefill.close)
        self._stack.push_async_callback(decode.close)
        if seconds := self._settings.health_seconds:
            trial = HealthTrial(host, self.readiness.mark_failed, seconds)
            await self._run("health trial", trial.run)
        self._deferred["Prefill"].attach(partial(services.add_PrefillServicer_to_server, prefill))
        self._deferred["Decode"].attach(partial(services.add_DecodeServicer_to_server, decode))
        self._deferred["KvSource"].attach(KvSourceService(host.sender).add_to)
        return prefill, decode

    async def _register(self, host: EngineHost, files: ModelFiles) -> Registrar:
        registration = WorkerRegistration(
            peer=host.peer,
            address=host.address,
            role=host.role,
            model=host.model,
            layout_hash=host.layout_hash,
            tokenizer=files.tokenizer_files,
            token_ids=files.token_ids,
            capacity=Capacity(
                total_blocks=host.total_blocks,
                block_size=host.block_size,
                group_blocks=host.group_blocks,
                max_context_length=host.context_length,
                max_running=host.max_running,
                step_us=host.step_costs.fixed * 1e6,
                step_us_per_sequence=(host.step_costs.token + host.step_costs.logits) * 1e6,
            ),
            equal_bits=host.equal_bits,
            quantization=host.quantization,
            adapters=host.adapters.announcements,
        )
        self.is_announced = True
        lifetimes = Ttls()
        store = await self._stack.enter_async_context(Store(StoreSettings(self._settings.redis_url)))
        registrar = Registrar(
            store.workers,
            registration,
            host.load,
            lifetimes.renew_every_s,
            self.readiness.mark_failed,
        )
        host.role_changes.subscribe(registrar.set_role)
        host.adapters.changes.subscribe(lambda _: registrar.set_adapters(host.adapters.announcements))
        return await self._stack.enter_async_context(registrar)

    async def _run(self, name: str, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        task = BackgroundTask(name, partial(run_restarting, name, run), self._part_failed)
        await self._stack.enter_async_context(task)

    def _part_failed(self, name: str, error: BaseException) -> None:
        self.readiness.mark_failed(f"{name} failed")

    def _on_crash(self, stopped: EngineStopped) -> None:
        _log.error("engine crashed", reason=str(stopped), exc_info=stopped.__cause__)
        self.readiness.mark_draining()
        asyncio.get_running_loop().call_later(CRASH_REPLY_S, self.readiness.mark_failed, str(stopped))

    # -- end -----------------------------------------------------------------------------------------------------

    async def drain(self) -> None:
        parts = self._parts
        if parts is None:
            return  # warm-up was not complete
        parts.host.draining = True
        parts.registrar.renew_now()
        # Sessions end last: over them routers renew the tickets of prompts.
        await parts.prefill.drain()
        await parts.decode.drain()
        await parts.registrar.close()


def _check(settings: WorkerSettings) -> None:
    Limits(settings.token_budget or settings.max_running, settings.max_running)
    adapters.parse(settings.adapters)
    if settings.adapter_directory is not None and not settings.adapter_directory.is_dir():
        raise SettingError("adapter_directory", "a directory", settings.adapter_directory)
    if settings.advertise is None and is_every_address(settings.host):
        raise SettingError("advertise", "needed where host is every address", "nothing")


async def _warm_up_engine(host: EngineHost) -> None:
    """Run the largest and the smallest step, which allocates memory and measures durations."""
    ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def on_step(output: StepOutput) -> None:
        for end in output.ended:
            ended.set_result(end.detail if end.reason is FinishReason.FAILED else "")

    def begin(engine: Engine) -> None:
        prompt = (0,) * max(1, min(engine.scheduler.longest_chunk, host.context_length - 1))
        engine.add(Request("warm-up", prompt, stop=StopParams(2, ignore_eos=True), use_prefix_cache=False))

    _log.info("warm-up")
    host.steps.subscribe(on_step)
    host.crashes.subscribe(ended.set_exception)
    try:
        await host.loop.call(begin)
        detail = await ended
    finally:  # a later event would set the result of a future that was cancelled
        host.steps.unsubscribe(on_step)
        host.crashes.unsubscribe(ended.set_exception)
    if detail:
        raise ModelRefused(host.model, f"its first step failed: {detail}")
