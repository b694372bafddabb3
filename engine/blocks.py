"""Block accounting: block tables, reference counts, LRU eviction.

A block is in exactly one state::

    free     no reference, no hash                 <-- allocated first
    cached   no reference, a published hash        <-- then the least recently used is evicted
    held     listed by one or more block tables    <-- release: to cached if published, else to free

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
    """Blocks of one owner by group, in token order; the owner must ``release`` the table.

    The first ``num_freed[group]`` entries of ``blocks[group]`` are null blocks. A wider window never has fewer entries.
    """

    __slots__ = ("blocks", "is_live", "num_freed", "owner", "pool")

    def __init__(self, pool: BlockPool, owner: str, prefix: Sequence[GroupBlocks]) -> None:
        self.pool = pool
        self.owner = owner
        self.num_freed = [group.num_freed for group in prefix]
        self.blocks = tuple(
            array("i", [pool.null_block]) * group.num_freed + array("i", group.blocks) for group in prefix
        )
        self.is_live = True

    @property
    def num_blocks(self) -> int:
        return len(self.blocks[-1])

    @property
    def shortest_rows(self) -> list[array[int]]:
        return [blocks for blocks in self.blocks if len(blocks) == len(self.blocks[-1])]

    @property
    def held_blocks(self) -> list[int]:
        return [block for blocks, freed in zip(self.blocks, self.num_freed, strict=True) for block in blocks[freed:]]

    def grow(self, count: int) -> None:
        """Grow each group to ``count`` entries, all or none. Raises OutOfBlocks."""
        missing = [max(0, count - len(blocks)) for blocks in self.blocks]
        fresh = self.pool.allocate_blocks(sum(missing))
        for blocks, more in zip(self.blocks, missing, strict=True):
            blocks.extend(fresh[:more])
            del fresh[:more]

    def reachable(self, more: int) -> int:
        """Most entries that every group can have with ``more`` further blocks in total."""
        lengths = sorted(map(len, self.blocks))
        return min((more + sum(lengths[:count])) // count for count in range(1, len(lengths) + 1))

    def share(self, group: int, block: int) -> None:
        self.pool.add_reference(block)
        self.blocks[group].append(block)

    def free_unseen(self, position: int) -> None:
        for group in self.pool.windowed_groups:
            blocks, freed = self.blocks[group], self.num_freed[group]
            first = min(self.pool.first_block(group, position), len(blocks))
            if first > freed:
                self.pool.release_blocks(blocks[freed:first])
                blocks[freed:first] = array("i", [self.pool.null_block]) * (first - freed)
                self.num_freed[group] = first

    def release(self) -> None:
        if self.is_live:
            self.is_live = False
            self.pool.release_table(self)
            for blocks in self.blocks:
                del blocks[:]


class BlockPool:
    """Blocks of all cache groups; ``windows`` has the window of each group, widest first."""

    def __init__(self, num_blocks: int, block_size: int, windows: Sequence[Window] = (FULL,)) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.windows = windows
        self.windowed_groups = [group for group, window in enumerate(windows) if window != FULL]
        self.index = PrefixIndex(block_size, windows)
        self.null_block = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._ref_counts = [0] * num_blocks
        self._tables: dict[int, BlockTable] = {}  # by id(table)

    @property
    def available_blocks(self) -> int:
        return len(self._free) + len(self._cached)

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    @property
    def cached_blocks(self) -> int:
        return len(self._cached)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def blocks_at_once(self, count: int) -> int:
        """Most blocks that a sequence of ``count`` blocks per group holds at the same time, in all groups."""
        return sum(window.blocks_at_once(count, self.block_size) for window in self.windows)

    def first_block(self, group: int, position: int) -> int:
        return self.windows[group].first_block(position, self.block_size)

    def allocate(
        self, owner: str, count: int, prefix: Sequence[GroupBlocks] = (), reserved_blocks: int = 0
    ) -> BlockTable:
        """Allocate a table of ``count`` entries per group, all or none: held or cached ``prefix``, then fresh blocks.

        A group with a window gets only what it needs at once. ``reserved_blocks`` stay available. Raises OutOfBlocks.
        """
        prefix = prefix or [GroupBlocks()] * len(self.windows)
        cached = [block for group in prefix for block in group.blocks]
        fresh = []
        for window, (freed, blocks) in zip(self.windows, prefix, strict=True):
            count = min(count, freed + window.blocks_at_once(count - freed, self.block_size))
            fresh.append(max(0, count - freed - len(blocks)))
        needed = sum(fresh) + sum(1 for block in cached if self._ref_counts[block] == 0) + reserved_blocks
        if needed > self.available_blocks:
            raise OutOfBlocks(needed, self.available_blocks)
        for block in cached:
            self.add_reference(block)
        table = BlockTable(self, owner, prefix)
        for blocks, more in zip(table.blocks, fresh, strict=True):
            blocks.extend(self.allocate_blocks(more))
        self._tables[id(table)] = table
        return table

    def publish(self, group: int, blocks: Sequence[int], hashes: Iterable[BlockHash]) -> None:
        """Make held, filled blocks findable by their hashes. The first block of a hash keeps it."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                raise AssertionError(f"block {block} is published without a reference")
        self.index.publish(group, blocks, hashes)

    def grow(self, rows: Sequence[array[int]]) -> None:
        for blocks, block in zip(rows, self.allocate_blocks(len(rows)), strict=True):
            blocks.append(block)

    def allocate_blocks(self, count: int) -> list[int]:
        if count > self.available_blocks:
            raise OutOfBlocks(count, self.available_blocks)
        taken = self._free[: -count - 1 : -1]
        del self._free[len(self._free) - len(taken) :]
        if len(taken) < count:
            taken += self._evict(count - len(taken))
        for block in taken:
            self._ref_counts[block] = 1
        return taken

    def add_reference(self, block: int) -> None:
        if self._ref_counts[block] == 0:
            del self._cached[block]
        self._ref_counts[block] += 1

    def release_table(self, table: BlockTable) -> None:
        del self._tables[id(table)]
        self.release_blocks(table.held_blocks)

    def release_blocks(self, blocks: Sequence[int]) -> None:
        """Release blocks, the last one first: a prefix is evicted after what follows it."""
        refs, published = self._ref_counts, self.index.published
        for block in reversed(blocks):
            refs[block] -= 1
            if refs[block] == 0:
                if block in published:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def evict(self, hashes: Iterable[BlockHash]) -> None:
        for block in [block for block_hash in hashes for block in self.index.find(block_hash)]:
            if block in self._cached:
                self._cached.move_to_end(block, last=False)
                self._free += self._evict(1)

    def unpublish(self, hashes: Iterable[BlockHash]) -> None:
        found = [block for block_hash in hashes for block in self.index.find(block_hash)]
        cached = [block for block in found if block in self._cached]
        self.index.remove(found)
        for block in cached:
            del self._cached[block]
        self._free += cached

    def _evict(self, count: int) -> list[int]:
        evicted = [self._cached.popitem(last=False)[0] for _ in range(count)]
        self.index.remove(evicted)
        return evicted

    def held_by(self) -> dict[str, list[int]]:
        owners: dict[str, list[int]] = {}
        for table in self._tables.values():
            owners.setdefault(table.owner, []).extend(table.held_blocks)
        return owners

    def check_integrity(self, live_owners: Iterable[str]) -> None:
        counted = [0] * self.num_blocks
        for table in self._tables.values():
            _require(table.is_live, f"{table.owner} was released and is still listed")
            held = table.held_blocks
            _require(len(set(held)) == len(held), f"{table.owner} lists a block twice")
            for blocks, freed in zip(table.blocks, table.num_freed, strict=True):
                _require(set(blocks[:freed]) <= {self.null_block}, f"{table.owner} lists a block as freed")
            _require(self.null_block not in held, f"{table.owner} does not list a freed block as freed")
            for block in held:
                counted[block] += 1
        _require(counted == self._ref_counts, "reference counts differ from the live block tables")
        dead = set(self.held_by()) - set(live_owners)
        _require(not dead, f"blocks are held for {sorted(dead)}, which own no live sequence")
        free, cached = set(self._free), set(self._cached)
        used = {block for block, refs in enumerate(counted) if refs}
        _require(len(free) == len(self._free), "a block is free twice")
        _require(not (free & cached or free & used or cached & used), "a block is in two states")
        _require(len(free) + len(cached) + len(used) == self.num_blocks, "a block is in no state")
        published = set(self.index.published)
        _require(cached <= published, "a cached block has no hash")
        _require(not free & published, "a free block has a hash")
        self.index.check_integrity()


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)
