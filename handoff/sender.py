"""The sender of a handoff: serves ``KvSource`` over an engine.

Open ──> export ──> kv_chunk, kv_chunk ... (as blocks fill) ──> parked ──> commit ──> Release ──> freed
            │            acks and heartbeats renew the lease                │
            └── the sequence ended first: closed                            └── lease expired: freed

A prefill sequence parks after its first token. A live sequence decodes until only its last, partial block is unsent,
then parks; if its fetch or lease ends without a commit, it continues here.

A fetch that breaks before the commit ends its ticket at once; after the commit, the receiver may own the sequence.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from functools import partial

from decant.engine.errors import EngineError
from decant.engine.transfer import ExportedBlock, KvExport
from decant.engine.transfer import TransferCommit as EngineCommit
from decant.handoff.codec import encode
from decant.handoff.engine_protocol import EngineThread, StepEvents, TransferEngine
from decant.handoff.errors import HandoffFailed
from decant.handoff.heartbeat import with_heartbeat_timeout
from decant.handoff.leases import COMMITTED_SECONDS, LEASE_MS, Lease, LeaseTable
from decant.handoff.packing import FilledBlock, LocatedBlock, TransferLayout, pack
from decant.protos import worker_pb2 as wire
from decant.runtime import packed
from decant.runtime.connections.heartbeat import HEARTBEAT_SECONDS, SILENT_SECONDS
from decant.runtime.connections.peer import UnknownMessages
from decant.runtime.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class SenderTiming:
    heartbeat_s: float = HEARTBEAT_SECONDS
    silent_s: float = SILENT_SECONDS
    committed_s: float = COMMITTED_SECONDS


@dataclass(slots=True)
class _SendState:
    prompt_tokens: int
    logprobs: Callable[[], Iterable[wire.TokenLogprobs]]
    is_live: bool = False
    has_ended: bool = False  # the sequence finished, or its ticket ended
    export: KvExport | None = None  # set while its blocks may be read
    sent_blocks: int = 0
    sent_messages: int = 0
    acknowledged: int = 0
    reads_memory: bool = False  # the receiver reads the blocks' memory
    final_message: bytes | None = None  # ends the fetch
    error: InvalidArgument | None = None  # ends the fetch: a malformed message of the receiver
    settled: asyncio.Event = field(default_factory=asyncio.Event)  # parked or ended
    changed: asyncio.Event = field(default_factory=asyncio.Event)  # something to send
    progressed: asyncio.Event = field(
        default_factory=asyncio.Event
    )  # of a live sequence: a step ended, or blocks were sent


class KvSender:
    """Sender of handoffs, for the event loop only."""

    def __init__(
        self,
        loop: EngineThread,
        layout: TransferLayout,
        heartbeat: Callable[[], wire.Heartbeat],
        lease_ms: int = LEASE_MS,
        *,
        on_lease_end: Callable[[Lease], None] = lambda _: None,
        timing: SenderTiming | None = None,
    ) -> None:
        self._timing = timing or SenderTiming()
        self.leases = LeaseTable(lease_ms, self._free, on_lease_end, self._timing.committed_s)
        self._loop = loop
        self._layout = layout
        self._heartbeat = heartbeat
        self.memory: wire.BlockMemory | None = None
        """Where receivers can read the engine's blocks, if they can."""
        self._states: dict[str, _SendState] = {}

    def issue(
        self,
        ticket: wire.Ticket,
        sequence: str,
        prompt_tokens: int,
        logprobs: Callable[[], Iterable[wire.TokenLogprobs]] = tuple,
        *,
        is_live: bool = False,
        is_parked: bool = False,
    ) -> wire.Ticket:
        """Issue a ticket for a sequence; ``logprobs`` is called at the commit.

        ``is_live``: the sequence has no ``park_after``. ``is_parked``: the step that parked it is over.
        """
        state = self._states[sequence] = _SendState(prompt_tokens, logprobs, is_live)
        if is_parked:
            state.settled.set()
        return self.leases.issue(ticket, sequence)

    def on_step(self, output: StepEvents) -> None:
        for filled in output.filled:
            self._wake(filled.id)
        for name in output.parked:
            self._wake(name, parked=True)
        for ended in output.ended:
            self._wake(ended.id, ended=True)
        for state in self._states.values():
            if state.is_live:
                state.progressed.set()

    def _wake(self, name: str, *, parked: bool = False, ended: bool = False) -> None:
        state = self._states.get(name)
        if state is not None:
            state.has_ended |= ended
            state.changed.set()
            if parked or ended:
                state.settled.set()
                state.progressed.set()

    async def fetch(self, requests: AsyncIterable[wire.FetchRequest]) -> AsyncGenerator[bytes, None]:
        incoming = aiter(requests)
        try:
            opened = await self._receive_open(incoming)
            lease = self.leases.open(opened)
        except HandoffFailed as refused:
            yield _closed_message(refused.message())
            return
        state = self._states[lease.sequence]
        state.reads_memory = opened.reads_memory and self.memory is not None
        async with AsyncExitStack() as stack:
            stack.callback(self._end_uncommitted, lease, state)
            for job in (
                self._drive_engine(lease, state, opened.cached_blocks),
                self._receive_acks(lease, state, incoming),
            ):
                stack.push_async_callback(_stop, asyncio.create_task(job))
            messages = await stack.enter_async_context(aclosing(self._messages(lease, state)))
            async for message in messages:
                yield message

    def _end_uncommitted(self, lease: Lease, state: _SendState, detail: str = "the fetch broke") -> None:
        if lease.is_committed:
            return
        failure = _reclaimed_failure("the fetch was closed here")
        if state.final_message is None or state.export is not None:  # neither refused nor ended here
            failure = wire.Failure(cause=wire.CAUSE_PEER_LOST, detail=detail, peer=lease.receiver)
        self.reclaim(lease.ticket.id, failure)

    def reclaim(self, ticket: bytes, failure: wire.Failure) -> None:
        """End a ticket and free its blocks; an open fetch gets ``failure``. Ignores a ticket that has ended."""
        lease = self.leases.close(ticket, failure)
        if lease is not None:
            self._free(lease)

    async def release(self, request: wire.ReleaseRequest) -> None:
        lease = self.leases.find(request.ticket)
        if lease is not None:
            lease.is_owned = request.outcome == wire.ReleaseRequest.OUTCOME_OWNED
        lease = self.leases.close(request.ticket)
        if lease is not None:
            self._free(lease)

    async def _receive_open(self, incoming: AsyncIterator[wire.FetchRequest]) -> wire.Open:
        try:
            async with asyncio.timeout(self.leases.lease_ms / 1000):
                first = await anext(incoming)
        except (StopAsyncIteration, TimeoutError):
            raise HandoffFailed(wire.CAUSE_PEER_LOST, "the fetch was not opened") from None
        if first.WhichOneof("message") != "open":
            raise HandoffFailed(wire.CAUSE_INVALID, "a fetch begins with open")
        return first.open

    async def _drive_engine(self, lease: Lease, state: _SendState, cached_blocks: int) -> None:
        try:
            state.final_message = await self._final_message(lease, state, cached_blocks)
        except EngineError as error:
            has_finished = state.has_ended and self._is_current(lease, state)  # it finished before the command ran
            state.export = None
            state.final_message = _closed_message(None if has_finished else _reclaimed_failure(str(error)))
        state.changed.set()

    async def _final_message(self, lease: Lease, state: _SendState, cached_blocks: int) -> bytes:
        name = lease.sequence
        if not state.has_ended:
            state.export = await self._loop.call(
                lambda engine: engine.transfers.export(name, cached_blocks),
                undo=lambda engine, _: engine.transfers.release(name),
            )
            state.changed.set()
            if state.is_live and (commit := await self._commit_live(name, state)) is not None:
                return _commit_message(commit, state)
            await state.settled.wait()
        if state.has_ended:
            state.export = None
            return _closed_message(None)
        return _commit_message(await self._loop.call(lambda engine: engine.transfers.finalize(name)), state)

    async def _commit_live(self, name: str, state: _SendState) -> EngineCommit | None:
        while not state.has_ended:
            state.progressed.clear()
            sent = state.sent_blocks
            if state.export is not None and sent >= len(state.export.blocks):
                commit = await self._loop.call(partial(_finalize_running, id=name, sent=sent))
                if commit is not None:
                    return commit
            await state.progressed.wait()
        return None

    async def _messages(self, lease: Lease, state: _SendState) -> AsyncGenerator[bytes, None]:
        clock = asyncio.get_running_loop().time
        sent_at = clock()
        if state.reads_memory:
            yield encode(wire.FetchResponse(memory=self.memory))
        while state.error is None:
            state.changed.clear()
            for message in self._block_messages(lease, state):
                yield message
                sent_at = clock()
            if not self._is_current(lease, state):
                yield _closed_message(lease.failure or _reclaimed_failure("the ticket has ended"))
                return
            if state.final_message is not None and not (
                state.reads_memory and state.acknowledged < state.sent_messages
            ):
                if state.export is not None:
                    self.leases.commit(lease)
                yield state.final_message
                return
            try:
                async with asyncio.timeout_at(sent_at + self._timing.heartbeat_s):
                    await state.changed.wait()
            except TimeoutError:
                yield encode(wire.FetchResponse(heartbeat=self._heartbeat()))
                sent_at = clock()
        raise state.error

    def _block_messages(self, lease: Lease, state: _SendState) -> Iterator[bytes]:
        while (export := state.export) and state.sent_blocks < len(export.blocks):
            batch = _consecutive(export.blocks[state.sent_blocks : state.sent_blocks + self._layout.blocks_per_message])
            blocks = [
                LocatedBlock(block.address, export.locate(block.address), block.checksum)
                if state.reads_memory
                else FilledBlock(block.address, export.read(block.address), block.checksum)
                for block in batch
            ]
            for message in pack(lease.ticket.run, self._layout, blocks):
                state.sent_messages += 1
                yield message
                if state.export is not export:
                    return
            state.sent_blocks += len(batch)
            state.progressed.set()

    def _is_current(self, lease: Lease, state: _SendState) -> bool:
        return self._states.get(lease.sequence) is state

    async def _receive_acks(self, lease: Lease, state: _SendState, incoming: AsyncIterator[wire.FetchRequest]) -> None:
        unknown = UnknownMessages(lease.receiver.id if lease.receiver else "")
        try:
            async for message in with_heartbeat_timeout(incoming, "the receiver", self._timing.silent_s):
                match message.WhichOneof("message"):
                    case "ack":
                        state.acknowledged = message.ack.kv_chunks
                        state.changed.set()
                        self.leases.renew(lease.ticket.id)
                    case "heartbeat" if state.acknowledged >= state.sent_messages:
                        self.leases.renew(lease.ticket.id)
                    case None:
                        unknown.ignore()
        except HandoffFailed as silent:
            self._end_uncommitted(lease, state, silent.detail)
        except InvalidArgument as error:
            state.error = error
            state.changed.set()

    def _free(self, lease: Lease) -> None:
        """Wake the fetch, which then reads no more blocks, before the engine frees them."""
        self._wake(lease.sequence, ended=True)
        state = self._states.pop(lease.sequence, None)
        if state is not None:
            state.export = None

        def free(engine: TransferEngine) -> None:
            engine.transfers.release(lease.sequence)
            engine.cancel(lease.sequence)

        resumes = state is not None and state.is_live and not lease.is_committed
        self._loop.post((lambda engine: engine.transfers.withdraw(lease.sequence)) if resumes else free)


def _finalize_running(engine: TransferEngine, id: str, sent: int) -> EngineCommit | None:
    return engine.transfers.finalize_running(id, sent)


def _consecutive(blocks: list[ExportedBlock]) -> list[ExportedBlock]:
    group, index = blocks[0].address
    return [block for at, block in enumerate(blocks) if block.address == (group, index + at)]


async def _stop(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


def _closed_message(failure: wire.Failure | None) -> bytes:
    return encode(wire.FetchResponse(closed=wire.ExportClosed(failure=failure)))


def _reclaimed_failure(detail: str) -> wire.Failure:
    return wire.Failure(cause=wire.CAUSE_RECLAIMED, detail=detail)


def _commit_message(commit: EngineCommit, state: _SendState) -> bytes:
    output = wire.TransferCommit.Output(output=0, tokens=packed.pack(commit.output))
    output.logprobs.extend(state.logprobs())
    message = wire.TransferCommit(
        computed=commit.computed, prompt_tokens=state.prompt_tokens, outputs=[output], checksum=commit.checksum
    )
    return encode(wire.FetchResponse(commit=message))
