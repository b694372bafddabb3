"""The sender of a handoff: serves ``KvSource`` over an engine.

Open ──> export ──> kv_chunk, kv_chunk ... (as blocks fill) ──> parked ──> commit ──> Release ──> freed
            │            acks and heartbeats renew the lease                │
            └── the sequence ended first: closed                            └── lease expired: freed

A coroutine, `KvSender._messages`, sends a cache from its first block to its commit. Steps and acks record facts and
wake it; the end of the ticket interrupts it where it waits.

A prefill sequence parks after its first token. A live sequence decodes until only its last, partial block is unsent,
then parks; if its fetch or lease ends without a commit, it continues here.

A fetch that breaks before the commit ends its ticket at once; after the commit, the receiver may own the sequence.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

from decant.engine.errors import EngineError
from decant.engine.request import FinishReason
from decant.engine.transfer import TransferCommit as EngineCommit
from decant.handoff.codec import encode
from decant.handoff.engine_protocol import EngineThread, StepEvents, TransferEngine
from decant.handoff.errors import HandoffFailed, SequenceAlreadyFinished
from decant.handoff.heartbeat import with_heartbeat_timeout
from decant.handoff.leases import COMMITTED_SECONDS, LEASE_MS, Lease, LeaseTable
from decant.handoff.outgoing_sequence import OutgoingSequence, OutputsOf, committed_tokens
from decant.handoff.packing import TransferLayout
from decant.protos import worker_pb2 as wire
from decant.runtime.connections.heartbeat import HEARTBEAT_SECONDS, SILENT_SECONDS
from decant.runtime.connections.peer import UnknownMessages
from decant.runtime.errors import InvalidArgument

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SenderTiming:
    heartbeat_s: float = HEARTBEAT_SECONDS
    silent_s: float = SILENT_SECONDS
    committed_s: float = COMMITTED_SECONDS


class KvSender:
    """Sender of handoffs, for the event loop only."""

    def __init__(
        self,
        loop: EngineThread,
        layout: TransferLayout,
        heartbeat: Callable[[], wire.Heartbeat],
        lease_ms: int = LEASE_MS,
        *,
        timing: SenderTiming | None = None,
    ) -> None:
        self._timing = timing or SenderTiming()
        self.leases = LeaseTable(lease_ms, self._free, self._timing.committed_s)
        self._loop = loop
        self._layout = layout
        self._heartbeat = heartbeat
        self.memory: wire.BlockMemory | None = None
        """Where receivers can read the engine's blocks, if they can."""
        self._outgoing: dict[str, OutgoingSequence] = {}

    def issue(
        self,
        ticket: wire.Ticket,
        sequences: Sequence[str],
        prompt_tokens: int,
        outputs: OutputsOf = committed_tokens,
        *,
        is_live: bool = False,
        is_parked: bool = False,
    ) -> wire.Ticket:
        """Issue a ticket for a sequence, and the others of its prompt; ``outputs`` is called at the commit.

        ``is_live``: they have no ``park_after``. ``is_parked``: the steps that parked or ended them are over.
        """
        issued = self.leases.issue(ticket, sequences[0])
        unparked = set() if is_parked else set(sequences)
        outgoing = OutgoingSequence(
            sequences, issued.run, prompt_tokens, outputs, is_live, unparked, has_parked=is_parked
        )
        self._outgoing.update(dict.fromkeys(sequences, outgoing))
        return issued

    def on_step(self, output: StepEvents) -> None:
        changed = [outgoing for outgoing in self._outgoing.values() if outgoing.is_live]
        changed += self._known(filled.id for filled in output.filled)
        for id in output.parked:
            for outgoing in self._known([id]):
                outgoing.on_parked(id)
                changed.append(outgoing)
        for ended in output.ended:
            for outgoing in self._known([ended.id]):
                if ended.reason is FinishReason.FAILED:
                    outgoing.cancel(HandoffFailed(wire.CAUSE_ENGINE, ended.detail))
                outgoing.on_ended(ended.id)
                changed.append(outgoing)
        for outgoing in changed:
            outgoing.changed.set()

    def _known(self, sequences: Iterable[str]) -> list[OutgoingSequence]:
        return [self._outgoing[name] for name in sequences if name in self._outgoing]

    def cancel(self, ticket: bytes, failure: wire.Failure) -> None:
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

    def _free(self, lease: Lease) -> None:
        """Stop the fetch before the engine frees the blocks that it reads."""
        outgoing = self._outgoing[lease.sequence]
        for name in outgoing.sequences:
            del self._outgoing[name]
        outgoing.cancel(HandoffFailed.of(lease.failure or _reclaimed("the ticket has ended")))

        def free(engine: TransferEngine) -> None:
            engine.transfers.release(lease.sequence)
            for name in outgoing.sequences:
                engine.cancel(name)

        resumes = outgoing.is_live and not lease.is_committed
        self._loop.post((lambda engine: engine.transfers.cancel(lease.sequence)) if resumes else free)

    # -- a fetch ------------------------------------------------------------------------------------------------

    async def fetch(self, requests: AsyncIterable[wire.FetchRequest]) -> AsyncGenerator[bytes, None]:
        incoming = aiter(requests)
        try:
            opened = await self._receive_open(incoming)
            async with aclosing(self._responses(self.leases.open(opened), opened, incoming)) as responses:
                async for response in responses:
                    yield response
        except SequenceAlreadyFinished:
            yield _closed_message(None)
        except HandoffFailed as failed:
            yield _closed_message(failed.message())

    async def _receive_open(self, incoming: AsyncIterator[wire.FetchRequest]) -> wire.Open:
        try:
            async with asyncio.timeout(self.leases.lease_ms / 1000):
                first = await anext(incoming)
        except (StopAsyncIteration, TimeoutError):
            raise HandoffFailed(wire.CAUSE_PEER_LOST, "the fetch was not opened") from None
        if first.WhichOneof("message") != "open":
            raise HandoffFailed(wire.CAUSE_INVALID, "a fetch begins with open")
        return first.open

    async def _responses(
        self, lease: Lease, opened: wire.Open, incoming: AsyncIterator[wire.FetchRequest]
    ) -> AsyncGenerator[bytes, None]:
        """Serve an open fetch. If it ends without a commit, its ticket ends too."""
        outgoing = self._outgoing[lease.sequence]
        outgoing.reads_memory = opened.reads_memory and self.memory is not None
        failure = _peer_lost(lease, "the fetch broke")
        receiving = asyncio.create_task(self._receive_acks(lease, outgoing, incoming))
        try:
            async with (
                aclosing(self._messages(lease, outgoing, opened.cached_blocks)) as messages,
                aclosing(self._with_heartbeats(outgoing, messages)) as responses,
            ):
                async for response in responses:
                    yield response
        except (SequenceAlreadyFinished, HandoffFailed):
            failure = _reclaimed("the fetch was closed here")
            raise
        finally:
            if not lease.is_committed:
                self.cancel(lease.ticket.id, failure)
            await _cancel(receiving)

    async def _messages(
        self, lease: Lease, outgoing: OutgoingSequence, cached_blocks: int
    ) -> AsyncGenerator[bytes, None]:
        if outgoing.reads_memory:
            yield encode(wire.FetchResponse(memory=self.memory))
        try:
            export = await outgoing.export(self._loop, cached_blocks)
            commit: EngineCommit | None = None
            while commit is None:
                outgoing.changed.clear()
                for message in outgoing.block_messages(self._layout, export):
                    yield message
                    if outgoing.has_ended:
                        break
                if outgoing.has_ended:
                    raise SequenceAlreadyFinished
                commit = await outgoing.commit(self._loop)
                if commit is None:
                    await outgoing.changed.wait()
        except EngineError as error:
            if outgoing.has_ended:  # before the command ran
                raise SequenceAlreadyFinished from error
            raise HandoffFailed(wire.CAUSE_RECLAIMED, str(error)) from error
        for message in outgoing.block_messages(self._layout, export):  # the last block, which is partial
            yield message
        while outgoing.reads_memory and outgoing.acknowledged_chunks < outgoing.sent_chunks:
            outgoing.changed.clear()
            await outgoing.changed.wait()
        self.leases.commit(lease)
        yield outgoing.commit_message(commit)

    async def _with_heartbeats(
        self, outgoing: OutgoingSequence, messages: AsyncGenerator[bytes, None]
    ) -> AsyncGenerator[bytes, None]:
        """Pass the messages on, and heartbeats while none comes. Raises the error of `OutgoingSequence.cancel`."""
        while (error := outgoing.error) is None:
            outgoing.next_message = message = asyncio.ensure_future(anext(messages, None))
            try:
                while not (await asyncio.wait([message], timeout=self._timing.heartbeat_s))[0]:
                    yield encode(wire.FetchResponse(heartbeat=self._heartbeat()))
            finally:
                await _cancel(message)
            if message.cancelled():  # by `cancel`
                continue
            encoded = message.result()
            if encoded is None:
                return
            yield encoded
        raise error

    async def _receive_acks(
        self, lease: Lease, outgoing: OutgoingSequence, incoming: AsyncIterator[wire.FetchRequest]
    ) -> None:
        unknown = UnknownMessages(lease.receiver.id if lease.receiver else "")
        try:
            async for message in with_heartbeat_timeout(incoming, "the receiver", self._timing.silent_s):
                match message.WhichOneof("message"):
                    case "ack":
                        outgoing.acknowledged_chunks = message.ack.kv_chunks
                        outgoing.changed.set()
                        self.leases.renew(lease.ticket.id)
                    case "heartbeat" if outgoing.acknowledged_chunks >= outgoing.sent_chunks:
                        self.leases.renew(lease.ticket.id)
                    case None:
                        unknown.ignore()
        except HandoffFailed as silent:
            if not lease.is_committed:
                self.cancel(lease.ticket.id, _peer_lost(lease, silent.detail))
        except InvalidArgument as error:  # a malformed message of the receiver
            outgoing.cancel(error)


async def _cancel(task: asyncio.Future[T]) -> None:
    if not task.done():
        task.cancel()
        await asyncio.wait([task])


def _closed_message(failure: wire.Failure | None) -> bytes:
    return encode(wire.FetchResponse(closed=wire.ExportClosed(failure=failure)))


def _reclaimed(detail: str) -> wire.Failure:
    return wire.Failure(cause=wire.CAUSE_RECLAIMED, detail=detail)


def _peer_lost(lease: Lease, detail: str) -> wire.Failure:
    return wire.Failure(cause=wire.CAUSE_PEER_LOST, detail=detail, peer=lease.receiver)
