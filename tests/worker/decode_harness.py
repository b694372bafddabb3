from __future__ import annotations

import threading
import time
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self

import grpc

from decant.engine.engine import Engine
from decant.engine.fake import FakeDevice
from decant.engine.kv_layout import FULL, Window
from decant.engine.plan import Row, StepPlan, StepResult
from decant.engine.request import Request
from decant.engine.scheduler import Limits
from decant.handoff.packing import checksum
from decant.handoff.service import KvSourceService
from decant.handoff.transport import GrpcTransport
from decant.protos import worker_pb2 as wire
from decant.protos import worker_pb2_grpc as services
from decant.runtime.error_details import Reason
from decant.runtime.errors import ServiceError
from decant.runtime.packed import pack
from decant.runtime.protocol import PROTOCOL
from decant.runtime.serving.interceptor import ErrorInterceptor
from decant.worker.decode.service import DecodeService
from decant.worker.decode.session import SessionLimits
from decant.worker.engine_host import EngineHost, Identity, WorkerLimits
from tests.worker.requests import to_request
from tests.worker.session_client import Router
from tests.worker.waiting import eventually

BLOCK = 4
VOCABULARY = 64
Windows = tuple[Window, ...]
"""By cache group."""


class Device(FakeDevice):
    """Device whose steps take ``seconds``, also if they change during a step, and raise if it is ``broken``."""

    def __init__(self, blocks: int, eos: Sequence[int] = (), windows: Windows = (FULL,)) -> None:
        self.windows = windows
        self.broken = False
        self._seconds = 0.0
        self._changed = threading.Condition()
        super().__init__(
            num_blocks=blocks,
            block_size=BLOCK,
            vocab_size=VOCABULARY,
            eos_token_ids=frozenset(eos),
            cost=self._wait,
        )

    @property
    def seconds(self) -> float:
        return self._seconds

    @seconds.setter
    def seconds(self, seconds: float) -> None:
        with self._changed:
            self._seconds = seconds
            self._changed.notify()

    def _wait(self, _: StepPlan) -> float:
        began = time.monotonic()
        with self._changed:
            while (left := began + self._seconds - time.monotonic()) > 0:
                self._changed.wait(left)
        return 0.0

    def run(self, plan: StepPlan) -> StepResult:
        if self.broken:
            raise ZeroDivisionError("the device is broken")
        return super().run(plan)


class Node:
    """Engine, host and decode services of a worker on a port; ``async with`` opens and audits it.

    Its device is a ``Device`` of ``blocks`` blocks, unless there is another.
    """

    def __init__(
        self,
        name: str,
        *,
        blocks: int = 128,
        running: int = 8,
        budget: int = 16,
        session_limits: SessionLimits | None = None,
        windows: Windows = (FULL,),
        device: Any = None,
        **limits: int,
    ) -> None:
        self._session_limits = session_limits
        self.device: Device = device or Device(blocks * len(windows), windows=windows)
        self.engine = Engine(
            self.device,
            Limits(token_budget=budget, max_running=running, context_length=blocks * BLOCK),
            checksum=checksum,
        )
        self.peer = wire.Peer(id=name, incarnation=7, protocol=PROTOCOL)
        self.errors: list[ServiceError] = []
        self._transport = GrpcTransport(grpc.aio.insecure_channel)
        self._server = grpc.aio.server(interceptors=[ErrorInterceptor(self._record)])
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        identity = Identity(self.peer, wire.ROLE_DECODE, "m", self.address)
        self.host = EngineHost(self.engine, identity, self._transport, WorkerLimits(**{"lease_ms": 10_000, **limits}))

    async def __aenter__(self) -> Self:
        self.decode = DecodeService(self.host, self._session_limits)
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
            if self.host.loop.is_healthy and kind is None:
                await self.audit()
        finally:
            await self.host.__aexit__(None, None, None)
        if kind is None:
            self._nothing_is_left()

    def _nothing_is_left(self) -> None:
        self.engine.check_integrity()
        decode = self.decode
        assert (decode.sessions, decode.fetches_receiving, decode.cancel_tombstones, len(list(decode.runs()))) == (
            0,
            0,
            0,
            0,
        )
        assert self.host.num_waiting() == 0

    def _record(self, error: ServiceError) -> None:
        """Ignore WRONG_PEER: another test's router may look for a worker that had this port."""
        if error.reason is not Reason.WRONG_PEER:
            self.errors.append(error)

    async def num_held_blocks(self) -> int:
        return (await self.host.loop.call(lambda engine: engine.load())).held_blocks

    async def audit(self) -> None:
        try:
            await eventually(self.is_empty)
        except TimeoutError:
            raise AssertionError(f"blocks are held: {self.engine.pool.held_by()}") from None
        await self.host.loop.call(lambda engine: engine.check_integrity())

    async def is_empty(self) -> bool:
        return not await self.num_held_blocks()

    async def offer(self, run: wire.Run, work: wire.EngineRequest) -> wire.Ticket:
        """Start a prompt as a prefill worker does; return a ticket for its cache."""
        request = to_request(f"prefill/{run.request}/{run.attempt}", work, model="m", park_after=True)
        ticket = wire.Ticket(
            run=run, sender=self.peer, address=self.address, layout_hash=self.host.layout_hash, salt=work.salt
        )
        ticket.tokens = len(request.token_ids)
        issued = self.host.sender.issue(ticket, [request.id], request.prompt_len)
        await self.host.loop.call(lambda engine: engine.add(request))
        return issued


