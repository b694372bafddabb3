"""Block accounting: block tables, reference counts, prefix hashes, LRU eviction. No bytes are touched here.

A block is in exactly one of three states::

    free     no reference, no hash                 <-- allocate takes these first
    cached   no reference, a published hash        <-- then it evicts the least recently used of these
    held     listed by one or more block tables    <-- release: to cached if published, else to free

An allocation is a ``BlockTable`` with an owner; ``release`` is the only way to return it. The reference count of a
block is the number of live tables that list it; ``check_integrity`` recounts from the tables.

With a sliding or chunked window a table frees the blocks that no later query sees::

    blocks    [ null | null | 7 | 3 | 9 ]        freed = 2
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from decant.engine.block_hashes import BlockHash
from decant.engine.errors import OutOfBlocks
from decant.engine.kv_layout import FULL, Window


def apply_changes(digests: dict[BlockHash, None], changed: Iterable[BlockHash]) -> None:
    """Remove the hashes that ``digests`` has, append the others."""
    for digest in changed:
        if digest in digests:
            del digests[digest]
        else:
            digests[digest] = None


class CachedPrefix(NamedTuple):
    """Cached start of a sequence: ``freed`` blocks that no later query sees, then the cached ``blocks``."""

    freed: int
    blocks: Sequence[int]

    @property
    def num_blocks(self) -> int:
        return self.freed + len(self.blocks)


class BlockTable:
    """Blocks of one owner, in the order of the tokens they carry. Only ``BlockPool`` makes one.

    The first ``freed`` entries are the pool's ``null`` block.
    """

    __slots__ = ("blocks", "freed", "live", "owner", "pool")

    def __init__(self, pool: BlockPool, owner: str, blocks: Iterable[int], freed: int = 0) -> None:
        self.pool = pool
        self.owner = owner
        self.blocks = array("i", [pool.null]) * freed + array("i", blocks)
        self.freed = freed
        self.live = True

    @property
    def held(self) -> array[int]:
        """The blocks that are not freed."""
        return self.blocks[self.freed :] if self.freed else self.blocks

    def grow(self, count: int) -> None:
        """Append ``count`` fresh blocks, all or none. Raises OutOfBlocks. For many tables use ``BlockPool.grow``."""
        self.blocks.extend(self.pool.take(count))

    def share(self, block: int) -> None:
        """Append a block that another table lists now."""
        self.pool.acquire(block)
        self.blocks.append(block)

    def free_unseen(self, position: int) -> None:
        """Free the blocks that no query from ``position`` on sees."""
        first = min(self.pool.first_block(position), len(self.blocks))
        if first > self.freed:
            self.pool.drop(self.blocks[self.freed : first])
            self.blocks[self.freed : first] = array("i", [self.pool.null]) * (first - self.freed)
            self.freed = first

    def release(self) -> None:
        """Return all blocks to the pool; a second call does nothing."""
        if self.live:
            self.live = False
            self.pool.give_back(self)
            del self.blocks[:]


class BlockPool:
    """Accounting of ``num_blocks`` blocks of ``block_size`` tokens each. ``window``: what queries see of them.

    ``null`` is the id of no block: a freed entry of a table. ``KvStore`` has zeros there.
    """

    def __init__(self, num_blocks: int, block_size: int, window: Window = FULL) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.window = window
        self.is_windowed = window != FULL
        self.null = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._refs = [0] * num_blocks
        self._hash_of: dict[int, BlockHash] = {}
        self._block_of: dict[BlockHash, int] = {}
        self._tables: dict[int, BlockTable] = {}  # by id(table)
        self._changed: dict[BlockHash, None] = {}  # published now and not at the last ``changed``, or the reverse

    @property
    def available(self) -> int:
        """Free and cached blocks: what an allocation can get now."""
        return len(self._free) + len(self._cached)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return len(self._cached)

    def blocks_for(self, tokens: int) -> int:
        """Number of blocks that ``tokens`` tokens need; the last one may be partial."""
        return -(-tokens // self.block_size)

    def first_block(self, position: int) -> int:
        """Index of the first block that a query at ``position`` sees."""
        return self.window.first_visible(position) // self.block_size

    def allocate(
        self, owner: str, count: int, prefix: Sequence[int] = (), spare: int = 0, freed: int = 0
    ) -> BlockTable:
        """A table of ``freed`` null entries, the held or cached ``prefix``, then ``count`` fresh blocks, all or none.

        ``spare`` blocks must stay available after it. Raises OutOfBlocks.
        """
        unheld = sum(1 for block in prefix if self._refs[block] == 0)
        if count + unheld + spare > self.available:
            raise OutOfBlocks(count + unheld + spare, self.available)
        for block in prefix:
            self.acquire(block)
        table = BlockTable(self, owner, prefix, freed)
        table.blocks.extend(self.take(count))
        self._tables[id(table)] = table
        return table

    def longest_prefix(self, hashes: Sequence[BlockHash]) -> CachedPrefix:
        """The longest prefix of this hash chain of which all blocks are published that a later query sees."""
        if not self.is_windowed:
            return CachedPrefix(0, self.match(hashes))
        longest = consecutive = 0  # published blocks up to this one
        for count, digest in enumerate(hashes, 1):
            consecutive = consecutive + 1 if digest in self._block_of else 0
            if consecutive and consecutive >= count - self.first_block(count * self.block_size):
                longest = count
        first = min(self.first_block(longest * self.block_size), longest)
        return CachedPrefix(first, [self._block_of[digest] for digest in hashes[first:longest]])

    def match(self, hashes: Iterable[BlockHash]) -> list[int]:
        """Published blocks of the longest prefix of this hash chain."""
        blocks = []
        for digest in hashes:
            block = self._block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def publish(self, blocks: Iterable[int], digests: Iterable[BlockHash]) -> None:
        """Make held, filled blocks findable by their digests. The first block published with a digest keeps it."""
        block_of, hash_of, published = self._block_of, self._hash_of, []
        for block, digest in zip(blocks, digests, strict=True):
            if self._refs[block] == 0:
                raise AssertionError(f"block {block} is published without a reference")
            if digest not in block_of and block not in hash_of:
                block_of[digest] = block
                hash_of[block] = digest
                published.append(digest)
        apply_changes(self._changed, published)

    def grow(self, tables: Sequence[BlockTable]) -> None:
        """Append one fresh block to each table, all or none. Raises OutOfBlocks."""
        for table, block in zip(tables, self.take(len(tables)), strict=True):
            table.blocks.append(block)

    def take(self, count: int) -> list[int]:
        """``count`` fresh blocks with one reference each. Raises OutOfBlocks. Internal to this module."""
        if count > self.available:
            raise OutOfBlocks(count, self.available)
        taken = self._free[: -count - 1 : -1]
        del self._free[len(self._free) - len(taken) :]
        if len(taken) < count:
            taken += self._evict(count - len(taken))
        for block in taken:
            self._refs[block] = 1
        return taken

    def acquire(self, block: int) -> None:
        """Add a reference to a held or cached block. Internal to this module."""
        if self._refs[block] == 0:
            del self._cached[block]
        self._refs[block] += 1

    def give_back(self, table: BlockTable) -> None:
        """Drop a table's references, last blocks first, so that a prefix is evicted after what follows it."""
        del self._tables[id(table)]
        self.drop(table.held)

    def drop(self, blocks: Sequence[int]) -> None:
        """Drop a reference of each block, the last one first. Internal to this module."""
        refs, hash_of = self._refs, self._hash_of
        for block in reversed(blocks):
            refs[block] -= 1
            if refs[block] == 0:
                if block in hash_of:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def forget(self, digests: Iterable[BlockHash]) -> None:
        """Evict the cached blocks of these hashes; held ones stay published."""
        for digest in digests:
            block = self._block_of.get(digest)
            if block is not None and block in self._cached:
                self._cached.move_to_end(block, last=False)
                self._free += self._evict(1)

    def drop_cache(self) -> int:
        """Evict all cached blocks; returns how many."""
        dropped = len(self._cached)
        self._free += self._evict(dropped)
        return dropped

    def _evict(self, count: int) -> list[int]:
        """Unpublish the ``count`` least recently used cached blocks; the caller puts them elsewhere."""
        evicted = [self._cached.popitem(last=False)[0] for _ in range(count)]
        digests = [self._hash_of.pop(block) for block in evicted]
        for digest in digests:
            del self._block_of[digest]
        apply_changes(self._changed, digests)
        return evicted

    def changed(self) -> list[BlockHash]:
        """Hashes whose publication changed since the last call, in order of publication.

        At most two for each block, however long ago that call was.
        """
        changed, self._changed = self._changed, {}
        return list(changed)

    def held_by(self) -> dict[str, list[int]]:
        """Blocks of each owner; several tables of one owner are concatenated."""
        owners: dict[str, list[int]] = {}
        for table in self._tables.values():
            owners.setdefault(table.owner, []).extend(table.held)
        return owners

    def check_integrity(self, live_owners: Iterable[str]) -> None:
        """Recount everything from the tables. Raises AssertionError with what does not add up."""
        counted = [0] * self.num_blocks
        for table in self._tables.values():
            _require(table.live, f"{table.owner} was released and is still listed")
            _require(len(set(table.held)) == len(table.held), f"{table.owner} lists a block twice")
            _require(set(table.blocks[: table.freed]) <= {self.null}, f"{table.owner} lists a block as freed")
            _require(self.null not in table.held, f"{table.owner} does not list a freed block as freed")
            for block in table.held:
                counted[block] += 1
        _require(counted == self._refs, "reference counts differ from the live block tables")
        dead = set(self.held_by()) - set(live_owners)
        _require(not dead, f"blocks are held for {sorted(dead)}, which are not alive")
        free, cached = set(self._free), set(self._cached)
        held = {block for block, refs in enumerate(counted) if refs}
        _require(len(free) == len(self._free), "a block is free twice")
        _require(not (free & cached or free & held or cached & held), "a block is in two states")
        _require(len(free) + len(cached) + len(held) == self.num_blocks, "a block is in no state")
        _require(cached <= set(self._hash_of), "a cached block has no hash")
        _require(not free & set(self._hash_of), "a free block has a hash")
        _require({b: h for h, b in self._block_of.items()} == self._hash_of, "hashes and blocks disagree")


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)
