"""One engine on its thread, with everything that the services of a worker share."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Protocol, Self

from decant.engine.engine import Engine
from decant.engine.errors import EngineStopped
from decant.engine.guides.compiler import GrammarCompiler
from decant.engine.kv_layout import FULL
from decant.engine.loop import EngineLoop
from decant.engine.output import Load, StepOutput
from decant.engine.plan import Device
from decant.engine.request import Request
from decant.handoff.leases import LEASE_MS
from decant.handoff.packing import TransferLayout
from decant.handoff.receiver import KvReceiver
from decant.handoff.sender import KvSender
from decant.handoff.transport import Transport
from decant.protos import worker_pb2 as wire
from decant.runtime.background import BackgroundTask, run_restarting
from decant.runtime.connections.heartbeat import HEARTBEAT_SECONDS
from decant.runtime.enum_names import enum_label
from decant.runtime.event_source import EventSource
from decant.runtime.telemetry import logs
from decant.worker.adapter_store import AdapterStore
from decant.worker.epochs import Epochs
from decant.worker.prefix_cache_feed import PrefixCacheFeed
from decant.worker.settings import MAX_WAITING

_log = logs.get(__name__)


@dataclass(frozen=True, slots=True)
class Identity:
    peer: wire.Peer
    role: wire.Role
    model: str
    address: str


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    lease_ms: int = LEASE_MS
    max_waiting: int = MAX_WAITING
    adapter_bytes: int | None = None  # of memory; None: unbounded
    load_interval_s: float = HEARTBEAT_SECONDS  # between samples of the engine's load


@dataclass(frozen=True, slots=True)
class _LoadSample:
    engine: Load
    leased_blocks: int


class WaitingQueue(Protocol):
    """Runs that wait outside the engine."""

    @property
    def num_waiting(self) -> int: ...

    @property
    def waiting_tokens(self) -> int:
        """Tokens that the engine must still compute for them."""
        ...


class EngineHost:
    """Host of an engine; ``async with`` starts and stops its thread.

    It owns what the services of a worker share: the engine's thread, the sender and receiver of caches, and the epochs
    of requests. The services subscribe to the events of these parts, and add the queues before the engine.
    """

    def __init__(
        self,
        engine: Engine,
        identity: Identity,
        transport: Transport,
        limits: WorkerLimits | None = None,
        guides: GrammarCompiler | None = None,
    ) -> None:
        limits = limits or WorkerLimits()
        device = engine.device
        self.guides = guides
        self.peer, self.role, self.model = identity.peer, identity.role, identity.model
        self.address = identity.address
        self.layout_hash, self.equal_bits = short_layout_hash(device.layout_hash), device.equal_bits
        self.quantization = device.quantization or ""
        self.context_length = engine.limits.context_length
        self.max_running = engine.limits.max_running
        self.step_costs = device.costs
        self.block_size, self.total_blocks = device.block_size, device.num_blocks
        self.windows = device.windows
        self.lease_s, self.max_waiting = limits.lease_ms / 1000, limits.max_waiting
        self._load_interval_s = limits.load_interval_s
        self.transfer_layout = transfer_layout(device)
        self.steps = EventSource[StepOutput]()
        self.crashes = EventSource[EngineStopped]()
        self.loop = EngineLoop(engine, self.steps.publish, self.crashes.publish)
        self.adapters = AdapterStore(self.loop, device.adapters, limits.adapter_bytes)
        self.device_memory = device.memory
        self._sampling = BackgroundTask(
            "load samples", partial(run_restarting, "load samples", self._sample_load_always)
        )
        self.sender = KvSender(self.loop, self.transfer_layout, self.step_heartbeat, limits.lease_ms)
        self.sender.memory = transport.memory
        self.receiver = KvReceiver(self.loop, self.transfer_layout, self.peer, self.step_heartbeat)
        self.transport = transport
        self.epochs = Epochs()
        self.cache = PrefixCacheFeed()
        self.draining = False
        self.role_changes = EventSource[wire.Role]()
        self._queues: list[WaitingQueue] = []
        self._step = 0
        self.steps.subscribe(self._on_step)
        self.steps.subscribe(self.sender.on_step)
        self._last_load = _LoadSample(engine.load(), 0)

    async def __aenter__(self) -> Self:
        self.loop.start()
        self._sampling.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._sampling.close()
        finally:
            await self.loop.stop()

    def set_role(self, role: wire.Role) -> None:
        if role != self.role:
            names = {"role": enum_label(wire.Role, role), "previous": enum_label(wire.Role, self.role)}
            _log.info("role changed", **names)
            self.role = role
            self.role_changes.publish(role)

    async def prepare(self, request: Request) -> None:
        """Compile what a request needs before the engine gets it, in a thread. Raises InvalidRequest."""
        if request.grammar is not None:
            await asyncio.wrap_future(request.grammar.compiler.prepare(request.grammar))

    def blocks_for(self, tokens: int) -> int:
        count = -(-tokens // self.block_size)
        return sum(window.blocks_at_once(count, self.block_size) for window in self.windows)

    def new_ticket(self, run: wire.Run, requests: Sequence[Request], tokens: int) -> wire.Ticket:
        """Ticket for the cache of the first of these sequences, which has ``tokens`` tokens; the sender issues it."""
        return wire.Ticket(
            run=run,
            tokens=tokens,
            outputs=[request.sampling.output_index for request in requests],
            salt=requests[0].cache_salt,
            sender=self.peer,
            address=self.address,
            layout_hash=self.layout_hash,
        )

    @property
    def group_blocks(self) -> list[int]:
        return [0 if window == FULL else window.max_blocks(self.block_size) for window in self.windows]

    def _on_step(self, output: StepOutput) -> None:
        self._step = output.step

    # -- load ---------------------------------------------------------------------------------------------------

    def add_queue(self, queue: WaitingQueue) -> None:
        """Count the queue's runs in the load of the worker."""
        self._queues.append(queue)

    def num_waiting(self, *, besides: WaitingQueue | None = None) -> int:
        """Return the number of runs that wait outside the engine, without those of one queue."""
        return sum(queue.num_waiting for queue in self._queues if queue is not besides)

    def load(self) -> wire.Load:
        """Load of the worker; the engine's part is as of the last sample."""
        engine, leased = self._last_load.engine, self._last_load.leased_blocks
        return wire.Load(
            total_blocks=engine.total_blocks,
            free_blocks=engine.free_blocks,
            cached_blocks=engine.cached_blocks,
            leased_blocks=leased,
            running=engine.running,
            waiting=engine.waiting + self.num_waiting(),
            queued_tokens=engine.queued_tokens + sum(queue.waiting_tokens for queue in self._queues),
            takes_prompts=not self.draining and 2 * leased <= engine.total_blocks,
            draining=self.draining,
            role=self.role,
            busy_steps=self.loop.busy_steps,
            busy_us=round(self.loop.busy_seconds * 1e6),
            busy_tokens=self.loop.busy_tokens,
        )

    def step_heartbeat(self) -> wire.Heartbeat:
        age, longest = self.loop.step_age, self.loop.longest_step
        heartbeat = wire.Heartbeat(step=self._step, longest_step_ms=round(longest * 1000))
        if age:
            heartbeat.step_age_ms = round(age * 1000)
        return heartbeat

    def heartbeat(self) -> wire.Heartbeat:
        heartbeat = self.step_heartbeat()
        heartbeat.load.CopyFrom(self.load())
        return heartbeat

    @property
    def last_load(self) -> Load:
        return self._last_load.engine

    async def sample_load(self) -> None:
        ticketed = [lease.sequence for lease in self.sender.leases.all()]

        def sample(engine: Engine) -> _LoadSample:
            self.cache.record(engine.pool.index.changed())
            return _LoadSample(engine.load(), engine.blocks_of(ticketed))

        self._last_load = await self.loop.call(sample)
        self.cache.collect()

    async def _sample_load_always(self) -> None:
        while self.loop.is_healthy:
            await asyncio.sleep(self._load_interval_s)
            try:
                await self.sample_load()
            except EngineStopped:
                return


def transfer_layout(device: Device) -> TransferLayout:
    return TransferLayout(device.block_size, device.block_bytes, short_layout_hash(device.layout_hash))


def short_layout_hash(layout_hash: str) -> int:
    return int.from_bytes(hashlib.blake2b(layout_hash.encode(), digest_size=8).digest(), "little")
