"""Workers over torch-free engines behind real gRPC servers, and a router that calls their Prefill by hand."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc

from decant.engine.engine import Engine
from decant.engine.fake import FakeAdapter, FakeDevice
from decant.engine.output import SequenceFinished, StepOutput, Token
from decant.engine.plan import StepPlan, StepResult
from decant.engine.request import Request
from decant.engine.scheduler import Limits
from decant.handoff.packing import checksum
from decant.handoff.receiver import TransferResult
from decant.handoff.service import KvSourceService
from decant.handoff.transport import GrpcTransport
from decant.protos import worker_pb2 as wire
from decant.protos import worker_pb2_grpc as services
from decant.protos.state_pb2 import Capacity, WorkerRegistration
from decant.runtime.connections.channel import open_channel
from decant.runtime.connections.heartbeat import HEARTBEAT_SECONDS
from decant.runtime.connections.tls import PeerTls
from decant.runtime.packed import pack
from decant.runtime.protocol import PROTOCOL
from decant.runtime.serving.health import Readiness
from decant.runtime.serving.interceptor import ErrorInterceptor
from decant.worker.adapter_store import _Offer
from decant.worker.adapters import announcement
from decant.worker.administration import AdminService
from decant.worker.decode.service import DecodeService
from decant.worker.decode.session import SessionLimits
from decant.worker.engine_host import EngineHost, Identity, WorkerLimits
from decant.worker.prefill.service import PrefillService
from decant.worker.report.audit import Auditor
from tests.router.fake_script import TOKENIZER
from tests.worker import answer_kinds
from tests.worker.answer_kinds import VOCABULARY
from tests.worker.decode_harness import run_request_alone
from tests.worker.requests import to_request
from tests.worker.waiting import PATIENCE, eventually

BLOCK = 4
MODEL = "m"
ROUTER = wire.Peer(id="router", incarnation=7, protocol=PROTOCOL)


ADAPTER_NAMES = ("pirate", "poet")
ADAPTERS = tuple(FakeAdapter(f"digest of {name}") for name in ADAPTER_NAMES)
"""Of each worker, whose device has them from the start."""


class Device(FakeDevice):
    """Device whose steps take ``step_s``, wait while it is held, and raise if it is ``broken``."""

    def __init__(self, *, step_s: float, **settings: Any) -> None:
        super().__init__(block_size=BLOCK, vocab_size=VOCABULARY, cost=lambda _: self.step_s, **settings)
        self.step_s = step_s
        for adapter in ADAPTERS:
            self.adapters.add(adapter)
        self.free = threading.Event()
        self.free.set()
        self.broken = False
        self.steps = threading.Semaphore(0)  # that may run while it is held

    def run(self, plan: StepPlan) -> StepResult:
        if not self.free.is_set():
            self.steps.acquire(timeout=PATIENCE)
        if self.broken:
            raise ZeroDivisionError("the device is broken")
        return super().run(plan)

    def hold(self) -> None:
        self.free.clear()

    def let(self, steps: int) -> None:
        self.steps.release(steps)

    def go_on(self) -> None:
        self.free.set()
        self.steps.release(1)


class WorkerHarness:
    def __init__(
        self,
        engine: Engine,
        server: grpc.aio.Server,
        port: int,
        identity: Identity,
        limits: WorkerLimits,
        session_limits: SessionLimits | None = None,
    ) -> None:
        self.engine = engine
        self.device: Device = engine.device  # type: ignore[assignment]
        self.server = server
        self.address = f"127.0.0.1:{port}"
        self.channel = open_channel(self.address, PeerTls())
        self.transport = GrpcTransport(lambda address: open_channel(address, PeerTls()))
        identity = replace(identity, address=identity.address or self.address)
        self.host = EngineHost(engine, identity, self.transport, limits, answer_kinds.compiler())
        for name, adapter in zip(ADAPTER_NAMES, ADAPTERS, strict=True):
            self.host.adapters._offers[name] = _Offer(Path("/nowhere"), announcement(name, adapter), is_watched=False)
            self.host.adapters._loaded[adapter.digest] = adapter.nbytes
        self.prefill = PrefillService(self.host)
        self.decode = DecodeService(self.host, session_limits)
        self.auditor = Auditor(self.host, self.prefill, self.decode)
        self.readiness = Readiness()
        self.readiness.mark_ready()
        self.renewals: list[None] = []
        admin = AdminService(self.host, self.auditor, self.readiness, lambda: self.renewals.append(None))
        self.outputs: dict[str, list[int]] = {}
        self.ends: dict[str, asyncio.Event] = {}
        self.host.steps.subscribe(self._on_step)
        services.add_PrefillServicer_to_server(self.prefill, server)
        services.add_DecodeServicer_to_server(self.decode, server)
        KvSourceService(self.host.sender).add_to(server)
        services.add_AdminServicer_to_server(admin, server)

    def _on_step(self, output: StepOutput) -> None:
        events: list[Token | SequenceFinished] = [*output.tokens, *output.ended]
        for event in events:
            if isinstance(event, Token):
                self.outputs.setdefault(event.id, []).append(event.token)
            else:
                self.ends.setdefault(event.id, asyncio.Event()).set()

    async def written(self, id: str) -> list[int]:
        async with asyncio.timeout(PATIENCE):
            await self.ends.setdefault(id, asyncio.Event()).wait()
        return self.outputs.get(id, [])

    def call(self, request: wire.PrefillRequest) -> Call:
        return Call(services.PrefillStub(self.channel).Prefill(request))

    def ask(self, work: wire.EngineRequest, *, handoff: bool = True, request: str = "t/a", epoch: int = 1) -> Call:
        run = wire.Run(request=request, epoch=epoch, attempt=1)
        return self.call(
            wire.PrefillRequest(run=run, router=ROUTER, worker=self.host.peer, engine_request=work, handoff=handoff)
        )

    async def audit(self) -> wire.AuditResponse:
        answer = await self.auditor.audit()
        assert not answer.violations, list(answer.violations)
        return answer

    async def until(self, holds: Callable[[wire.AuditResponse], bool]) -> wire.AuditResponse:
        answer = await self.audit()
        async with asyncio.timeout(PATIENCE):
            while not holds(answer):
                await asyncio.sleep(0.02)
                answer = await self.audit()
        return answer

    async def runs(self, count: int) -> None:
        """Wait until ``count`` prompts are active."""
        await eventually(lambda: len(list(self.prefill.runs())) == count)

    async def opened(self) -> None:
        """Wait until each lease's fetch is open, or was."""
        leases = self.host.sender.leases.all
        await eventually(lambda: all(lease.is_opened for lease in leases()))

    async def emptied(self) -> wire.AuditResponse:
        return await self.until(
            lambda seen: not (seen.owned_blocks or seen.leased_blocks or seen.owners or seen.leases or seen.fetches)
        )

    async def receive(self, ticket: wire.Ticket, request: Request) -> TransferResult:
        """Fetch as a decode worker does; the sequence then runs here."""
        loop = self.host.loop
        arrival = await loop.call(lambda engine: engine.transfers.reserve(request), undo=lambda _, made: made.abort())
        return await self.host.receiver.receive(self.transport.source(ticket.address), ticket, arrival)


