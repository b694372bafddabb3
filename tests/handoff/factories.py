from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Callable
from contextlib import aclosing
from dataclasses import replace

from decant.engine.engine import Engine
from decant.engine.fake import FakeDevice
from decant.engine.kv_layout import FULL, Window
from decant.engine.loop import EngineLoop
from decant.engine.output import SequenceFinished, StepOutput, Token
from decant.engine.plan import StepPlan
from decant.engine.request import Request, SamplingParams, StopParams
from decant.engine.scheduler import Limits
from decant.engine.transfer import IncomingSequence
from decant.handoff.codec import Received, decode
from decant.handoff.leases import Lease
from decant.handoff.packing import MESSAGE_BYTES, TransferLayout, checksum
from decant.handoff.receiver import KvReceiver, ReceiverTiming
from decant.handoff.sender import KvSender, SenderTiming
from decant.protos import worker_pb2 as wire
from decant.runtime.protocol import PROTOCOL

BLOCK = 4
LAYOUT_HASH = 0x1234


Cost = Callable[[StepPlan], float] | None


class Worker:
    """Engine, KV sender and KV receiver of a worker, without a server; ``tokens`` is the output by sequence."""

    def __init__(
        self,
        name: str,
        *,
        blocks: int = 64,
        budget: int = 8,
        lease_ms: int = 10_000,
        cost: Cost = None,
        timing: SenderTiming | None = None,
        receiver_timing: ReceiverTiming | None = None,
        message_bytes: int = MESSAGE_BYTES,
        windows: tuple[Window, ...] = (FULL,),
    ) -> None:
        device = FakeDevice(num_blocks=blocks, block_size=BLOCK, vocab_size=64, cost=cost)
        device.windows = windows
        self.engine = Engine(
            device,
            Limits(token_budget=budget, max_running=8, context_length=blocks * BLOCK // len(windows)),
            checksum=checksum,
        )
        self.peer = wire.Peer(id=name, incarnation=1, protocol=PROTOCOL)
        self.transfer_layout = TransferLayout(BLOCK, self.engine.device.block_bytes, LAYOUT_HASH, message_bytes)
        self.ended_leases: list[Lease] = []
        self.loop = EngineLoop(self.engine, self._on_step)
        self.sender = KvSender(
            self.loop,
            self.transfer_layout,
            wire.Heartbeat,
            lease_ms,
            timing=timing,
        )
        self.sender.leases.ends.subscribe(self.ended_leases.append)
        self.receiver = KvReceiver(self.loop, self.transfer_layout, self.peer, wire.Heartbeat, receiver_timing)
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, asyncio.Event] = {}

    @property
    def num_expired(self) -> int:
        failures = [lease.failure for lease in self.ended_leases if lease.failure is not None]
        return sum(failure.cause == wire.CAUSE_LEASE_EXPIRED for failure in failures)

    def _on_step(self, output: StepOutput) -> None:
        self.sender.on_step(output)
        for token in output.tokens:
            self._record(token)
        for ended in output.ended:
            self._record(ended)

    def _record(self, event: Token | SequenceFinished) -> None:
        if isinstance(event, Token):
            self.tokens.setdefault(event.id, []).append(event.token)
        else:
            self.ended.setdefault(event.id, asyncio.Event()).set()

    async def __aenter__(self) -> Worker:
        self.loop.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.receiver.close()
        await self.loop.stop()
        self.engine.check_integrity()

    async def finished(self, id: str) -> list[int]:
        await asyncio.wait_for(self.ended.setdefault(id, asyncio.Event()).wait(), 20)
        return self.tokens.get(id, [])

    async def offer(self, request: Request) -> wire.Ticket:
        """Start a prompt as a prefill worker does; return a ticket for its cache."""
        run = wire.Run(request=request.id, epoch=1, attempt=1)
        ticket = wire.Ticket(
            run=run, sender=self.peer, layout_hash=LAYOUT_HASH, salt=request.salt, tokens=len(request.token_ids)
        )
        issued = self.sender.issue(ticket, [request.id], request.prompt_len)
        await self.loop.call(lambda engine: engine.add(replace(request, park_after=1)))
        return issued

    async def reserve(self, request: Request) -> IncomingSequence:
        return await self.loop.call(
            lambda engine: engine.transfers.reserve(request), undo=lambda _, arrival: arrival.abort()
        )

    async def num_held_blocks(self) -> int:
        return (await self.loop.call(lambda engine: engine.load())).held_blocks

    async def emptied(self) -> None:
        for _ in range(200):
            if not await self.num_held_blocks():
                return
            await asyncio.sleep(0.1)
        raise AssertionError(f"{await self.num_held_blocks()} blocks are held: {self.engine.pool.held_by()}")


def ask(id: str = "r", length: int = 30, wanted: int = 10, seed: int = 0) -> Request:
    return Request(
        id,
        tuple((7 * position + seed) % 64 for position in range(length)),
        sampling=SamplingParams(temperature=0.8, seed=seed),
        stop=StopParams(max_tokens=wanted),
        salt=b"tenant",
    )


Tamper = Callable[[wire.FetchResponse], list[wire.FetchResponse]]
"""Replaces a message by none, itself, another or several."""


class Wire:
    """A sender in one process; its messages are serialized and may be tampered with."""

    def __init__(self, sender: KvSender, tamper: Tamper = lambda message: [message]) -> None:
        self._sender = sender
        self._tamper = tamper
        self.released: list[wire.ReleaseRequest] = []

    async def fetch(self, requests: AsyncIterable[wire.FetchRequest]) -> AsyncGenerator[Received, None]:
        async with aclosing(self._sender.fetch(requests)) as messages:
            async for message in messages:
                for response in self._tamper(wire.FetchResponse.FromString(message)):
                    yield decode(response.SerializeToString())

    def record_corruption(self, detail: str) -> None: ...

    async def release(self, request: wire.ReleaseRequest, seconds: float) -> None:
        self.released.append(request)
        await self._sender.release(request)


async def run_alone(request: Request, windows: tuple[Window, ...] = (FULL,)) -> list[int]:
    async with Worker("alone", blocks=64 * len(windows), windows=windows) as worker:
        await worker.loop.call(lambda engine: engine.add(request))
        return await worker.finished(request.id)
