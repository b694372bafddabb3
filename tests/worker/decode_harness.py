"""Workers with torch-free engines behind real gRPC servers, and a router that a test drives."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import grpc

from decant.engine.engine import Engine
from decant.engine.fake import FakeDevice
from decant.engine.plan import StepPlan, StepResult
from decant.engine.request import Request
from decant.engine.scheduler import Limits
from decant.handoff.packing import checksum
from decant.handoff.service import KvSourceService
from decant.handoff.transport import GrpcTransport
from decant.protos import worker_pb2 as wire
from decant.protos import worker_pb2_grpc as services
from decant.runtime.error_details import Reason
from decant.runtime.errors import ServiceError
from decant.runtime.interceptor import ErrorInterceptor
from decant.runtime.packed import pack, unpack
from decant.worker.decode.service import DecodeService
from decant.worker.decode.session import SessionLimits
from decant.worker.engine_host import EngineHost, Identity, WorkerLimits
from decant.worker.wire_codec import to_request

BLOCK = 4
PATIENCE = 60.0
"""Seconds that a test waits for what must happen; machines may be very busy."""


class Device(FakeDevice):
    """Steps when ``gate`` lets it, takes its time, and crashes when told to."""

    def __init__(self, blocks: int, eos: Sequence[int] = ()) -> None:
        super().__init__(
            num_blocks=blocks,
            block_size=BLOCK,
            vocab_size=64,
            eos_token_ids=frozenset(eos),
            cost=lambda _: self.seconds,
        )
        self.seconds = 0.0
        self.broken = False

    def run(self, plan: StepPlan) -> StepResult:
        if self.broken:
            raise ZeroDivisionError("the device is broken")
        return super().run(plan)


class Node:
    """One worker: its engine, its hub, its services on a port. ``async with`` opens and audits it."""

    def __init__(
        self,
        name: str,
        *,
        blocks: int = 128,
        running: int = 8,
        budget: int = 16,
        session_limits: SessionLimits | None = None,
        **terms: int,
    ) -> None:
        self._session_limits = session_limits
        self.device = Device(blocks)
        self.engine = Engine(
            self.device,
            Limits(token_budget=budget, max_running=running, context_length=blocks * BLOCK),
            checksum=checksum,
        )
        self.peer = wire.Peer(id=name, incarnation=7, protocol=1)
        self.errors: list[ServiceError] = []
        self._transport = GrpcTransport(grpc.aio.insecure_channel)
        self._server = grpc.aio.server(interceptors=[ErrorInterceptor(self._record)])
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        identity = Identity(self.peer, wire.ROLE_DECODE, "m", self.address)
        self.host = EngineHost(self.engine, identity, self._transport, WorkerLimits(**{"lease_ms": 10_000, **terms}))

    async def __aenter__(self) -> Self:
        self.decode = DecodeService(self.host, self._session_limits)
        self.host.connect(self.decode.run_manager)
        services.add_DecodeServicer_to_server(self.decode, self._server)
        KvSourceService(self.host.sender).add_to(self._server)
        await self.host.__aenter__()
        await self._server.start()
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        try:
            await self.decode.close()
            await self._server.stop(1)
            await self._transport.close()
            if self.host.loop.healthy and kind is None:
                await self.audit()
        finally:
            await self.host.__aexit__(None, None, None)
        if kind is None:
            self._nothing_is_left()

    def _nothing_is_left(self) -> None:
        self.engine.check_integrity()
        decode = self.decode
        assert (decode.sessions, decode.fetches_taking, decode.cancel_marks, len(list(decode.runs()))) == (0, 0, 0, 0)
        assert self.host.waiting_arrivals == 0

    def _record(self, error: ServiceError) -> None:
        """Keep an error of this test's own callers: another test's router may look for a worker that had this port."""
        if error.reason is not Reason.WRONG_PEER:
            self.errors.append(error)

    async def held(self) -> int:
        """Blocks that somebody holds."""
        return (await self.host.loop.call(lambda engine: engine.load())).held_blocks

    async def audit(self) -> None:
        """Nothing is held, and every account adds up, once what is under way is over."""
        try:
            await eventually(self.is_empty)
        except TimeoutError:
            raise AssertionError(f"blocks are held: {self.engine.pool.held_by()}") from None
        await self.host.loop.call(lambda engine: engine.check_integrity())

    async def is_empty(self) -> bool:
        return not await self.held()

    async def offer(self, run: wire.Run, work: wire.EngineRequest) -> wire.Ticket:
        """Take a prompt up as a prefill worker does, and give a ticket for its cache."""
        request = to_request(f"prefill/{run.request}/{run.attempt}", work, model="m", park_after=True)
        ticket = wire.Ticket(run=run, sender=self.peer, address=self.address, layout=self.host.layout, salt=work.salt)
        ticket.tokens = len(request.token_ids)
        issued = self.host.sender.issue(ticket, request.id, request.prompt_len)
        await self.host.loop.call(lambda engine: engine.add(request))
        return issued


async def eventually(reached: Callable[[], Any]) -> None:
    """Until it is so. For what comes without a message to wait for."""
    async with asyncio.timeout(PATIENCE):
        while True:
            result = reached()
            if await result if asyncio.iscoroutine(result) else result:
                return
            await asyncio.sleep(0.02)


def make_run(request: str = "t/r", epoch: int = 1, attempt: int = 1) -> wire.Run:
    return wire.Run(request=request, epoch=epoch, attempt=attempt)


def make_work(
    length: int = 10, wanted: int = 8, *, seed: int = 0, written: Sequence[int] = (), **more: Any
) -> wire.EngineRequest:
    """A prompt of ``length`` tokens that differ for each seed, and ``wanted`` tokens of output."""
    return wire.EngineRequest(
        model="m",
        prompt=pack([(7 * position + 3 * seed + 1) % 64 for position in range(length)]),
        outputs=[wire.OutputPrefix(output=0, tokens=pack(written))],
        sampling=wire.Sampling(temperature=0.8, top_p=1, repetition_penalty=1, seed=seed),
        stopping=wire.Stopping(max_tokens=wanted),
        salt=b"tenant",
        **more,
    )


def alone(work: wire.EngineRequest, eos: Sequence[int] = ()) -> list[int]:
    """The output of a work on one engine from beginning to end, what came with it included."""
    return written_alone(to_request("alone", work, model="m"), eos)


def written_alone(request: Request, eos: Sequence[int] = ()) -> list[int]:
    engine = Engine(Device(256, eos), Limits(token_budget=64, max_running=1, context_length=1024))
    engine.add(request)
    output = list(request.token_ids[request.prompt_len :])
    while engine.has_work:
        output += [token.token for token in engine.step().tokens]
    return output


@dataclass
class RunRecord:
    """What a router was told of one run. Entries of ``tokens`` are by position."""

    tokens: dict[int, int] = field(default_factory=dict)
    logprobs: dict[int, wire.TokenLogprobs] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)
    last: dict[str, Any] = field(default_factory=dict)

    @property
    def over(self) -> str | None:
        """How it ended for this router."""
        ways = ("ended", "failed", "refused", "superseded")
        return next((way for way in ways if way in self.last), None)

    def text(self, prompt: int) -> list[int]:
        """The output from its first position on, without a gap."""
        positions = sorted(self.tokens)
        assert positions == list(range(positions[0], positions[0] + len(positions))) if positions else True
        assert not positions or positions[0] >= prompt
        return [self.tokens[position] for position in positions]


class Router:
    """One router's side of its session with one worker, held to the contract of what it is told."""

    def __init__(self, node: Node, name: str = "router", incarnation: int = 1) -> None:
        self.node = node
        self.peer = wire.Peer(id=name, incarnation=incarnation, protocol=1)
        self.records: dict[tuple[str, int], RunRecord] = {}
        self.order: list[tuple[str, int]] = []  # in which runs were taken up
        self.beats: list[wire.Heartbeat] = []
        self.frames: list[wire.Frame] = []
        self.welcome: wire.Welcome | None = None
        self.error: grpc.aio.AioRpcError | None = None
        self.broken: AssertionError | None = None  # the worker told what it must not tell
        self.closed = False
        self.beats_itself = True
        self._slots: dict[int, tuple[str, int]] = {}
        self._changed = asyncio.Event()
        self._speaking = asyncio.Lock()

    async def open(self, *owned: wire.Hello.Owned, worker: wire.Peer | None = None) -> wire.Welcome:
        """Say hello and hear the welcome. Raises AssertionError when the session ends instead."""
        self.channel = grpc.aio.insecure_channel(self.node.address, [("grpc.use_local_subchannel_pool", 1)])
        self.call = services.DecodeStub(self.channel).Session()
        self._forget()
        self._reading = asyncio.create_task(self._read())
        self._beating = asyncio.create_task(self._beat()) if self.beats_itself else None
        hello = wire.Hello(router=self.peer, worker=worker or self.node.peer, owned=owned)
        await self.say(hello=hello)
        await self.until(lambda: self.welcome is not None or self.closed)
        assert self.welcome is not None, self.error
        return self.welcome

    def _forget(self) -> None:
        """What was said in an earlier session counts no more, but for what was told of runs."""
        self.welcome, self.error, self.closed = None, None, False
        self._slots.clear()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.leave()

    async def leave(self) -> None:
        """Break the session, and see the worker notice."""
        self.call.cancel()
        if self._beating is not None:
            self._beating.cancel()
        await asyncio.wait([self._reading])
        await self.channel.close()
        if self.broken is not None:
            raise self.broken
        mine = self.peer.id
        await eventually(lambda: mine not in self.node.decode._sessions or self.closed_by_newer())

    def closed_by_newer(self) -> bool:
        """Whether a newer session took this one's place."""
        session = self.node.decode._sessions.get(self.peer.id)
        return session is not None and session.router.incarnation != self.peer.incarnation

    async def _beat(self) -> None:
        while not self.closed:
            await asyncio.sleep(0.25)
            await self.say(heartbeat=wire.Heartbeat())

    async def say(self, **message: Any) -> None:
        """Say something; into the void when the session is over. A call takes one message at a time."""
        async with self._speaking:
            with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
                await self.call.write(wire.RouterMessage(**message))

    async def start(self, run: wire.Run, work: wire.EngineRequest, ticket: wire.Ticket | None = None) -> None:
        await self.say(start=wire.Start(run=run, engine_request=work, ticket=ticket))

    async def cancel(self, run: wire.Run, reason: wire.Cancel.Reason = wire.Cancel.REASON_CLIENT, **more: Any) -> None:
        await self.say(cancel=wire.Cancel(run=run, reason=reason, **more))

    async def forget(self, *runs: wire.Run) -> None:
        await self.say(forget=wire.ForgetRuns(runs=runs))

    def of(self, run: wire.Run) -> RunRecord:
        return self.records.setdefault((run.request, run.attempt), RunRecord())

    async def until(self, reached: Callable[[], object]) -> None:
        """Until what was told makes it so."""
        async with asyncio.timeout(PATIENCE):
            while not reached():
                if self.broken is not None:
                    raise self.broken
                self._changed.clear()
                await self._changed.wait()

    async def over(self, *runs: wire.Run) -> list[RunRecord]:
        """Until these ended, one way or another."""
        await self.until(lambda: all(self.of(run).over for run in runs))
        return [self.of(run) for run in runs]

    async def word(self, run: wire.Run, kind: str) -> Any:
        """The latest message of a kind about a run, once there is one."""
        await self.until(lambda: kind in self.of(run).last)
        return self.of(run).last[kind]

    async def wrote(self, run: wire.Run, tokens: int) -> None:
        await self.until(lambda: len(self.of(run).tokens) >= tokens)

    # -- hearing ------------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        try:
            async for message in self.call:
                self._hear(message)
                self._changed.set()
        except grpc.aio.AioRpcError as error:
            self.error = error
        except asyncio.CancelledError:
            pass
        except AssertionError as error:
            self.broken = error
        finally:
            self.closed = True
            self._changed.set()

    def _hear(self, message: wire.WorkerMessage) -> None:
        kind = message.WhichOneof("message")
        assert kind is not None
        assert (self.welcome is None) == (kind == "welcome"), f"{kind} came before the welcome, or it came twice"
        if kind == "welcome":
            self.welcome = message.welcome
            for held in message.welcome.runs:
                self._hear_held(held)
        elif kind == "heartbeat":
            self.beats.append(message.heartbeat)
        elif kind == "frame":
            self._hear_frame(message.frame)
        else:
            self._hear_word(kind, getattr(message, kind))

    def _hear_word(self, kind: str, said: Any) -> None:
        record = self.of(said.run)
        record.words.append(kind)
        record.last[kind] = said
        if kind == "scheduled":
            self.order.append((said.run.request, said.run.attempt))
        if kind == "decode_started":
            assert "ended" not in record.last
            self._call(said.run, said.slots)
        elif kind == "run_status":
            self._hear_held(said)
        elif kind == "ended":
            assert all(position < said.end.end_position for position in record.tokens) or said.end.reason in (
                wire.OutputEnd.REASON_CANCELLED,
            )

    def _hear_held(self, held: wire.RunStatus) -> None:
        self.of(held.run).last["run_status"] = held
        self._call(held.run, held.slots)

    def _call(self, run: wire.Run, slots: Sequence[wire.Slot]) -> None:
        for slot in slots:
            self._slots[slot.slot] = (run.request, run.attempt)

    def _hear_frame(self, frame: wire.Frame) -> None:
        self.frames.append(frame)
        rows = [unpack(packed) for packed in (frame.slots, frame.positions, frame.tokens)]
        explained = {logprobs.entry: logprobs for logprobs in frame.logprobs}
        for entry, (slot, position, token) in enumerate(zip(*rows, strict=True)):
            assert slot in self._slots, f"slot {slot} was never told"
            record = self.records[self._slots[slot]]
            assert record.tokens.setdefault(position, token) == token, f"another token at {position}"
            if entry in explained:
                explained[entry].entry = 0
                record.logprobs[position] = explained[entry]


@asynccontextmanager
async def routed(**node: Any) -> AsyncIterator[tuple[Node, Router]]:
    """A worker and a router with a session."""
    async with Node("d", **node) as worker, Router(worker) as router:
        yield worker, router


def owned(run: wire.Run, position: int | None = None) -> wire.Hello.Owned:
    """What a router says of a run that it believes to own; ``position``: of the first token that it lacks."""
    next = [] if position is None else [wire.ResumePosition(output=0, position=position)]
    return wire.Hello.Owned(run=run, resume=next)