class Call:
    def __init__(self, call: Any) -> None:
        self.call = call
        self._early: wire.PrefillEvent | None = None

    async def next(self) -> wire.PrefillEvent | None:
        async with asyncio.timeout(PATIENCE):
            event = await self.call.read()
        if event == grpc.aio.EOF:
            assert await self.call.code() is grpc.StatusCode.OK
            return None
        assert isinstance(event, wire.PrefillEvent)
        return event

    async def expect(self, kind: str) -> Any:
        """Return the next event's content, which must be of that kind. A ticket may follow the first token."""
        event, self._early = self._early or await self.next(), None
        assert event is not None, f"the call ended before {kind}"
        if {kind, event.WhichOneof("event")} == {"ticket", "first"}:
            self._early, event = event, await self.next()
            assert event is not None, f"the call ended before {kind}"
        assert event.WhichOneof("event") == kind, event
        return getattr(event, kind)

    async def ended(self) -> None:
        assert (event := self._early or await self.next()) is None, event

    async def break_off(self) -> None:
        self.call.cancel()


@dataclass(frozen=True)
class Registered:
    registration: WorkerRegistration


def registered(harness: WorkerHarness, *, equal_bits: bool = True) -> Any:
    host = harness.host
    capacity = Capacity(
        total_blocks=host.total_blocks,
        block_size=host.block_size,
        max_context_length=host.context_length,
        max_running=host.max_running,
    )
    return Registered(
        WorkerRegistration(
            peer=host.peer,
            address=host.address,
            role=host.role,
            model=MODEL,
            layout_hash=host.layout_hash,
            tokenizer=TOKENIZER,
            capacity=capacity,
            equal_bits=equal_bits,
            adapters=host.adapters.announcements,
        )
    )


