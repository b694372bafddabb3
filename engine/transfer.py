"""Both ends of a KV handoff: blocks leave one engine while they fill, and become a sequence in another.

A ``KvExport`` leases the filled blocks of a sequence; an ``IncomingSequence`` owns the blocks that receive them. Each
block travels with a checksum over its index and bytes, the commit with one over those checksums and its own fields.
The sequence exists at the receiver only once all agree. Neither end is known to the scheduler.

    sender    [0][1][2][3][4.]          blocks fill step by step
    lease        [1][2][3][4.]          shared from ``cached_blocks`` on, the last one with the commit
    receiver  (0)[1][2][3][4.][ ]       (0) pinned from its prefix cache; capacity for one more token
"""

from __future__ import annotations

import struct
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from decant.engine.blocks import BlockTable
from decant.engine.errors import TransferRejected
from decant.engine.plan import BlockBytes
from decant.engine.sequence import Sequence as EngineSequence

Checksum = Callable[[bytes | memoryview], int]
"""Checksum of bytes, below 2**64."""

default_checksum: Checksum = zlib.crc32


def block_checksum(checksum: Checksum, index: int, data: bytes | memoryview) -> int:
    """Checksum of a block and its index in the sequence: a verified block can't be stored at another index."""
    return checksum(struct.pack("<QQ", index, checksum(data)))


def transfer_checksum(checksum: Checksum, computed: int, output: Sequence[int], sums: Sequence[int]) -> int:
    """Checksum of a commit: over its fields and the checksums of all blocks sent, in order."""
    words = (computed, len(output), *output, *sums)
    return checksum(struct.pack(f"<{len(words)}Q", *words))


@dataclass(frozen=True, slots=True)
class BlockRun:
    """A filled block to be sent: its index in the sequence and its ``block_checksum``."""

    index: int
    checksum: int


@dataclass(frozen=True, slots=True)
class TransferCommit:
    """The sender's last message: tokens computed, the output so far, and their ``transfer_checksum``."""

    computed: int
    output: tuple[int, ...]
    checksum: int


class KvExport:
    """A lease on a sequence's filled blocks from ``cached_blocks`` on; its owner must release it.

    The lease keeps the bytes alive after the sequence has ended. ``runs`` grows as blocks fill, in ascending order of
    their indexes; ``commit`` is set once the sequence is parked and finalized.
    """

    def __init__(self, sequence: EngineSequence, cached_blocks: int, lease: BlockTable, store: BlockBytes) -> None:
        self.id = sequence.id
        self.cached_blocks = cached_blocks
        self.runs: list[BlockRun] = []
        self.commit: TransferCommit | None = None
        self.ended = False
        self._lease = lease
        self._blocks: dict[int, int] = {}  # leased blocks by index in the sequence
        self._store = store

    @property
    def next_index(self) -> int:
        """Index of the first block that is not offered yet."""
        return self.runs[-1].index + 1 if self.runs else self.cached_blocks

    @property
    def blocks(self) -> Sequence[int]:
        """The leased blocks, in the order of the tokens they carry."""
        return self._lease.blocks

    def read(self, index: int) -> memoryview:
        """Bytes of block ``index`` of the sequence, valid until ``release``. Raises TransferRejected."""
        block = self._blocks.get(index)
        if block is None or not self._lease.live:
            raise TransferRejected(f"{self.id}: block {index} is not leased")
        return self._store.read(block)

    def release(self) -> None:
        """End the lease; read nothing after it. A second call does nothing."""
        self.ended = True
        self._lease.release()

    def offer_filled(self, sequence: EngineSequence, stop: int, checksum: Checksum) -> list[BlockRun]:
        """Lease and checksum the sequence's blocks up to ``stop`` that were not offered. Only the engine calls it.

        After a preemption, blocks that the sequence did not compute again, as no later token sees them, are left out.
        """
        if sequence.block_table is None:
            return []
        first = max(self.next_index, sequence.block_table.freed)
        return [self.offer(sequence, index, checksum) for index in range(first, stop)]

    def offer(self, sequence: EngineSequence, index: int, checksum: Checksum) -> BlockRun:
        """Lease and checksum the sequence's block ``index``, behind all that were offered. Only the engine calls it."""
        assert sequence.block_table is not None
        assert index >= self.next_index
        block = self._blocks[index] = sequence.block_table.blocks[index]
        self._lease.share(block)
        known = sequence.block_checksums.get(index)
        total = block_checksum(checksum, index, self._store.read(block)) if known is None else known
        self.runs.append(BlockRun(index, total))
        return self.runs[-1]

    def finalize(self, sequence: EngineSequence, checksum: Checksum) -> TransferCommit:
        """Lease the remaining blocks, the last perhaps partial, and commit. Only the engine calls it."""
        self.offer_filled(sequence, self._lease.pool.blocks_for(sequence.computed), checksum)
        output = tuple(sequence.tokens[sequence.request.prompt_len :])
        total = transfer_checksum(checksum, sequence.computed, output, [run.checksum for run in self.runs])
        self.commit = TransferCommit(sequence.computed, output, total)
        return self.commit


