"""Workers in virtual time: the test decides when an engine steps and its results are delivered."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from unittest.mock import patch

from decant.engine.engine import Engine
from decant.engine.errors import EngineStopped
from decant.engine.loop import EngineLoop
from decant.engine.scheduler import Limits
from decant.handoff.codec import Received, decode
from decant.handoff.packing import checksum
from decant.protos import worker_pb2 as wire
from decant.runtime.protocol import PROTOCOL
from decant.worker.decode.service import DecodeService
from decant.worker.engine_host import EngineHost, Identity, WorkerLimits
from decant.worker.prefill.service import PrefillService
from decant.worker.wire_codec import to_requests
from tests.worker.decode_harness import BLOCK, Device

LEASE_S = 2.0


class SteppedLoop(EngineLoop):
    """Engine loop without a thread: `turn` makes one step, `deliver` passes its result to the event loop."""

    def start(self) -> None:
        self._event_loop = asyncio.get_running_loop()
        self._deliveries = deque[Callable[[], None]]()

    @property
    def is_healthy(self) -> bool:
        return self._stopped is None

    def turn(self) -> None:
        if self._stopped is not None or not (self._inbox or self._engine.has_work):
            return
        batch = self._take_batch()
        try:
            for call in batch:
                call.run(self._engine)
            for call in batch:
                call.raise_without_caller()
            if self._engine.has_work:
                batch = self._answer(batch)
            output = self._engine.step()
        except ZeroDivisionError as error:
            stopped = EngineStopped(f"the engine crashed: {error}")
            stopped.__cause__ = error
            self._end(batch, stopped)
        else:
            self._deliver(batch, output)

    def deliver(self) -> None:
        if self._deliveries:
            self._deliveries.popleft()()

    def deliver_all(self) -> None:
        while self._deliveries:
            self.deliver()

    async def stop(self) -> None:
        if self._stopped is None:
            self._end([], EngineStopped("the engine was stopped"))
        self.deliver_all()

    def _post(self, callback: Callable[[], None]) -> None:
        self._deliveries.append(callback)


@dataclass
class Network:
    """Network whose messages pass while ``flows`` is set; with ``breaks`` the next message breaks its fetch."""

    flows: asyncio.Event = field(default_factory=asyncio.Event)
    breaks: bool = False
    loses_releases: bool = False


class LocalSource:
    def __init__(self, node: Node, network: Network) -> None:
        self._node = node
        self._network = network

    async def fetch(self, requests: AsyncIterable[wire.FetchRequest]) -> AsyncGenerator[Received, None]:
        async with aclosing(self._node.host.sender.fetch(requests)) as responses:
            async for message in responses:
                await self._network.flows.wait()
                if self._network.breaks:
                    self._network.breaks = False
                    raise ConnectionError("broken by the schedule")
                yield decode(message)

    def record_corruption(self, detail: str) -> None: ...

    async def release(self, request: wire.ReleaseRequest, seconds: float) -> None:
        if self._network.loses_releases:
            raise ConnectionError("lost by the schedule")
        await self._node.host.sender.release(request)


class Node:
    memory = None

    def __init__(self, name: str, nodes: dict[str, Node], network: Network, blocks: int) -> None:
        self._nodes, self._network = nodes, network
        self.device = Device(blocks)
        limits = Limits(token_budget=8, max_running=3, context_length=blocks * BLOCK)
        self.engine = Engine(self.device, limits, checksum=checksum)
        peer = wire.Peer(id=name, incarnation=7, protocol=PROTOCOL)
        with patch("decant.worker.engine_host.EngineLoop", SteppedLoop):
            self.host = EngineHost(
                self.engine,
                Identity(peer, wire.ROLE_DECODE, "m", name),
                self,
                WorkerLimits(lease_ms=round(LEASE_S * 1000), max_waiting=4),
            )
        self.prefill, self.decode = PrefillService(self.host), DecodeService(self.host)
        nodes[name] = self

    @property
    def loop(self) -> SteppedLoop:
        assert isinstance(self.host.loop, SteppedLoop)
        return self.host.loop

    def source(self, address: str) -> LocalSource:
        return LocalSource(self._nodes[address], self._network)

    def offer(self, run: wire.Run, work: wire.EngineRequest) -> wire.Ticket:
        root, *forks = to_requests(f"prefill/{run.request}", work, model="m", park_after=True)
        ticket = self.host.new_ticket(run, [root, *forks], len(root.token_ids))
        issued = self.host.sender.issue(ticket, [request.id for request in (root, *forks)], root.prompt_len)
        self.host.loop.post(lambda engine: engine.add(root, forks))
        return issued

    def assert_empty(self) -> None:
        decode = self.decode
        assert not list(self.prefill.runs())
        assert not list(decode.runs())
        assert (decode.sessions, decode.fetches_receiving, decode.orphans, decode.ended_runs) == (0, 0, 0, 0)
        assert decode.cancel_tombstones == 0
        assert (self.host.num_waiting(), self.host.load().queued_tokens) == (0, self.host.last_load.queued_tokens)
        assert not self.host.sender.leases.all()
        assert not self.host.epochs._live
        if self.host.loop.is_healthy:
            assert not self.engine.load().held_blocks, self.engine.pool.held_by()
            assert not self.engine.transfers.arrivals
            self.engine.check_integrity()
