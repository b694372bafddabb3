"""The receiver of a handoff: fetches a cache into reserved blocks and joins the sequence when the commit matches.

reserved ──> Open ──> kv_chunk: verify, write, acknowledge ... ──> commit: join ──> result, and Release(owned)
                            │ corrupt, silent, closed
                            └────────────> abort: the blocks are free ──> HandoffFailed, and Release(abandoned)
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass

from decant.engine.errors import EngineError, OutOfBlocks, TransferRejected
from decant.engine.transfer import CommittedOutput, IncomingSequence
from decant.engine.transfer import TransferCommit as EngineCommit
from decant.handoff.codec import Received
from decant.handoff.engine_protocol import EngineThread, TransferEngine
from decant.handoff.errors import HandoffFailed, SequenceAlreadyFinished
from decant.handoff.heartbeat import with_heartbeat_timeout
from decant.handoff.packing import TransferLayout, Unpacker
from decant.handoff.transport import KvSource
from decant.protos import worker_pb2 as wire
from decant.runtime.connections.heartbeat import HEARTBEAT_SECONDS, SILENT_SECONDS
from decant.runtime.connections.peer import UnknownMessages
from decant.runtime.event_source import EventSource
from decant.runtime.packed import unpack

ACK_CHUNKS = 32
"""Chunks after which an Ack is sent before its time."""


@dataclass(frozen=True, slots=True)
class ReceiverTiming:
    heartbeat_s: float = HEARTBEAT_SECONDS
    silent_s: float = SILENT_SECONDS
    release_s: float = 2.0
    """Time for a Release; then the lease ends by itself."""


@dataclass(frozen=True, slots=True)
class TransferResult:
    """Result of a fetch: all tokens of each output, also of those that ended at the sender.

    Times are of the event loop.
    """

    outputs: tuple[wire.TransferCommit.Output, ...]
    received_bytes: int
    opened_at: float
    owned_at: float


@dataclass(frozen=True, slots=True)
class FetchEnd:
    """End of a fetch; ``outcome`` is None if nothing was left to fetch, or the run was cancelled."""

    arrival: IncomingSequence
    outcome: TransferResult | HandoffFailed | None


class KvReceiver:
    def __init__(
        self,
        loop: EngineThread,
        layout: TransferLayout,
        peer: wire.Peer,
        heartbeat: Callable[[], wire.Heartbeat],
        timing: ReceiverTiming | None = None,
    ) -> None:
        self._loop = loop
        self._layout = layout
        self._peer = peer
        self._heartbeat = heartbeat
        self._timing = timing or ReceiverTiming()
        self._releases: set[asyncio.Task[None]] = set()
        self.fetches = EventSource[IncomingSequence]()
        self.fetch_ends = EventSource[FetchEnd]()

    async def receive(self, source: KvSource, ticket: wire.Ticket, arrival: IncomingSequence) -> TransferResult:
        """Fetch a cache into the arrival, and join or abort it.

        Raises HandoffFailed, SequenceAlreadyFinished. Then, and when cancelled, blocks are freed and a Release is sent.
        """
        outcome: TransferResult | HandoffFailed | None = None
        self.fetches.publish(arrival)
        try:
            outcome = await self._fetch(source, ticket, arrival)
            return outcome
        except HandoffFailed as failed:
            outcome = failed
            raise
        finally:
            is_owned = isinstance(outcome, TransferResult)
            if not is_owned:
                self._loop.post(lambda _: arrival.abort())
            self._send_release(source, ticket, is_owned=is_owned)
            self.fetch_ends.publish(FetchEnd(arrival, outcome))

    def release(self, source: KvSource, ticket: wire.Ticket) -> None:
        """Release an unused ticket before its lease ends; idempotent."""
        self._send_release(source, ticket, is_owned=False)

    async def close(self) -> None:
        """Wait at most ``release_s`` for Releases. All fetches must have ended."""
        if self._releases:
            await asyncio.wait(self._releases)

    def _send_release(self, source: KvSource, ticket: wire.Ticket, *, is_owned: bool) -> None:
        outcome = wire.ReleaseRequest.OUTCOME_OWNED if is_owned else wire.ReleaseRequest.OUTCOME_ABANDONED
        release = wire.ReleaseRequest(ticket=ticket.id, run=ticket.run, receiver=self._peer, outcome=outcome)

        async def send() -> None:
            with contextlib.suppress(ConnectionError):  # then the lease ends by itself
                await source.release(release, self._timing.release_s)

        task = asyncio.create_task(send())
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _fetch(self, source: KvSource, ticket: wire.Ticket, arrival: IncomingSequence) -> TransferResult:
        try:
            return await self._fetch_and_join(source, ticket, arrival)
        except OutOfBlocks as error:
            raise HandoffFailed(
                wire.CAUSE_BUSY, f"the sequence grew, and there are no free blocks: {error}", self._peer
            ) from error
        except TransferRejected as error:
            source.record_corruption(str(error))
            raise HandoffFailed(wire.CAUSE_CORRUPT, str(error)) from error
        except EngineError as error:
            raise HandoffFailed(wire.CAUSE_ENGINE, str(error)) from error
        except ConnectionError as error:
            raise HandoffFailed(wire.CAUSE_PEER_LOST, str(error), ticket.sender) from error

    async def _fetch_and_join(self, source: KvSource, ticket: wire.Ticket, arrival: IncomingSequence) -> TransferResult:
        clock = asyncio.get_running_loop().time
        unpacker = Unpacker(ticket.run, self._layout)
        fetch = _Fetch(arrival, unpacker, ticket.sender.id)
        sender, opened_at = f"sender {ticket.sender.id}", clock()
        requests = fetch.requests(self._open(ticket, arrival), self._heartbeat, self._timing.heartbeat_s)
        async with (
            aclosing(source.fetch(requests)) as messages,
            aclosing(with_heartbeat_timeout(messages, sender, self._timing.silent_s)) as responses,
        ):
            async for received in responses:
                await self._extend(arrival, received.response)
                commit = fetch.handle(received)
                if commit is not None:
                    await self._join(arrival, commit)
                    outputs = tuple(received.response.commit.outputs)
                    return TransferResult(outputs, unpacker.received_bytes, opened_at, clock())
        raise HandoffFailed(wire.CAUSE_PEER_LOST, "the fetch ended without a commit", ticket.sender)

    async def _extend(self, arrival: IncomingSequence, response: wire.FetchResponse) -> None:
        chunk = response.kv_chunk
        size = self._layout.block_size
        filled = chunk.first_position // size + len(chunk.block_checksums)
        if filled > arrival.num_blocks and not arrival.closed:
            await self._loop.call(lambda _: arrival.extend(filled * size - 1))

    async def _join(self, arrival: IncomingSequence, commit: EngineCommit) -> None:
        names = [arrival.id, *(fork.id for fork in arrival.sequence.forks)]

        def undo(engine: TransferEngine, _: None) -> None:
            for name in names:
                engine.cancel(name)

        await self._loop.call(lambda engine: engine.transfers.join(arrival, commit), undo=undo)

    def _open(self, ticket: wire.Ticket, arrival: IncomingSequence) -> wire.Open:
        return wire.Open(
            ticket=ticket.id,
            run=ticket.run,
            receiver=self._peer,
            sender=ticket.sender,
            layout_hash=self._layout.layout_hash,
            salt=arrival.sequence.request.cache_salt,
            cached_blocks=arrival.cached_blocks,
        )


class _Fetch:
    def __init__(self, arrival: IncomingSequence, unpacker: Unpacker, sender: str) -> None:
        self._arrival = arrival
        self._unknown = UnknownMessages(sender)
        self._unpacker = unpacker
        self._messages = 0
        self._acknowledged = 0
        self._ack_is_due = asyncio.Event()

    async def requests(
        self, opening: wire.Open, heartbeat: Callable[[], wire.Heartbeat], interval: float
    ) -> AsyncIterator[wire.FetchRequest]:
        """Send Open, then Acks and heartbeats.

        Chunks that were read from the sender's memory are acknowledged at once: the commit waits for that.
        """
        yield wire.FetchRequest(open=opening)
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval):
                    await self._ack_is_due.wait()
            self._ack_is_due.clear()
            if self._acknowledged == self._messages:
                yield wire.FetchRequest(heartbeat=heartbeat())
            else:
                self._acknowledged = self._messages
                yield wire.FetchRequest(ack=wire.Ack(kv_chunks=self._acknowledged))

    def handle(self, received: Received) -> EngineCommit | None:
        response = received.response
        match response.WhichOneof("message"):
            case "kv_chunk":
                for block in self._unpacker.unpack(response.kv_chunk, received.data):
                    self._arrival.write(block.address, block.data, block.checksum)
                self._messages += 1
                is_read = bool(response.kv_chunk.block_offsets)
                if is_read or self._messages - self._acknowledged >= ACK_CHUNKS:
                    self._ack_is_due.set()
            case "commit":
                return self._commit(response.commit)
            case "closed" if response.closed.HasField("failure"):
                raise HandoffFailed.of(response.closed.failure)
            case "closed":
                raise SequenceAlreadyFinished
            case None:
                self._unknown.ignore()
        return None

    def _commit(self, commit: wire.TransferCommit) -> EngineCommit:
        moved = [output for output in commit.outputs if not output.HasField("finished")]
        if not moved:
            raise HandoffFailed(wire.CAUSE_CORRUPT, "a commit without an output that continues")
        if commit.prompt_tokens != self._arrival.sequence.request.prompt_len or any(
            len(output.tokens) % 4 for output in commit.outputs
        ):
            raise HandoffFailed(wire.CAUSE_CORRUPT, f"a commit for a prompt of {commit.prompt_tokens} tokens")
        logprobs = (one for output in commit.outputs for one in output.logprobs)
        if any(len(one.top_ids) != len(one.top_logprobs) for one in logprobs):
            raise HandoffFailed(wire.CAUSE_CORRUPT, "a commit whose top_ids and top_logprobs differ in number")
        outputs = tuple(CommittedOutput(output.output, tuple(unpack(output.tokens))) for output in moved)
        return EngineCommit(commit.computed, outputs, commit.checksum)
