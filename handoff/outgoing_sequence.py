from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from decant.engine.transfer import ExportedBlock, KvExport
from decant.engine.transfer import TransferCommit as EngineCommit
from decant.handoff.codec import encode
from decant.handoff.engine_protocol import EngineThread, TransferEngine
from decant.handoff.packing import FilledBlock, LocatedBlock, TransferLayout, pack
from decant.protos import worker_pb2 as wire
from decant.runtime import packed


@dataclass(slots=True, eq=False)
class OutgoingSequence:
    """A sequence with a ticket: what steps and acks record of it, and the messages that carry it.

    The sender sets ``changed`` after a change.
    """

    id: str
    run: wire.Run
    prompt_tokens: int
    logprobs: Callable[[], Iterable[wire.TokenLogprobs]]
    is_live: bool
    is_parked: bool
    has_ended: bool = False  # the sequence finished
    reads_memory: bool = False  # the receiver reads the blocks' memory
    sent_blocks: int = 0
    sent_chunks: int = 0
    acknowledged_chunks: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    error: Exception | None = None  # why the fetch must end
    next_message: asyncio.Future[bytes | None] | None = None

    def cancel(self, error: Exception) -> None:
        """End the fetch, which reads no more blocks. The first error counts."""
        self.error = self.error or error
        if self.next_message is not None:
            self.next_message.cancel()

    async def export(self, loop: EngineThread, cached_blocks: int) -> KvExport:
        return await loop.call(
            lambda engine: engine.transfers.export(self.id, cached_blocks),
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
        output = wire.TransferCommit.Output(output=0, tokens=packed.pack(commit.output))
        output.logprobs.extend(self.logprobs())
        message = wire.TransferCommit(
            computed=commit.computed, prompt_tokens=self.prompt_tokens, outputs=[output], checksum=commit.checksum
        )
        return encode(wire.FetchResponse(commit=message))

    def _block(self, export: KvExport, block: ExportedBlock) -> FilledBlock | LocatedBlock:
        if self.reads_memory:
            return LocatedBlock(block.address, export.locate(block.address), block.checksum)
        return FilledBlock(block.address, export.read(block.address), block.checksum)


def _consecutive(blocks: list[ExportedBlock]) -> list[ExportedBlock]:
    group, index = blocks[0].address
    return [block for at, block in enumerate(blocks) if block.address == (group, index + at)]
