"""The seams of a handoff: blocks leave one engine while they fill, and make a sequence in another.

An ``KvExport`` leases the filled blocks of a sequence; an ``IncomingSequence`` owns the blocks that receive them.
Each block travels with a sum over its place and its bytes, made when it was filled; the seal with a sum over those
sums and its own words. Only when all agree does the sequence exist at the other end. Neither end is in the
scheduler.

    giver   [0][1][2][3][4.]          blocks are filled, step by step
    lease      [1][2][3][4.]          shared from ``have`` on, the last one with the seal
    taker   (0)[1][2][3][4.][ ]       (0) pinned from its own prefix cache; room for one token more
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
"""Sum over bytes, below 2**64. ``zlib.crc32`` by default; a worker passes a faster one."""

default_checksum: Checksum = zlib.crc32


def block_checksum(checksum: Checksum, index: int, data: bytes | memoryview) -> int:
    """A block's sum, over its place in the sequence too: what is verified can't be put elsewhere."""
    return checksum(struct.pack("<QQ", index, checksum(data)))


def transfer_checksum(checksum: Checksum, computed: int, output: Sequence[int], sums: Sequence[int]) -> int:
    """The seal's sum: over what it says, and over the sums of all blocks that travelled, in order."""
    words = (computed, len(output), *output, *sums)
    return checksum(struct.pack(f"<{len(words)}Q", *words))


@dataclass(frozen=True, slots=True)
class BlockRun:
    """One filled block on its way: its place in the sequence and its ``block_checksum``."""

    index: int
    checksum: int


@dataclass(frozen=True, slots=True)
class TransferCommit:
    """The giver's last word: tokens computed, the output written so far, and their ``transfer_checksum``."""

    computed: int
    output: tuple[int, ...]
    checksum: int


class KvExport:
    """A lease on a sequence's filled blocks from ``have`` on; the owner of the lease must release it.

    The lease keeps the bytes alive after the sequence has ended. ``runs`` grows as blocks fill; ``read`` gives
    the bytes of one of them; ``seal`` comes last, once the sequence is parked.
    """

    def __init__(self, sequence: EngineSequence, have: int, holding: BlockTable, store: BlockBytes) -> None:
        self.id = sequence.id
        self.have = have
        self.runs: list[BlockRun] = []
        self.sealed: TransferCommit | None = None
        self.ended = False
        self._holding = holding
        self._store = store

    @property
    def blocks(self) -> Sequence[int]:
        """The leased blocks, in the order of the tokens they carry."""
        return self._holding.blocks

    def read(self, index: int) -> memoryview:
        """Bytes of the block at ``index`` of the sequence, valid until ``release``. Raises TransferRejected."""
        if not self.have <= index < self.have + len(self._holding.blocks):
            raise TransferRejected(f"{self.id}: block {index} is not leased")
        return self._store.read(self._holding.blocks[index - self.have])

    def release(self) -> None:
        """End the lease; nothing may be read after it. Safe to call twice."""
        self.ended = True
        self._holding.release()

    def offer(self, sequence: EngineSequence, index: int, checksum: Checksum) -> BlockRun:
        """Lease the sequence's block ``index``, the next one in order, and sum it. For the engine alone."""
        assert sequence.holding is not None
        assert index == self.have + len(self.runs)
        block = sequence.holding.blocks[index]
        self._holding.share(block)
        known = sequence.sums.get(index)
        total = block_checksum(checksum, index, self._store.read(block)) if known is None else known
        self.runs.append(BlockRun(index, total))
        return self.runs[-1]

    def seal(self, sequence: EngineSequence, checksum: Checksum) -> TransferCommit:
        """Lease what is left, the last block perhaps filled in part, and close the account. For the engine alone."""
        assert sequence.holding is not None
        for index in range(self.have + len(self.runs), sequence.holding.pool.blocks_for(sequence.computed)):
            self.offer(sequence, index, checksum)
        output = tuple(sequence.tokens[sequence.request.prompt_len :])
        total = transfer_checksum(checksum, sequence.computed, output, [run.checksum for run in self.runs])
        self.sealed = TransferCommit(sequence.computed, output, total)
        return self.sealed


