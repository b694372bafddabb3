"""Block accounting: block tables, reference counts, LRU eviction. No bytes are touched here.

A block is in exactly one of three states::

    free     no reference, no hash                 <-- allocate takes these first
    cached   no reference, a published hash        <-- then it evicts the least recently used of these
    held     listed by one or more block tables    <-- release: to cached if published, else to free

An allocation is a ``BlockTable`` with an owner; ``release`` is the only way to return it. The reference count of a
block is the number of live tables that list it; ``check_integrity`` recounts from the tables.

A table has a row of blocks for each cache group (``kv_layout``). A group with a window frees those that no later query
sees::

    blocks    [ 4    | 8    | 1 | 6 | 2 ]        freed  0    full attention
              [ null | null | 7 | 3 | 9 ]               2    a window
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from decant.engine.block_hashes import BlockHash
from decant.engine.errors import OutOfBlocks
from decant.engine.kv_layout import FULL, Window
from decant.engine.prefix_index import GroupBlocks, PrefixIndex


class BlockTable:
    """Blocks of one owner, by group and in the order of the tokens they carry. Only ``BlockPool`` makes one.

    The first ``freed[group]`` entries of ``blocks[group]`` are the pool's ``null`` block. A group never has more
    entries than one with a wider window.
    """

    __slots__ = ("blocks", "freed", "live", "owner", "pool")

    def __init__(self, pool: BlockPool, owner: str, prefix: Sequence[GroupBlocks]) -> None:
        self.pool = pool
        self.owner = owner
        self.freed = [group.freed for group in prefix]
        self.blocks = tuple(array("i", [pool.null]) * group.freed + array("i", group.blocks) for group in prefix)
        self.live = True

    @property
    def num_blocks(self) -> int:
        """Blocks that each group has, from the sequence's start."""
        return len(self.blocks[-1])

    @property
    def shortest(self) -> list[array[int]]:
        """The rows of the groups that have no more than ``num_blocks``."""
        return [blocks for blocks in self.blocks if len(blocks) == len(self.blocks[-1])]

    @property
    def held(self) -> list[int]:
        """The blocks of all groups that are not freed."""
        return [block for blocks, freed in zip(self.blocks, self.freed, strict=True) for block in blocks[freed:]]

    def grow(self, count: int) -> None:
        """Append fresh blocks until each group has ``count``, all or none. Raises OutOfBlocks."""
        missing = [max(0, count - len(blocks)) for blocks in self.blocks]
        fresh = self.pool.take(sum(missing))
        for blocks, more in zip(self.blocks, missing, strict=True):
            blocks.extend(fresh[:more])
            del fresh[:more]

    def reachable(self, more: int) -> int:
        """How many blocks each group can have with ``more`` more blocks in all."""
        lengths = sorted(map(len, self.blocks))
        return min((more + sum(lengths[:count])) // count for count in range(1, len(lengths) + 1))

    def share(self, group: int, block: int) -> None:
        """Append a block that another table lists now."""
        self.pool.acquire(block)
        self.blocks[group].append(block)

    def free_unseen(self, position: int) -> None:
        """Free the blocks that no query from ``position`` on sees."""
        for group in self.pool.windowed:
            blocks, freed = self.blocks[group], self.freed[group]
            first = min(self.pool.first_block(group, position), len(blocks))
            if first > freed:
                self.pool.drop(blocks[freed:first])
                blocks[freed:first] = array("i", [self.pool.null]) * (first - freed)
                self.freed[group] = first

    def release(self) -> None:
        """Return all blocks to the pool; a second call does nothing."""
        if self.live:
            self.live = False
            self.pool.give_back(self)
            for blocks in self.blocks:
                del blocks[:]


class BlockPool:
    """Accounting of ``num_blocks`` blocks of ``block_size`` tokens each, which serve any cache group.

    ``windows``: what queries of each group see, widest first; ``windowed``: the groups that free blocks. ``null`` is
    the id of no block: a freed entry of a table. ``KvStore`` has zeros there.
    """

    def __init__(self, num_blocks: int, block_size: int, windows: Sequence[Window] = (FULL,)) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.windows = windows
        self.windowed = [group for group, window in enumerate(windows) if window != FULL]
        self.index = PrefixIndex(block_size, windows)
        self.null = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._refs = [0] * num_blocks
        self._tables: dict[int, BlockTable] = {}  # by id(table)

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

    def blocks_at_once(self, count: int) -> int:
        """How many blocks of all groups a sequence of ``count`` blocks of tokens needs at the same time."""
        return sum(window.blocks_at_once(count, self.block_size) for window in self.windows)

    def first_block(self, group: int, position: int) -> int:
        """Index of the first block that a query of the group at ``position`` sees."""
        return self.windows[group].first_block(position, self.block_size)

    def allocate(self, owner: str, count: int, prefix: Sequence[GroupBlocks] = (), spare: int = 0) -> BlockTable:
        """A table of ``count`` blocks in each group: the held or cached ``prefix``, then fresh ones, all or none.

        A group with a window gets only as many as it needs at once; ``BlockTable.grow`` adds the others.
        ``spare`` blocks must stay available. Raises OutOfBlocks.
        """
        prefix = prefix or [GroupBlocks()] * len(self.windows)
        cached = [block for group in prefix for block in group.blocks]
        fresh = []
        for window, (freed, blocks) in zip(self.windows, prefix, strict=True):
            count = min(count, freed + window.blocks_at_once(count - freed, self.block_size))
            fresh.append(max(0, count - freed - len(blocks)))
        needed = sum(fresh) + sum(1 for block in cached if self._refs[block] == 0) + spare
        if needed > self.available:
            raise OutOfBlocks(needed, self.available)
        for block in cached:
            self.acquire(block)
        table = BlockTable(self, owner, prefix)
        for blocks, more in zip(table.blocks, fresh, strict=True):
            blocks.extend(self.take(more))
        self._tables[id(table)] = table
        return table

    def publish(self, group: int, blocks: Sequence[int], digests: Iterable[BlockHash]) -> None:
        """Make held, filled blocks of a group findable by their digests. The first one of a digest keeps it."""
        for block in blocks:
            if self._refs[block] == 0:
                raise AssertionError(f"block {block} is published without a reference")
        self.index.publish(group, blocks, digests)

    def grow(self, rows: Sequence[array[int]]) -> None:
        """Append one fresh block to each of these rows of tables, all or none. Raises OutOfBlocks."""
        for blocks, block in zip(rows, self.take(len(rows)), strict=True):
            blocks.append(block)

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
        refs, published = self._refs, self.index.published
        for block in reversed(blocks):
            refs[block] -= 1
            if refs[block] == 0:
                if block in published:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def forget(self, digests: Iterable[BlockHash]) -> None:
        """Evict the cached blocks of these hashes in all groups; held ones stay published."""
        for block in [block for digest in digests for block in self.index.find(digest)]:
            if block in self._cached:
                self._cached.move_to_end(block, last=False)
                self._free += self._evict(1)

    def unpublish(self, digests: Iterable[BlockHash]) -> None:
        """Remove these hashes from the prefix cache in all groups, also those of held blocks."""
        found = [block for digest in digests for block in self.index.find(digest)]
        cached = [block for block in found if block in self._cached]
        self.index.remove(found)
        for block in cached:
            del self._cached[block]
        self._free += cached

    def drop_cache(self) -> int:
        """Evict all cached blocks; returns how many."""
        dropped = len(self._cached)
        self._free += self._evict(dropped)
        return dropped

    def _evict(self, count: int) -> list[int]:
        """Unpublish the ``count`` least recently used cached blocks; the caller puts them elsewhere."""
        evicted = [self._cached.popitem(last=False)[0] for _ in range(count)]
        self.index.remove(evicted)
        return evicted

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
            held = table.held
            _require(len(set(held)) == len(held), f"{table.owner} lists a block twice")
            for blocks, freed in zip(table.blocks, table.freed, strict=True):
                _require(set(blocks[:freed]) <= {self.null}, f"{table.owner} lists a block as freed")
            _require(self.null not in held, f"{table.owner} does not list a freed block as freed")
            for block in held:
                counted[block] += 1
        _require(counted == self._refs, "reference counts differ from the live block tables")
        dead = set(self.held_by()) - set(live_owners)
        _require(not dead, f"blocks are held for {sorted(dead)}, which are not alive")
        free, cached = set(self._free), set(self._cached)
        used = {block for block, refs in enumerate(counted) if refs}
        _require(len(free) == len(self._free), "a block is free twice")
        _require(not (free & cached or free & used or cached & used), "a block is in two states")
        _require(len(free) + len(cached) + len(used) == self.num_blocks, "a block is in no state")
        published = set(self.index.published)
        _require(cached <= published, "a cached block has no hash")
        _require(not free & published, "a free block has a hash")
        self.index.check_integrity()


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)
