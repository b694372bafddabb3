"""Both ends of a KV handoff.

Each block has a checksum over its address and bytes, the commit one over those checksums and its own fields. The
sequence exists at the receiver only once all agree.

    sender    [0][1][2][3][4.]          blocks fill step by step
    lease        [1][2][3][4.]          shared from ``cached_blocks`` on, the last one with the commit
    receiver  (0)[1][2][3][4.][ ]       (0) pinned from its prefix cache; capacity for one more token

Each cache group has such a row; one with a window begins with the blocks that the last token sees.
"""

from __future__ import annotations

import struct
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from decant.engine.blocks import BlockTable
from decant.engine.errors import TransferRejected
from decant.engine.forks import link
from decant.engine.plan import BlockBytes
from decant.engine.sequence import BlockAddress as BlockAddress
from decant.engine.sequence import Sequence as EngineSequence

Checksum = Callable[[bytes | memoryview], int]
"""Below 2**64."""

default_checksum: Checksum = zlib.crc32


def block_checksum(checksum: Checksum, address: BlockAddress, data: bytes | memoryview) -> int:
    return checksum(struct.pack("<QQQ", *address, checksum(data)))


def transfer_checksum(
    checksum: Checksum, computed: int, outputs: Sequence[CommittedOutput], checksums: Sequence[int]
) -> int:
    words = [computed]
    for output in outputs:
        words += (output.output << 32 | len(output.tokens), *output.tokens)
    words += checksums
    return checksum(struct.pack(f"<{len(words)}Q", *words))


@dataclass(frozen=True, slots=True)
class ExportedBlock:
    address: BlockAddress
    checksum: int


class CommittedOutput(NamedTuple):
    output: int  # its index
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TransferCommit:
    """What moves: the first ``computed`` tokens of the first of ``outputs`` have KV in the blocks.

    The others have the same prompt, and continue from the KV of that.
    """

    computed: int
    outputs: tuple[CommittedOutput, ...]
    checksum: int


class KvExport:
    """Lease on a sequence's filled blocks, in each group from an index on; its owner must ``release`` it (idempotent).

    ``siblings`` are the live sequences of the same prompt; empty for a sequence that has none.

    The lease outlives the sequence. ``blocks`` grows as blocks fill, ascending in each group. Only the engine calls
    ``offer_filled``, ``offer`` and ``finalize``.
    """

    def __init__(self, sequence: EngineSequence, first: Sequence[int], lease: BlockTable, store: BlockBytes) -> None:
        self.siblings = sequence.siblings
        self.next_index = list(first)
        self.blocks: list[ExportedBlock] = []
        self.commit: TransferCommit | None = None
        self.ended = False
        self._lease = lease
        self._leased_ids: dict[BlockAddress, int] = {}
        self._store = store

    @property
    def held_blocks(self) -> Sequence[int]:
        return self._lease.held_blocks

    def read(self, address: BlockAddress) -> memoryview:
        """Bytes of a block of the sequence, valid until ``release``. Raises TransferRejected."""
        return self._store.read(self._leased(address))

    def locate(self, address: BlockAddress) -> range:
        """Offsets of a block's bytes in the store's ``block_memory``. Raises TransferRejected."""
        start = self._leased(address) * self._store.block_bytes
        return range(start, start + self._store.block_bytes)

    def _leased(self, address: BlockAddress) -> int:
        block = self._leased_ids.get(address)
        if block is None or not self._lease.is_live:
            raise TransferRejected(f"{self._lease.owner}: {address} is not leased")
        return block

    def release(self) -> None:
        self.ended = True
        self._lease.release()

    def offer_filled(self, sequence: EngineSequence, stop: int, checksum: Checksum) -> list[ExportedBlock]:
        """Offer the blocks up to ``stop`` that were not offered, except freed ones, which no later token sees."""
        if sequence.block_table is None:
            return []
        return [
            self.offer(sequence, BlockAddress(group, index), checksum)
            for group, freed in enumerate(sequence.block_table.num_freed)
            for index in range(max(self.next_index[group], freed), stop)
        ]

    def offer(self, sequence: EngineSequence, address: BlockAddress, checksum: Checksum) -> ExportedBlock:
        assert sequence.block_table is not None
        group, index = address
        assert index >= self.next_index[group]
        block = self._leased_ids[address] = sequence.block_table.blocks[group][index]
        self._lease.share(group, block)
        known = sequence.block_checksums.get(address)
        total = block_checksum(checksum, address, self._store.read(block)) if known is None else known
        self.blocks.append(ExportedBlock(address, total))
        self.next_index[group] = index + 1
        return self.blocks[-1]

    def finalize(self, sequence: EngineSequence, checksum: Checksum) -> TransferCommit:
        self.offer_filled(sequence, self._lease.pool.blocks_for(sequence.num_computed), checksum)
        others = (sibling for sibling in sequence.siblings if sibling is not sequence)
        outputs = tuple(
            CommittedOutput(each.output_index, tuple(each.tokens[each.request.prompt_len :]))
            for each in (sequence, *others)
        )
        checksums = [block.checksum for block in sorted(self.blocks, key=lambda block: block.address)]
        total = transfer_checksum(checksum, sequence.num_computed, outputs, checksums)
        self.commit = TransferCommit(sequence.num_computed, outputs, total)
        return self.commit