class IncomingSequence:
    """Room for a sequence that is on its way; its owner must ``abort`` it or have the engine ``join`` it.

    After either it is ``closed`` (the engine is told by ``on_close``), and its blocks are no longer its own.
    ``write`` may be called from any thread, beside the engine's steps; all else is for the engine's thread. A block
    is never freed under a copy: closing waits for the one that is under way.
    """

    def __init__(
        self,
        sequence: EngineSequence,
        have: int,
        store: BlockBytes,
        checksum: Checksum,
        on_close: Callable[[str], object],
    ) -> None:
        self.sequence = sequence
        self.have = have
        self.closed = False
        self._store = store
        self._checksum = checksum
        self._on_close = on_close
        self._copying = threading.Lock()
        self._sums: dict[int, int] = {}

    @property
    def id(self) -> str:
        return self.sequence.id

    @property
    def room(self) -> int:
        """Blocks from the start of the sequence on for which there is room."""
        return len(self.sequence.holding.blocks) if self.sequence.holding else 0

    def write(self, index: int, data: bytes | bytearray | memoryview, total: int) -> None:
        """Verify one block and put it in its place; a block may come again. Raises TransferRejected."""
        if len(data) != self._store.block_bytes:
            raise TransferRejected(f"{self.id}: block {index} has {len(data)} bytes")
        if block_checksum(self._checksum, index, memoryview(data)) != total:
            raise TransferRejected(f"{self.id}: the bytes of block {index} do not agree with their sum")
        with self._copying:
            blocks = self._holding().blocks
            if not self.have <= index < len(blocks):
                raise TransferRejected(f"{self.id}: there is no room for block {index}")
            if self._sums.get(index, total) != total:
                raise TransferRejected(f"{self.id}: block {index} came again with other bytes")
            self._store.write(blocks[index], data)
            self._sums[index] = total

    def extend(self, tokens: int) -> None:
        """Room for a sequence that has grown to ``tokens`` tokens and one more. Raises NoRoom. For the engine alone."""
        holding = self._holding()
        missing = holding.pool.blocks_for(tokens + 1) - len(holding.blocks)
        if missing > 0:
            holding.grow(missing)

    def accept(self, seal: TransferCommit) -> EngineSequence:
        """The sequence, once all that the seal speaks of is here. Raises TransferRejected. For the engine alone."""
        holding = self._holding()
        pool = holding.pool
        known = self.sequence.tokens[self.sequence.request.prompt_len :]
        tokens = self.sequence.request.prompt_len + len(seal.output)
        indexes = range(self.have, pool.blocks_for(seal.computed))
        if list(seal.output[: len(known)]) != known or seal.computed != tokens - 1:
            raise TransferRejected(f"{self.id}: the seal does not speak of this sequence")
        missing = [index for index in indexes if index not in self._sums]
        if missing or len(self._sums) != len(indexes):
            raise TransferRejected(f"{self.id}: sealed with blocks {missing} missing, {len(self._sums)} here")
        sums = [self._sums[index] for index in indexes]
        if transfer_checksum(self._checksum, seal.computed, seal.output, sums) != seal.checksum:
            raise TransferRejected(f"{self.id}: the seal does not agree with its sum")
        self.sequence.tokens.extend(seal.output[len(known) :])
        self.sequence.computed = seal.computed
        self.sequence.explained = self.sequence.request.prompt_len  # the giver told them
        self._close(holding, seal.computed)
        return self.sequence

    def abort(self) -> None:
        """Give the room back; what was verified stays in the prefix cache. Does nothing to one that is closed."""
        if not self.closed and self.sequence.holding:
            holding = self.sequence.holding
            self._close(holding, len(self.sequence.tokens))
            self.sequence.holding = None
            holding.release()

    def _close(self, holding: BlockTable, filled: int) -> None:
        """Nothing is written after this. What was verified can be found by others, whatever became of the rest.

        Of the first ``filled`` tokens every block that came was full: a seal is not made before that.
        """
        with self._copying:
            self.closed = True
        size: int = holding.pool.block_size
        if self.sequence.request.use_prefix_cache:
            hashes = self.sequence.hashes(range(filled // size), size)
            full = [index for index in sorted(self._sums) if index < len(hashes)]
            holding.pool.publish([holding.blocks[index] for index in full], [hashes[index] for index in full])
        self._on_close(self.id)

    def _holding(self) -> BlockTable:
        if self.closed or self.sequence.holding is None:
            raise TransferRejected(f"{self.id}: this arrival is closed")
        return self.sequence.holding