def make_run(request: str = "t/r", epoch: int = 1, attempt: int = 1) -> wire.Run:
    return wire.Run(request=request, epoch=epoch, attempt=attempt)


def make_work(
    length: int = 10, wanted: int = 8, *, seed: int = 0, written: Sequence[int] = (), **more: Any
) -> wire.EngineRequest:
    return wire.EngineRequest(
        model="m",
        prompt=pack([(7 * position + 3 * seed + 1) % VOCABULARY for position in range(length)]),
        outputs=[wire.OutputPrefix(output=0, tokens=pack(written))],
        sampling=wire.Sampling(temperature=0.8, top_p=1, repetition_penalty=1, seed=seed),
        stopping=wire.Stopping(max_tokens=wanted),
        salt=b"tenant",
        **more,
    )


def run_alone(work: wire.EngineRequest, eos: Sequence[int] = (), windows: Windows = (FULL,)) -> list[int]:
    return run_request_alone(to_request("alone", work, model="m"), eos, windows)


def run_request_alone(
    request: Request, eos: Sequence[int] = (), windows: Windows = (FULL,), vocabulary: int = VOCABULARY
) -> list[int]:
    """Return the outputs of ``request``, those that it came with first, without engine or other rows."""
    device = FakeDevice(
        num_blocks=256 * len(windows), block_size=BLOCK, vocab_size=vocabulary, eos_token_ids=frozenset(eos)
    )
    device.windows = windows
    blocks = tuple(array("i", range(256 * group, 256 * (group + 1))) for group in range(len(windows)))
    tokens, computed, token = list(request.token_ids), 0, None
    ends = request.stop.ids(device.eos_token_ids)
    while token not in ends and len(tokens) - request.prompt_len != request.stop.max_tokens:
        row = Row(request, tokens, computed, len(tokens), blocks, sample=True)
        (token,) = device.run(StepPlan((row,), len(tokens) - computed)).sampled
        computed = len(tokens)
        assert token is not None
        tokens.append(token)
    return tokens[request.prompt_len :]


@asynccontextmanager
async def routed(**node: Any) -> AsyncIterator[tuple[Node, Router]]:
    async with Node("d", **node) as worker, Router(worker) as router:
        yield worker, router


def owned(run: wire.Run, position: int | None = None) -> wire.Hello.Owned:
    """Name a run in a hello; ``position`` is that of the first token that the router lacks."""
    next = [] if position is None else [wire.ResumePosition(output=0, position=position)]
    return wire.Hello.Owned(run=run, resume=next)
