"""One engine on its thread, what it is called, and who hears its steps.

                     step_listeners (in order), then the giver
    engine thread ──────────────────────────────────────────────> event loop
         ^                                                           │
         └──────────── commands: services, giver, taker, look ───────┘

A worker's services share one hub. How busy the engine is, is looked at as often as beats go out: between two steps,
on the engine's thread, so that telling it costs a step nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from decant.engine.engine import Engine
from decant.engine.errors import EngineStopped
from decant.engine.loop import EngineLoop
from decant.engine.output import Load, StepOutput
from decant.engine.transfer import IncomingSequence
from decant.handoff.errors import HandoffFailed
from decant.handoff.packing import TransferLayout
from decant.handoff.receiver import KvReceiver, TransferResult
from decant.handoff.sender import LEASE_MS, KvSender
from decant.handoff.transport import KvSource, Transport
from decant.protos import worker_pb2 as wire
from decant.runtime.background import BackgroundTask
from decant.runtime.heartbeat import HEARTBEAT_SECONDS
from decant.worker.epochs import Epochs
from decant.worker.report.prefix_cache_feed import PrefixCacheFeed


@dataclass(frozen=True, slots=True)
class Identity:
    """What a worker is called: its present life, what placement prefers it for, the id of the model that it serves,
    and where others reach it (host:port)."""

    peer: wire.Peer
    role: wire.Role
    model: str
    address: str


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """What a worker grants: how long a ticket keeps its blocks unless renewed, and how many runs may wait."""

    lease_ms: int = LEASE_MS
    max_waiting: int = 1024


@dataclass(frozen=True, slots=True)
class _LoadSample:
    """The engine between two steps, and the blocks that tickets hold of it."""

    engine: Load
    leased_blocks: int


class ObservedReceiver(KvReceiver):
    """Tells those who listen of each fetch: when it begins, and what came of it (None: nothing was left to fetch, or
    whoever fetched went away)."""

    def __init__(
        self, loop: EngineLoop, shape: TransferLayout, peer: wire.Peer, beat: Callable[[], wire.Heartbeat]
    ) -> None:
        super().__init__(loop, shape, peer, beat)
        self.began: list[Callable[[IncomingSequence], None]] = []
        self.ended: list[Callable[[IncomingSequence, TransferResult | HandoffFailed | None], None]] = []

    async def receive(self, source: KvSource, ticket: wire.Ticket, arrival: IncomingSequence) -> TransferResult:
        outcome: TransferResult | HandoffFailed | None = None
        for listener in self.began:
            listener(arrival)
        try:
            outcome = await super().receive(source, ticket, arrival)
            return outcome
        except HandoffFailed as failed:
            outcome = failed
            raise
        finally:
            for told in self.ended:
                told(arrival, outcome)


class EngineHost:
    """All that the services of one worker share. ``async with hub`` starts and ends the engine's thread.

    ``waiting_arrivals``, ``waiting_prompts`` and ``waiting_tokens`` are set by the services: runs that wait and are
    not in the engine yet, and the tokens of those whose KV is still to be computed.
    """

    def __init__(
        self, engine: Engine, identity: Identity, transport: Transport, limits: WorkerLimits | None = None
    ) -> None:
        limits = limits or WorkerLimits()
        device = engine.device
        self.peer, self.role, self.model = identity.peer, identity.role, identity.model
        self.address = identity.address
        self.layout, self.equal_bits = layout_number(device.layout), device.equal_bits
        self.window = engine.limits.context_length
        self.max_running = engine.limits.max_running
        self.block_size, self.total_blocks = device.block_size, device.num_blocks
        self.lease_s, self.max_waiting = limits.lease_ms / 1000, limits.max_waiting
        self.shape = TransferLayout(device.block_size, device.block_bytes, self.layout)
        self.loop = EngineLoop(engine, self._on_step, self._on_crash)
        self._sampling = BackgroundTask("load samples", self._sample_load_always)
        self.sender = KvSender(self.loop, self.shape, self.step_heartbeat, limits.lease_ms)
        self.receiver = ObservedReceiver(self.loop, self.shape, self.peer, self.step_heartbeat)
        self.transport = transport
        self.epochs = Epochs()
        self.cache = PrefixCacheFeed()
        self.step_listeners: list[Callable[[StepOutput], None]] = []
        self.crash_listeners: list[Callable[[EngineStopped], None]] = []
        self.draining = False
        self.waiting_arrivals = self.waiting_prompts = self.waiting_tokens = 0
        self._step = 0
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

    def blocks_for(self, tokens: int) -> int:
        """How many blocks ``tokens`` tokens fill, the last one perhaps in part."""
        return -(-tokens // self.block_size)

    # -- how busy ------------------------------------------------------------------------------------------------

    def load(self) -> wire.Load:
        """What placement looks at, as it was at the last look."""
        engine, leased = self._last_load.engine, self._last_load.leased_blocks
        return wire.Load(
            total_blocks=engine.total_blocks,
            free_blocks=engine.free_blocks,
            cached_blocks=engine.cached_blocks,
            leased_blocks=leased,
            running=engine.running,
            waiting=engine.waiting + self.waiting_arrivals + self.waiting_prompts,
            queued_tokens=engine.queued_tokens + self.waiting_tokens,
            takes_prompts=not self.draining and 2 * leased <= engine.total_blocks,
            draining=self.draining,
            role=self.role,
        )

    def step_heartbeat(self) -> wire.Heartbeat:
        """That this worker lives and steps: what goes over fetches."""
        age, longest = self.loop.step_age, self.loop.longest_step
        beat = wire.Heartbeat(step=self._step, longest_step_ms=round(longest * 1000))
        if age:
            beat.step_age_ms = round(age * 1000)
        return beat

    def heartbeat(self) -> wire.Heartbeat:
        """The same with the load: what goes over sessions."""
        beat = self.step_heartbeat()
        beat.load.CopyFrom(self.load())
        return beat

    @property
    def last_load(self) -> Load:
        """The engine's own account at the last look."""
        return self._last_load.engine

    async def sample_load(self) -> None:
        """See how busy the engine is now. Raises EngineStopped."""
        ticketed = [lease.sequence for lease in self.sender.leases.all()]

        def sample(engine: Engine) -> _LoadSample:
            self.cache.note(engine.pool.changed())
            return _LoadSample(engine.load(), engine.blocks_of(ticketed))

        self._last_load = await self.loop.call(sample)
        self.cache.collect()

    async def _sample_load_always(self) -> None:
        while self.loop.healthy:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            try:
                await self.sample_load()
            except EngineStopped:
                return

    # -- what the engine tells -----------------------------------------------------------------------------------

    def _on_step(self, output: StepOutput) -> None:
        """The giver comes last: a listener that issues a ticket at a sequence's first step does so before the giver
        hears what else that step did to it."""
        self._step = output.step
        for listener in self.step_listeners:
            listener(output)
        self.sender.on_step(output)

    def _on_crash(self, stopped: EngineStopped) -> None:
        for listener in self.crash_listeners:
            listener(stopped)


def layout_number(layout: str) -> int:
    """A device's layout as the number that tickets and registrations carry."""
    return int.from_bytes(hashlib.blake2b(layout.encode(), digest_size=8).digest(), "little")
