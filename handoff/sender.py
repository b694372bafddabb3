"""The giving end: serves ``KvSource`` over an engine.

Open ──> export ──> kv_chunk, kv_chunk ... (as blocks fill) ──> parked ──> seal ──> Release ──> freed
            │            acks renew the lease                             │
            └── the sequence ended first: closed                          └── lease over: freed

A prompt that is read for another parks after its first token. A live sequence is written on here meanwhile, and parks
at the first step at which no more than its last, unfilled block is left to be sent. When its fetch or its lease ends
without a seal, it goes on here as if nothing had been asked.

A ticket opens once, so a fetch that breaks before its seal ends the ticket at once: the connection was closed, or the
receiver was silent. After the seal the receiver may own the sequence; then Release or the lease ends the ticket.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from functools import partial

from decant.engine.errors import EngineError
from decant.engine.transfer import KvExport
from decant.engine.transfer import TransferCommit as EngineSeal
from decant.handoff.codec import encode
from decant.handoff.engine_protocol import EngineThread, StepEvents, TransferEngine
from decant.handoff.errors import HandoffFailed
from decant.handoff.heartbeat import heard
from decant.handoff.leases import Lease, LeaseTable
from decant.handoff.packing import FilledBlock, TransferLayout, pack
from decant.protos import worker_pb2 as wire
from decant.runtime import packed
from decant.runtime.errors import InvalidArgument
from decant.runtime.heartbeat import HEARTBEAT_SECONDS, SILENT_SECONDS
from decant.runtime.peer import UnknownMessages

LEASE_MS = 10_000
"""How long a ticket, or a fetch whose runs nobody acknowledges, keeps its blocks."""


@dataclass(slots=True)
class _SendState:
    """A sequence that has a ticket: what the engine told of it, how far its fetch has come, and whom to wake."""

    prompt_tokens: int
    logprobs: Callable[[], Iterable[wire.TokenLogprobs]]
    is_live: bool = False
    parked: bool = False
    ended: bool = False  # by itself or cancelled, or its ticket is over
    export: KvExport | None = None  # what may be sent: nothing of it is read once it is taken away
    blocks: int = 0  # sent
    messages: int = 0  # sent
    acknowledged: int = 0
    last: bytes | None = None  # the fetch ends with it
    error: InvalidArgument | None = None  # the fetch ends with it: its receiver sent what can't be read
    settled: asyncio.Event = field(default_factory=asyncio.Event)  # parked or ended
    changed: asyncio.Event = field(default_factory=asyncio.Event)  # there is something to say
    moved: asyncio.Event = field(default_factory=asyncio.Event)  # of a live one: it wrote, or some of it was sent


class KvSender:
    """All caches that this worker gives away. Lives on the event loop that hears the engine."""

    def __init__(
        self, loop: EngineThread, shape: TransferLayout, beat: Callable[[], wire.Heartbeat], lease_ms: int = LEASE_MS
    ) -> None:
        self.office = LeaseTable(lease_ms, self._expire)
        self.expired = 0
        self._loop = loop
        self._shape = shape
        self._beat = beat
        self._giving: dict[str, _SendState] = {}

    def issue(
        self,
        ticket: wire.Ticket,
        sequence: str,
        prompt_tokens: int,
        logprobs: Callable[[], Iterable[wire.TokenLogprobs]] = tuple,
        *,
        is_live: bool = False,
    ) -> wire.Ticket:
        """A ticket for the cache of a sequence: one that the engine was given with ``park_after``, or (``is_live``) any
        other that it has. ``logprobs`` are asked for at the seal, of the output tokens that it speaks of.
        """
        self._giving[sequence] = _SendState(prompt_tokens, logprobs, is_live)
        return self.office.issue(ticket, sequence)

    def on_step(self, output: StepEvents) -> None:
        """Hear the engine: wake the fetches of sequences that filled a block, parked or ended."""
        for filled in output.filled:
            self._wake(filled.id)
        for name in output.parked:
            self._wake(name, parked=True)
        for ended in output.ended:
            self._wake(ended.id, ended=True)
        for giving in self._giving.values():
            if giving.is_live:
                giving.moved.set()

    def _wake(self, name: str, *, parked: bool = False, ended: bool = False) -> None:
        giving = self._giving.get(name)
        if giving is not None:
            giving.parked |= parked
            giving.ended |= ended
            giving.changed.set()
            if parked or ended:
                giving.settled.set()
                giving.moved.set()

    async def fetch(self, requests: AsyncIterable[wire.FetchRequest]) -> AsyncGenerator[bytes, None]:
        """One fetch, as ``KvSource.Fetch`` describes it, in encoded responses. A refusal is told as ``closed``."""
        incoming = aiter(requests)
        try:
            opened = await self._opening(incoming)
            lease = self.office.open(opened)
        except HandoffFailed as refused:
            yield _closed(refused.message())
            return
        giving = self._giving[lease.sequence]
        async with AsyncExitStack() as stack:
            stack.callback(self._end_unsealed, lease, giving)
            for job in (self._lead(lease, giving, opened.cached_blocks), self._hear(lease, giving, incoming)):
                stack.push_async_callback(_stop, asyncio.create_task(job))
            messages = await stack.enter_async_context(aclosing(self._say(lease, giving)))
            async for message in messages:
                yield message

    def _end_unsealed(self, lease: Lease, giving: _SendState, detail: str = "the fetch broke") -> None:
        """End the ticket of a fetch that has ended, unless its seal was sent."""
        if lease.sealed:
            return
        failure = _reclaimed("the fetch was closed here")
        if giving.last is None:
            failure = wire.Failure(cause=wire.CAUSE_PEER_LOST, detail=detail, peer=lease.receiver)
        self.reclaim(lease.ticket.id, failure)

    def reclaim(self, ticket: bytes, failure: wire.Failure) -> None:
        """Take back what a ticket holds; an open fetch is told why. Nothing happens where the ticket has ended."""
        lease = self.office.close(ticket, failure)
        if lease is not None:
            self._free(lease)

    async def release(self, request: wire.ReleaseRequest) -> None:
        """The taker is done, with the cache or without it: free what the ticket held. May be repeated."""
        found = self.office.find(request.ticket)
        if found is not None:
            found.owned = request.outcome == wire.ReleaseRequest.OUTCOME_OWNED
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

    async def _lead(self, lease: Lease, giving: _SendState, have: int) -> None:
        """Take the engine through a handoff; what is to be said of it is left in ``giving``."""
        try:
            giving.last = await self._last_word(lease, giving, have)
        except EngineError as error:
            over = giving.ended and self._holds(lease, giving)  # it ended while the engine was asked
            giving.export, giving.last = None, _closed(None if over else _reclaimed(str(error)))
        giving.changed.set()

    async def _last_word(self, lease: Lease, giving: _SendState, have: int) -> bytes:
        """Open the export, and close it when the sequence is parked or has ended. Raises EngineError."""
        name = lease.sequence
        if not giving.ended:
            giving.export = await self._loop.call(
                lambda engine: engine.transfers.export(name, have),
                undo=lambda engine, _: engine.transfers.release(name),
            )
            giving.changed.set()
            if giving.is_live and (seal := await self._seal_live(name, giving)) is not None:
                return _sealed(seal, giving)
            await giving.settled.wait()
        if giving.ended:
            giving.export = None
            return _closed(None)
        return _sealed(await self._loop.call(lambda engine: engine.transfers.finalize(name)), giving)

    async def _seal_live(self, name: str, giving: _SendState) -> EngineSeal | None:
        """The seal of a live sequence, parked at the first step that allows it; None: it ended. Raises EngineError."""
        while not giving.ended:
            giving.moved.clear()
            sent = giving.blocks
            if giving.export is not None and sent >= len(giving.export.runs):
                seal = await self._loop.call(partial(_finalize_running, id=name, sent=sent))
                if seal is not None:
                    return seal
            await giving.moved.wait()
        return None

    async def _say(self, lease: Lease, giving: _SendState) -> AsyncGenerator[bytes, None]:
        """Runs as blocks fill, beats in between, and the last word."""
        clock = asyncio.get_running_loop().time
        said = clock()
        while giving.error is None:
            giving.changed.clear()
            for message in self._filled(lease, giving):
                yield message
                said = clock()
            if not self._holds(lease, giving):
                yield _closed(lease.failure or _reclaimed("the ticket is over"))
                return
            if giving.last is not None:
                if giving.export is not None:
                    self.office.seal(lease)
                yield giving.last
                return
            try:
                async with asyncio.timeout_at(said + HEARTBEAT_SECONDS):
                    await giving.changed.wait()
            except TimeoutError:
                yield encode(wire.FetchResponse(heartbeat=self._beat()))
                said = clock()
        raise giving.error

    def _filled(self, lease: Lease, giving: _SendState) -> Iterator[bytes]:
        """Messages of the blocks that filled since the last; each is copied when it is asked for."""
        while (export := giving.export) and giving.blocks < len(export.runs):
            some = export.runs[giving.blocks : giving.blocks + self._shape.blocks_per_message]
            blocks = [FilledBlock(run.index, export.read(run.index), run.checksum) for run in some]
            for message in pack(lease.ticket.run, self._shape, blocks):
                giving.messages += 1
                yield message
                if giving.export is not export:
                    return
            giving.blocks += len(some)
            giving.moved.set()

    def _holds(self, lease: Lease, giving: _SendState) -> bool:
        """Whether the ticket is still what keeps the blocks."""
        return self._giving.get(lease.sequence) is giving

    async def _hear(self, lease: Lease, giving: _SendState, incoming: AsyncIterator[wire.FetchRequest]) -> None:
        """Renew the lease by acknowledged runs, and by a heartbeat while the receiver has all that there is so far."""
        unknown = UnknownMessages(lease.receiver.id if lease.receiver else "")
        try:
            async for message in heard(incoming, "the receiver", SILENT_SECONDS):
                match message.WhichOneof("message"):
                    case "ack":
                        giving.acknowledged = message.ack.kv_chunks
                        self.office.renew(lease.ticket.id)
                    case "heartbeat" if giving.acknowledged >= giving.messages:
                        self.office.renew(lease.ticket.id)
                    case None:
                        unknown.ignore()
        except HandoffFailed as silent:
            self._end_unsealed(lease, giving, silent.detail)
        except InvalidArgument as error:
            giving.error = error
            giving.changed.set()

    def _expire(self, lease: Lease) -> None:
        """Nobody renewed it: stop its fetch, then free."""
        self.expired += 1
        self._free(lease)

    def _free(self, lease: Lease) -> None:
        """Give everything back that the ticket held. The fetch is told first, and copies no more."""
        self._wake(lease.sequence, ended=True)
        giving = self._giving.pop(lease.sequence, None)
        if giving is not None:
            giving.export = None

        def give_back(engine: TransferEngine) -> None:
            engine.transfers.release(lease.sequence)
            engine.cancel(lease.sequence)

        goes_on = giving is not None and giving.is_live and not lease.sealed
        self._loop.post((lambda engine: engine.transfers.withdraw(lease.sequence)) if goes_on else give_back)


def _finalize_running(engine: TransferEngine, id: str, sent: int) -> EngineSeal | None:
    return engine.transfers.finalize_running(id, sent)


async def _stop(task: asyncio.Task[None]) -> None:
    """Cancel a task and see it end."""
    task.cancel()
    await asyncio.wait([task])


def _closed(failure: wire.Failure | None) -> bytes:
    """The last word of a fetch that has no seal; without a failure, because nothing is left to give."""
    return encode(wire.FetchResponse(closed=wire.ExportClosed(failure=failure)))


def _reclaimed(detail: str) -> wire.Failure:
    return wire.Failure(cause=wire.CAUSE_RECLAIMED, detail=detail)


def _sealed(seal: EngineSeal, giving: _SendState) -> bytes:
    """The last word of a fetch that is complete."""
    output = wire.TransferCommit.Output(output=0, tokens=packed.pack(seal.output))
    output.logprobs.extend(giving.logprobs())
    message = wire.TransferCommit(
        computed=seal.computed, prompt_tokens=giving.prompt_tokens, outputs=[output], checksum=seal.checksum
    )
    return encode(wire.FetchResponse(commit=message))