class IncomingSequence:
    """Blocks for an arriving sequence; the owner must ``abort`` it or have the engine ``join`` it.

    After either it is ``closed`` (``on_close`` gets its id) and no longer owns blocks. ``write`` may be called from any
    thread, during steps; everything else only on the engine's thread. Closing waits for a running copy.
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
        self._checksums: dict[BlockAddress, int] = {}  # of the blocks received

    @property
    def id(self) -> str:
        return self.sequence.id

    @property
    def num_blocks(self) -> int:
        return self.sequence.block_table.num_blocks if self.sequence.block_table else 0

    def write(self, address: BlockAddress, data: bytes | bytearray | memoryview, total: int) -> None:
        """Verify and store one block; a repeated block is accepted. Raises TransferRejected."""
        group, index = address
        if len(data) != self._store.block_bytes:
            raise TransferRejected(f"{self.id}: {address} has {len(data)} bytes")
        if block_checksum(self._checksum, address, memoryview(data)) != total:
            raise TransferRejected(f"{self.id}: the bytes of {address} do not match their checksum")
        with self._copying:
            table = self._block_table()
            if group >= len(table.blocks) or not self.cached_blocks <= index < len(table.blocks[group]):
                raise TransferRejected(f"{self.id}: no block is allocated for {address}")
            if self._checksums.get(address, total) != total:
                raise TransferRejected(f"{self.id}: {address} came again with other bytes")
            if index >= table.num_freed[group]:  # a later token sees it
                self._store.write(table.blocks[group][index], data)
            self._checksums[address] = total

    def extend(self, tokens: int) -> None:
        """Extend the capacity to ``tokens`` tokens and one more. Raises OutOfBlocks."""
        table = self._block_table()
        table.grow(table.pool.blocks_for(tokens + 1))

    def accept(self, commit: TransferCommit) -> list[EngineSequence]:
        """Verify the commit; return the sequences that continue, first the one that has the blocks."""
        table = self._block_table()
        pool, reserved = table.pool, {each.output_index: each for each in (self.sequence, *self.sequence.forks)}
        first = commit.outputs[0]
        tokens = self.sequence.request.prompt_len + len(first.tokens)
        stop = pool.blocks_for(commit.computed)
        needed = [
            BlockAddress(group, index)
            for group in range(len(pool.windows))
            for index in range(max(self.cached_blocks, pool.first_block(group, commit.computed)), stop)
        ]
        continued = [(reserved[each.output], each) for each in commit.outputs if each.output in reserved]
        if (
            first.output not in reserved
            or commit.computed != tokens - 1
            or (reserved[first.output] is not self.sequence and len(first.tokens) != 1)  # blocks with other tokens
            or any(not _continues(sequence, output) for sequence, output in continued)
        ):
            raise TransferRejected(f"{self.id}: the commit is not of this sequence")
        missing = [str(address) for address in needed if address not in self._checksums]
        if missing or any(address.block >= stop for address in self._checksums):
            here = len(self._checksums)
            raise TransferRejected(
                f"{self.id}: blocks: {len(needed)} in the commit, got {here}; missing: {', '.join(missing) or 'none'}"
            )
        checksums = [self._checksums[address] for address in sorted(self._checksums)]
        if transfer_checksum(self._checksum, commit.computed, commit.outputs, checksums) != commit.checksum:
            raise TransferRejected(f"{self.id}: the commit does not match its checksum")
        for sequence, output in continued:
            sequence.tokens[sequence.request.prompt_len :] = output.tokens
        self._close(table, commit.computed)
        table.free_unseen(commit.computed)
        owner, *others = (sequence for sequence, _ in continued)
        self._hand_over(table, owner, commit.computed)
        owner.forks = []
        owner.siblings = []
        if others:
            link(owner, others)
        return [owner, *others]

    def _hand_over(self, table: BlockTable, owner: EngineSequence, computed: int) -> None:
        """Give the blocks to another output if the one that they were reserved for has ended at the sender."""
        if owner is not self.sequence:
            owner.copy_prefix(self.sequence, computed, table.num_blocks)
            self.sequence.forks, self.sequence.block_table = [], None
        table.owner, owner.block_table = owner.id, table
        owner.num_computed, owner.forked_from, owner.is_fork = computed, None, self.sequence.is_fork
        owner.prompt_logprobs_sent = owner.request.prompt_len  # the sender emitted them

    def abort(self) -> None:
        """Free the blocks; verified ones stay in the prefix cache. Does nothing once closed."""
        if not self.closed and self.sequence.block_table:
            table = self.sequence.block_table
            self._close(table, len(self.sequence.tokens))
            self.sequence.block_table = None
            table.release()

    def _close(self, table: BlockTable, filled: int) -> None:
        """Close; publish received blocks that the first ``filled`` tokens fill: only a commit has a partial one."""
        with self._copying:
            self.closed = True
        size: int = table.pool.block_size
        if self.sequence.request.use_prefix_cache:
            hashes = self.sequence.hashes(range(filled // size), size)
            for group, (freed, blocks) in enumerate(zip(table.num_freed, table.blocks, strict=True)):
                received = [index for of, index in sorted(self._checksums) if of == group]
                full = [index for index in received if freed <= index < len(hashes)]
                table.pool.publish(group, [blocks[index] for index in full], [hashes[index] for index in full])
        self._on_close(self.id)

    def _block_table(self) -> BlockTable:
        if self.closed or self.sequence.block_table is None:
            raise TransferRejected(f"{self.id}: this arrival is closed")
        return self.sequence.block_table


def _continues(sequence: EngineSequence, output: CommittedOutput) -> bool:
    known = sequence.tokens[sequence.request.prompt_len :]
    return list(output.tokens[: len(known)]) == known