class IncomingSequence:
    """Blocks for a sequence that is arriving; its owner must ``abort`` it or have the engine ``join`` it.

    After either it is ``closed`` (``on_close`` gets its id) and no longer owns its blocks. ``write`` may be called
    from any thread, during the engine's steps; everything else only on the engine's thread. A block is never freed
    during a copy: closing waits for it.
    """

    def __init__(
        self,
        sequence: EngineSequence,
        cached_blocks: int,
        store: BlockBytes,
        checksum: Checksum,
        on_close: Callable[[str], object],
    ) -> None:
        self.sequence = sequence
        self.cached_blocks = cached_blocks
        self.closed = False
        self._store = store
        self._checksum = checksum
        self._on_close = on_close
        self._copying = threading.Lock()
        self._checksums: dict[int, int] = {}  # of the blocks received

    @property
    def id(self) -> str:
        return self.sequence.id

    @property
    def num_blocks(self) -> int:
        """Blocks that the sequence has, from its start."""
        return len(self.sequence.block_table.blocks) if self.sequence.block_table else 0

    def write(self, index: int, data: bytes | bytearray | memoryview, total: int) -> None:
        """Verify and store one block; a repeated block is accepted. Raises TransferRejected."""
        if len(data) != self._store.block_bytes:
            raise TransferRejected(f"{self.id}: block {index} has {len(data)} bytes")
        if block_checksum(self._checksum, index, memoryview(data)) != total:
            raise TransferRejected(f"{self.id}: the bytes of block {index} do not match their checksum")
        with self._copying:
            blocks = self._block_table().blocks
            if not self.cached_blocks <= index < len(blocks):
                raise TransferRejected(f"{self.id}: there is no room for block {index}")
            if self._checksums.get(index, total) != total:
                raise TransferRejected(f"{self.id}: block {index} came again with other bytes")
            if index >= self._block_table().freed:  # a later token sees it
                self._store.write(blocks[index], data)
            self._checksums[index] = total

    def extend(self, tokens: int) -> None:
        """Make capacity for ``tokens`` tokens and one more. Raises OutOfBlocks."""
        table = self._block_table()
        missing = table.pool.blocks_for(tokens + 1) - len(table.blocks)
        if missing > 0:
            table.grow(missing)

    def accept(self, commit: TransferCommit) -> EngineSequence:
        """Close, and return the sequence as of ``commit``. Raises TransferRejected unless all blocks are verified."""
        table = self._block_table()
        pool = table.pool
        known = self.sequence.tokens[self.sequence.request.prompt_len :]
        tokens = self.sequence.request.prompt_len + len(commit.output)
        stop = pool.blocks_for(commit.computed)
        needed = range(max(self.cached_blocks, pool.first_block(commit.computed)), stop)
        if list(commit.output[: len(known)]) != known or commit.computed != tokens - 1:
            raise TransferRejected(f"{self.id}: the commit is not of this sequence")
        missing = [index for index in needed if index not in self._checksums]
        if missing or max(self._checksums, default=-1) >= stop:
            raise TransferRejected(f"{self.id}: committed with blocks {missing} missing, {len(self._checksums)} here")
        sums = [self._checksums[index] for index in sorted(self._checksums)]
        if transfer_checksum(self._checksum, commit.computed, commit.output, sums) != commit.checksum:
            raise TransferRejected(f"{self.id}: the commit does not match its checksum")
        self.sequence.tokens.extend(commit.output[len(known) :])
        self.sequence.computed = commit.computed
        self.sequence.prompt_logprobs_sent = self.sequence.request.prompt_len  # the sender emitted them
        self._close(table, commit.computed)
        table.free_unseen(commit.computed)
        return self.sequence

    def abort(self) -> None:
        """Free the blocks; verified ones stay in the prefix cache. Does nothing once closed."""
        if not self.closed and self.sequence.block_table:
            table = self.sequence.block_table
            self._close(table, len(self.sequence.tokens))
            self.sequence.block_table = None
            table.release()

    def _close(self, table: BlockTable, filled: int) -> None:
        """Stop writes and publish verified blocks.

        Blocks of the first ``filled`` tokens were full when received: a partial block comes only with a commit.
        """
        with self._copying:
            self.closed = True
        size: int = table.pool.block_size
        if self.sequence.request.use_prefix_cache:
            hashes = self.sequence.hashes(range(filled // size), size)
            full = [index for index in sorted(self._checksums) if table.freed <= index < len(hashes)]
            table.pool.publish([table.blocks[index] for index in full], [hashes[index] for index in full])
        self._on_close(self.id)

    def _block_table(self) -> BlockTable:
        if self.closed or self.sequence.block_table is None:
            raise TransferRejected(f"{self.id}: this arrival is closed")
        return self.sequence.block_table
