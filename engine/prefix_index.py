from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from decant.engine.block_hashes import BlockHash
from decant.engine.kv_layout import FULL, Window


def apply_changes(hashes: dict[BlockHash, None], changed: Iterable[BlockHash]) -> None:
    """Remove the changed hashes that ``hashes`` has, and append the others."""
    for block_hash in changed:
        if block_hash in hashes:
            del hashes[block_hash]
        else:
            hashes[block_hash] = None


class GroupBlocks(NamedTuple):
    num_freed: int = 0
    blocks: Sequence[int] = ()


class CachedPrefix(NamedTuple):
    num_blocks: int
    groups: tuple[GroupBlocks, ...]


class PrefixIndex:
    """Finds cached blocks by the hash of their tokens, for each cache group.

    The block pool owns it, publishes filled blocks and removes evicted ones; the scheduler asks it for the longest
    prefix. The worker reports its changes to routers.
    """

    def __init__(self, block_size: int, windows: Sequence[Window]) -> None:
        self._block_size = block_size
        self._windows = windows
        self._full = [group for group, window in enumerate(windows) if window == FULL]
        self._windowed = [group for group, window in enumerate(windows) if window != FULL]
        self._blocks: tuple[dict[BlockHash, int], ...] = tuple({} for _ in windows)  # of each group
        self.published: dict[int, tuple[int, BlockHash]] = {}
        """Group and hash of each published block."""
        self._changed: dict[BlockHash, None] = {}  # published now and not at the last ``changed``, or the reverse

    def find(self, block_hash: BlockHash) -> list[int]:
        return [blocks[block_hash] for blocks in self._blocks if block_hash in blocks]

    def longest_prefix(self, hashes: Sequence[BlockHash]) -> CachedPrefix:
        """Find the longest prefix of which each group has published all blocks that a later query sees."""
        longest = len(hashes)
        for group in self._full:
            blocks = self._blocks[group]
            longest = next((at for at in range(longest) if hashes[at] not in blocks), longest)
        if self._windowed:
            longest = self._longest_windowed(hashes[:longest])
        return CachedPrefix(longest, tuple(self._group_blocks(group, hashes[:longest]) for group in self._groups))

    @property
    def _groups(self) -> range:
        return range(len(self._windows))

    def _longest_windowed(self, hashes: Sequence[BlockHash]) -> int:
        longest, consecutive = 0, dict.fromkeys(self._windowed, 0)  # of each group: published blocks up to this one
        for count, block_hash in enumerate(hashes, 1):
            is_cached = True
            for group in self._windowed:
                consecutive[group] = consecutive[group] + 1 if block_hash in self._blocks[group] else 0
                first = self._windows[group].first_block(count * self._block_size, self._block_size)
                is_cached &= consecutive[group] >= max(1, count - first)
            if is_cached:
                longest = count
        return longest

    def _group_blocks(self, group: int, hashes: Sequence[BlockHash]) -> GroupBlocks:
        end, blocks = len(hashes), self._blocks[group]
        first = min(self._windows[group].first_block(end * self._block_size, self._block_size), end)
        return GroupBlocks(first, [blocks[block_hash] for block_hash in hashes[first:]])

    def publish(self, group: int, blocks: Iterable[int], hashes: Iterable[BlockHash]) -> None:
        block_of, keys, new = self._blocks[group], self.published, []
        for block, block_hash in zip(blocks, hashes, strict=True):
            if block_hash not in block_of and block not in keys:
                block_of[block_hash] = block
                keys[block] = (group, block_hash)
                new.append(block_hash)
        if group == 0:
            apply_changes(self._changed, new)

    def remove(self, blocks: Iterable[int]) -> None:
        removed = []
        for group, block_hash in map(self.published.pop, blocks):
            del self._blocks[group][block_hash]
            if group == 0:
                removed.append(block_hash)
        apply_changes(self._changed, removed)

    def changed(self) -> list[BlockHash]:
        """Hashes whose publication in group 0 changed since the last call, in order; at most two per block."""
        changed, self._changed = self._changed, {}
        return list(changed)

    def check_integrity(self) -> None:
        found = {
            block: (group, block_hash) for group in self._groups for block_hash, block in self._blocks[group].items()
        }
        if found != self.published or len(found) != sum(map(len, self._blocks)):
            raise AssertionError("hashes and blocks disagree")
