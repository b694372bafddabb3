from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from decant.engine.transfer import ExportedBlock, KvExport
from decant.engine.transfer import TransferCommit as EngineCommit
from decant.handoff.codec import encode
from decant.handoff.engine_protocol import EngineThread, TransferEngine
from decant.handoff.packing import FilledBlock, LocatedBlock, TransferLayout, pack
from decant.protos import worker_pb2 as wire
from decant.runtime import packed

OutputsOf = Callable[[EngineCommit], list[wire.TransferCommit.Output]]
"""Makes the outputs of a commit: first those that move, in the order of the engine's commit, then those that ended."""


def committed_tokens(commit: EngineCommit) -> list[wire.TransferCommit.Output]:
    return [wire.TransferCommit.Output(output=index, tokens=packed.pack(tokens)) for index, tokens in commit.outputs]


@dataclass(slots=True, eq=False)
class OutgoingSequence:
    """A sequence with a ticket: what steps and acks record of it, and the messages that carry it.

    The sender sets ``changed`` after a change.
    """

    sequences: Sequence[str]  # first the one whose blocks move, then the other outputs of its prompt
    run: wire.Run
    prompt_tokens: int
    outputs: OutputsOf
    is_live: bool
    unparked: set[str]  # sequences that have neither parked nor ended
    has_parked: bool = False  # any of them
    has_ended: bool = False  # nothing is left to hand over
    reads_memory: bool = False  # the receiver reads the blocks' memory
    sent_blocks: int = 0
    sent_chunks: int = 0
    acknowledged_chunks: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    error: Exception | None = None  # why the fetch must end
    next_message: asyncio.Future[bytes | None] | None = None

    @property
    def id(self) -> str:
        return self.sequences[0]

    @property
    def is_parked(self) -> bool:
        return self.has_parked and not self.unparked

    def on_parked(self, id: str) -> None:
        self.unparked.discard(id)
        self.has_parked = True

    def on_ended(self, id: str) -> None:
        """Of a live sequence the blocks end with it; the prompt of parked ones stays for those that have not ended."""
        self.unparked.discard(id)
        self.has_ended |= id == self.id if self.is_live else not (self.unparked or self.has_parked)

    def cancel(self, error: Exception) -> None:
        """End the fetch, which reads no more blocks. The first error counts."""
        self.error = self.error or error
        if self.next_message is not None:
            self.next_message.cancel()

    async def export(self, loop: EngineThread, cached_blocks: int) -> KvExport:
        return await loop.call(
            lambda engine: engine.transfers.export(self.id, cached_blocks, self.sequences[1:]),
            undo=lambda engine, _: engine.transfers.release(self.id),
        )

    def block_messages(self, layout: TransferLayout, export: KvExport) -> Iterator[bytes]:
        """Yield the filled blocks that were not sent."""
        while self.sent_blocks < len(export.blocks):
            unsent = export.blocks[self.sent_blocks : self.sent_blocks + layout.blocks_per_message]
            blocks = [self._block(export, block) for block in _consecutive(unsent)]
            for message in pack(self.run, layout, blocks):
                self.sent_chunks += 1
                yield message
            self.sent_blocks += len(blocks)

    async def commit(self, loop: EngineThread) -> EngineCommit | None:
        """Commit the export once the sequence is parked; a live one parks when all its full blocks are sent.

        Return None if it is too early.
        """

        def finalize(engine: TransferEngine) -> EngineCommit | None:
            if self.is_live:
                return engine.transfers.finalize_running(self.id, self.sent_blocks)
            return engine.transfers.finalize(self.id)

        return await loop.call(finalize) if self.is_live or self.is_parked else None

    def commit_message(self, commit: EngineCommit) -> bytes:
        message = wire.TransferCommit(
            computed=commit.computed,
            prompt_tokens=self.prompt_tokens,
            outputs=self.outputs(commit),
            checksum=commit.checksum,
        )
        return encode(wire.FetchResponse(commit=message))

    def _block(self, export: KvExport, block: ExportedBlock) -> FilledBlock | LocatedBlock:
        if self.reads_memory:
            return LocatedBlock(block.address, export.locate(block.address), block.checksum)
        return FilledBlock(block.address, export.read(block.address), block.checksum)


def _consecutive(blocks: list[ExportedBlock]) -> list[ExportedBlock]:
    group, index = blocks[0].address
    return [block for at, block in enumerate(blocks) if block.address == (group, index + at)]
