"""The giving end: serves ``KvSource`` over an engine.

Open ──> export ──> kv_run, kv_run ... (as blocks fill) ──> parked ──> seal ──> Release ──> freed
            │            acks renew the lease                             │
            └── the sequence ended first: closed                          └── lease over: freed
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from engine.engine import Engine
from engine.errors import EngineError, TransferRejected
from engine.loop import EngineLoop
from engine.output import StepOutput
from engine.transfer import Export
from engine.transfer import Seal as EngineSeal
from handoff.beats import beating
from handoff.errors import HandoffFailed
from handoff.packing import FilledBlock, Shape, pack
from handoff.tickets import Lease, TicketOffice
from protos import worker_pb2 as wire

LEASE_MS = 10_000
"""How long a ticket, or a fetch whose runs nobody acknowledges, keeps its blocks."""

Outgoing = asyncio.Queue[wire.FetchResponse | None]


@dataclass(slots=True)
class _Giving:
    """A sequence that has a ticket: what the engine told of it, how much of it went out, and whom to wake."""

    prompt_tokens: int
    parked: bool = False
    ended: bool = False
    sent: int = 0  # messages
    acknowledged: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def has_ended(self) -> bool:
        """Whether the sequence ended by itself, was cancelled, or lost its lease: it may at any await."""
        return self.ended


class Giver:
    """All caches that this worker gives away. Lives on the event loop that hears the engine."""

    def __init__(self, loop: EngineLoop, shape: Shape, beat: Callable[[], wire.Beat], lease_ms: int = LEASE_MS) -> None:
        self.office = TicketOffice(lease_ms, self._expire)
        self.expired = 0
        self._loop = loop
        self._shape = shape
        self._beat = beat
        self._giving: dict[str, _Giving] = {}

    def issue(self, ticket: wire.Ticket, sequence: str, prompt_tokens: int) -> wire.Ticket:
        """A ticket for the cache of a sequence that the engine was given with ``park_after``."""
        self._giving[sequence] = _Giving(prompt_tokens)
        return self.office.issue(ticket, sequence)

    def on_step(self, output: StepOutput) -> None:
        """Hear the engine: wake the fetches of sequences that filled a block, parked or ended."""
        for filled in output.filled:
            self._wake(filled.id)
        for name in output.parked:
            self._wake(name, parked=True)
        for ended in output.ended:
            self._wake(ended.id, ended=True)

    def _wake(self, name: str, *, parked: bool = False, ended: bool = False) -> None:
        giving = self._giving.get(name)
        if giving is not None:
            giving.parked |= parked
            giving.ended |= ended
            giving.changed.set()

    async def fetch(self, requests: AsyncIterable[wire.FetchRequest]) -> AsyncGenerator[wire.FetchResponse, None]:
        """One fetch, as ``KvSource.Fetch`` describes it. A refusal is told as ``closed``."""
        incoming = aiter(requests)
        try:
            opened = await self._opening(incoming)
            lease = self.office.open(opened)
        except HandoffFailed as refused:
            yield wire.FetchResponse(closed=wire.Closed(failure=refused.message()))
            return
        outgoing: Outgoing = asyncio.Queue(maxsize=4)
        async with AsyncExitStack() as stack:
            beats = beating(lambda: outgoing.put(wire.FetchResponse(beat=self._beat())))
            for job in (self._give(lease, opened.have, outgoing), self._hear(lease, incoming), beats):
                stack.push_async_callback(_stop, asyncio.create_task(job))
            while (message := await outgoing.get()) is not None:
                yield message

    async def release(self, request: wire.ReleaseRequest) -> None:
        """The taker is done, with the cache or without it: free what the ticket held. May be repeated."""
        lease = self.office.close(request.ticket)
        if lease is not None:
            self._free(lease)

    async def _opening(self, incoming: AsyncIterator[wire.FetchRequest]) -> wire.Open:
        try:
            async with asyncio.timeout(self.office.lease_ms / 1000):
                first = await anext(incoming)
        except (StopAsyncIteration, TimeoutError):
            raise HandoffFailed(wire.CAUSE_PEER_LOST, "the fetch was not opened") from None
        if first.WhichOneof("message") != "open":
            raise HandoffFailed(wire.CAUSE_INVALID, "a fetch begins with open")
        return first.open

    async def _give(self, lease: Lease, have: int, outgoing: Outgoing) -> None:
        """Send what is filled, wait for more, seal at the end; None says that nothing follows."""
        try:
            last = await self._account(lease, have, outgoing)
        except EngineError as error:
            failure = HandoffFailed(wire.CAUSE_RECLAIMED, str(error)).message()
            last = wire.FetchResponse(closed=wire.Closed(failure=failure))
        await outgoing.put(last)
        await outgoing.put(None)

    async def _account(self, lease: Lease, have: int, outgoing: Outgoing) -> wire.FetchResponse:
        """All runs of a sequence; its last word, which is still to be sent. Raises EngineError."""
        giving, name = self._giving[lease.sequence], lease.sequence
        if giving.has_ended():
            return wire.FetchResponse(closed=wire.Closed())
        export = await self._loop.call(
            lambda engine: engine.export(name, have), undo=lambda engine, _: engine.release(name)
        )
        sent = 0
        while not giving.parked:
            giving.changed.clear()
            sent = await self._send(lease, export, sent, outgoing)
            await giving.changed.wait()
            if giving.has_ended():
                return wire.FetchResponse(closed=wire.Closed())
        seal = await self._loop.call(lambda engine: engine.seal(name))
        await self._send(lease, export, sent, outgoing)
        return wire.FetchResponse(seal=_seal(seal, giving.prompt_tokens))

    async def _send(self, lease: Lease, export: Export, sent: int, outgoing: Outgoing) -> int:
        """Send the blocks from the ``sent``-th run on; returns how many have gone out. Raises TransferRejected."""
        while sent < len(export.runs):
            some = export.runs[sent : sent + self._shape.blocks_per_message]
            blocks = [FilledBlock(run.index, export.read(run.index), run.sum) for run in some]
            # Nothing is awaited between this look and the copies: a lease that ended is never read.
            if self._giving.get(lease.sequence) is None:
                raise TransferRejected(f"{lease.sequence}: the lease is over")
            messages = list(pack(lease.ticket.run, self._shape, blocks))
            for message in messages:
                self._giving[lease.sequence].sent += 1
                await outgoing.put(message)
            sent += len(some)
        return sent

    async def _hear(self, lease: Lease, incoming: AsyncIterator[wire.FetchRequest]) -> None:
        """Acknowledged runs renew the lease; so does a beat while the taker has all that there is so far."""
        giving = self._giving[lease.sequence]
        async for message in incoming:
            if message.HasField("ack"):
                giving.acknowledged = message.ack.kv_runs
            if message.HasField("ack") or giving.acknowledged >= giving.sent:
                self.office.renew(lease.ticket.id)

    def _expire(self, lease: Lease) -> None:
        """Nobody renewed it: stop its fetch, then free."""
        self.expired += 1
        self._free(lease)

    def _free(self, lease: Lease) -> None:
        """Give everything back that the ticket held. The fetch is told first, and copies no more."""
        self._wake(lease.sequence, ended=True)
        self._giving.pop(lease.sequence, None)

        def give_back(engine: Engine) -> None:
            engine.release(lease.sequence)
            engine.cancel(lease.sequence)

        self._loop.post(give_back)


async def _stop(task: asyncio.Task[None]) -> None:
    """Cancel a task and see it end."""
    task.cancel()
    await asyncio.wait([task])


def _seal(seal: EngineSeal, prompt_tokens: int) -> wire.Seal:
    output = wire.Seal.Output(output=0, tokens=struct.pack(f"<{len(seal.output)}I", *seal.output))
    return wire.Seal(computed=seal.computed, prompt_tokens=prompt_tokens, outputs=[output], sum=seal.sum)