async def ticket_of(call: Call) -> wire.Ticket:
    ticket = await call.expect("ticket")
    assert isinstance(ticket, wire.Ticket)
    return ticket


@asynccontextmanager
async def worker(
    name: str = "p",
    *,
    blocks: int = 64,
    budget: int = 16,
    eos: int | None = None,
    lease_ms: int = 30_000,
    max_waiting: int = 64,
    role: wire.Role = wire.ROLE_PREFILL,
    advertise: str = "",
    step_s: float = 0.0,
    session_limits: SessionLimits | None = None,
    load_interval_s: float = HEARTBEAT_SECONDS,
    adapter_bytes: int | None = None,
) -> AsyncIterator[WorkerHarness]:
    """Serve a worker until the block ends; then it may hold only leases that expire."""
    stops = frozenset(() if eos is None else (eos,))
    device = Device(num_blocks=blocks, eos_token_ids=stops, step_s=step_s)
    engine = Engine(device, Limits(budget, min(8, budget), blocks * BLOCK), checksum=checksum)
    names = [services_.full_name for services_ in wire.DESCRIPTOR.services_by_name.values()]
    server = grpc.aio.server(interceptors=[ErrorInterceptor(lambda _: None, services=names)])
    port = server.add_insecure_port("127.0.0.1:0")
    peer = wire.Peer(id=name, incarnation=hash(name) & 0xFFFF or 1, protocol=PROTOCOL)
    identity = Identity(peer, role, MODEL, advertise)
    limits = WorkerLimits(lease_ms, max_waiting, adapter_bytes, load_interval_s)
    harness = WorkerHarness(engine, server, port, identity, limits, session_limits)
    async with harness.host:
        await server.start()
        try:
            yield harness
            device.go_on()
            if harness.host.loop.is_healthy:
                audit = await harness.until(lambda seen: not seen.owned_blocks and not seen.owners)
                assert audit.free_blocks + audit.cached_blocks + audit.leased_blocks == blocks
        finally:
            device.go_on()
            await harness.prefill.close()
            await harness.channel.close()
            await harness.transport.close()
            await server.stop(None)


def tokens(length: int, seed: int = 0) -> list[int]:
    return [(7 * position + 11 * seed + 1) % VOCABULARY for position in range(length)]


def make_work(
    length: int = 30, wanted: int = 10, *, seed: int = 0, written: list[int] | None = None
) -> wire.EngineRequest:
    """Sampled work, so that a wrong position, seed or history shows in the text."""
    return wire.EngineRequest(
        model=MODEL,
        prompt=pack(tokens(length, seed)),
        outputs=[wire.OutputPrefix(output=0, tokens=pack(written or []))],
        sampling=wire.Sampling(temperature=0.8, top_p=1, repetition_penalty=1, seed=seed),
        stopping=wire.Stopping(max_tokens=wanted),
        salt=b"tenant",
    )


def run_alone(work: wire.EngineRequest, *, eos: int | None = None) -> list[int]:
    request = replace(
        to_request("alone", work, model=MODEL, guides=answer_kinds.compiler(), adapters={work.adapter}),
        park_after=None,
    )
    return run_request_alone(request, () if eos is None else (eos,), vocabulary=VOCABULARY)
