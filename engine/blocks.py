"""Who holds which block: ids, holdings, hashes, least-recently-used order. Bookkeeping only, never bytes.

A block is in exactly one of three places::

    free     no holder, no hash                    <-- allocate takes from here first
    cached   no holder, a published hash           <-- then the least recently used of these is evicted
    held     one or more holdings count it         <-- release: to cached if published, else to free

An allocation is a ``BlockTable``: it has an owner, and ``release`` is the one way out. The reference count of a
block is the number of live holdings that list it; ``check_integrity`` counts again from the holdings.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from decant.engine.errors import OutOfBlocks

BlockHash = bytes
"""Chained digest of a block's tokens, all tokens before them, and a salt (16 bytes)."""


def hash_blocks(parent: BlockHash, tokens: Sequence[int], size: int) -> list[BlockHash]:
    """Digests of the full blocks of ``size`` tokens among these, each chained to the one before and the first one to
    ``parent``: a prefix is equal exactly when its last hash is."""
    words = array("Q", tokens)
    data, stride = words.tobytes(), words.itemsize * size
    digests = []
    for end in range(stride, len(data) + 1, stride):
        parent = hashlib.blake2b(data[end - stride : end], key=parent, digest_size=16).digest()
        digests.append(parent)
    return digests


def root_hash(salt: bytes) -> BlockHash:
    """Where a chain starts: other salts never meet."""
    return hashlib.blake2b(salt, digest_size=16, person=b"decant-kv").digest()


def toggle(digests: dict[BlockHash, None], changed: Iterable[BlockHash]) -> None:
    """Those of ``changed`` that are in go out, the others come in, at the end."""
    for digest in changed:
        if digest in digests:
            del digests[digest]
        else:
            digests[digest] = None


class BlockTable:
    """Blocks that one owner holds, in the order of the tokens they carry. Made by ``BlockPool`` alone."""

    __slots__ = ("blocks", "live", "owner", "pool")

    def __init__(self, pool: BlockPool, owner: str, blocks: Iterable[int]) -> None:
        self.pool = pool
        self.owner = owner
        self.blocks = array("i", blocks)
        self.live = True

    def grow(self, count: int) -> None:
        """Append ``count`` fresh blocks, all or none. Raises NoRoom. ``BlockPool.grow`` is for many holdings."""
        self.blocks.extend(self.pool.take(count))

    def share(self, block: int) -> None:
        """Append a block that another holding keeps alive right now."""
        self.pool.acquire(block)
        self.blocks.append(block)

    def release(self) -> None:
        """Give every block back; safe to call twice."""
        if self.live:
            self.live = False
            self.pool.give_back(self)
            del self.blocks[:]


class BlockPool:
    """The map of ``num_blocks`` blocks of ``block_size`` tokens each."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._refs = [0] * num_blocks
        self._hash_of: dict[int, BlockHash] = {}
        self._block_of: dict[BlockHash, int] = {}
        self._holdings: dict[int, BlockTable] = {}  # by id(holding)
        self._changed: dict[BlockHash, None] = {}  # published now and not when it was last told, or the reverse

    @property
    def available(self) -> int:
        """Blocks that an allocation could get now: free and cached."""
        return len(self._free) + len(self._cached)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return len(self._cached)

    def blocks_for(self, tokens: int) -> int:
        """How many blocks ``tokens`` tokens fill, the last one perhaps in part."""
        return -(-tokens // self.block_size)

    def allocate(self, owner: str, count: int, prefix: Sequence[int] = (), spare: int = 0) -> BlockTable:
        """A holding of the published blocks ``prefix`` and ``count`` fresh ones, all or none.

        ``spare`` blocks must stay available after it. Raises NoRoom.
        """
        unheld = sum(1 for block in prefix if self._refs[block] == 0)
        if count + unheld + spare > self.available:
            raise OutOfBlocks(count + unheld + spare, self.available)
        for block in prefix:
            self.acquire(block)
        holding = BlockTable(self, owner, prefix)
        holding.blocks.extend(self.take(count))
        self._holdings[id(holding)] = holding
        return holding

    def match(self, hashes: Iterable[BlockHash]) -> list[int]:
        """The longest run of published blocks that carries this chain from its start."""
        found = []
        for digest in hashes:
            block = self._block_of.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def publish(self, blocks: Iterable[int], digests: Iterable[BlockHash]) -> None:
        """Let others find held blocks whose KV is filled, each by its digest. The first block of a content wins."""
        block_of, hash_of, news = self._block_of, self._hash_of, []
        for block, digest in zip(blocks, digests, strict=True):
            if self._refs[block] == 0:
                raise AssertionError(f"block {block} is published by nobody")
            if digest not in block_of and block not in hash_of:
                block_of[digest] = block
                hash_of[block] = digest
                news.append(digest)
        toggle(self._changed, news)

    def grow(self, holdings: Sequence[BlockTable]) -> None:
        """Append one fresh block to each of them, all or none. Raises NoRoom."""
        for holding, block in zip(holdings, self.take(len(holdings)), strict=True):
            holding.blocks.append(block)

    def take(self, count: int) -> list[int]:
        """``count`` fresh blocks with one reference each. Raises NoRoom. For ``BlockTable`` alone."""
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
        """One more reference on a block that is held or cached. For ``BlockTable`` alone."""
        if self._refs[block] == 0:
            del self._cached[block]
        self._refs[block] += 1

    def give_back(self, holding: BlockTable) -> None:
        """Drop a holding's references, its last blocks first, so that prefixes outlive what follows them."""
        del self._holdings[id(holding)]
        refs, hash_of = self._refs, self._hash_of
        for block in reversed(holding.blocks):
            refs[block] -= 1
            if refs[block] == 0:
                if block in hash_of:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def forget(self, digests: Iterable[BlockHash]) -> None:
        """Nobody finds these contents any more, unless somebody holds them."""
        for digest in digests:
            block = self._block_of.get(digest)
            if block is not None and block in self._cached:
                self._cached.move_to_end(block, last=False)
                self._free += self._evict(1)

    def drop_cache(self) -> int:
        """Forget every unheld published block; returns how many."""
        dropped = len(self._cached)
        self._free += self._evict(dropped)
        return dropped

    def _evict(self, count: int) -> list[int]:
        """Of the cached blocks, the ``count`` that were used least recently; they are nowhere now."""
        evicted = [self._cached.popitem(last=False)[0] for _ in range(count)]
        digests = [self._hash_of.pop(block) for block in evicted]
        for digest in digests:
            del self._block_of[digest]
        toggle(self._changed, digests)
        return evicted

    def changed(self) -> list[BlockHash]:
        """Hashes that are published now and were not at the last call, or the reverse; those published first come
        first. Never more than two for each block, however long ago that call was."""
        changed, self._changed = self._changed, {}
        return list(changed)

    def held_by(self) -> dict[str, list[int]]:
        """Blocks of each owner, from the live holdings (an owner with several holdings has them joined)."""
        owners: dict[str, list[int]] = {}
        for holding in self._holdings.values():
            owners.setdefault(holding.owner, []).extend(holding.blocks)
        return owners

    def check_integrity(self, live_owners: Iterable[str]) -> None:
        """Count everything again from the holdings. Raises AssertionError with what does not add up."""
        counted = [0] * self.num_blocks
        for holding in self._holdings.values():
            _require(holding.live, f"{holding.owner} was released and is still listed")
            _require(len(set(holding.blocks)) == len(holding.blocks), f"{holding.owner} lists a block twice")
            for block in holding.blocks:
                counted[block] += 1
        _require(counted == self._refs, "reference counts differ from the live holdings")
        dead = set(self.held_by()) - set(live_owners)
        _require(not dead, f"blocks are held for {sorted(dead)}, which are not alive")
        free, cached = set(self._free), set(self._cached)
        held = {block for block, refs in enumerate(counted) if refs}
        _require(len(free) == len(self._free), "a block is free twice")
        _require(not (free & cached or free & held or cached & held), "a block is in two places")
        _require(len(free) + len(cached) + len(held) == self.num_blocks, "a block is nowhere")
        _require(cached <= set(self._hash_of), "a cached block has no hash")
        _require(not free & set(self._hash_of), "a free block has a hash")
        _require({b: h for h, b in self._block_of.items()} == self._hash_of, "hashes and blocks disagree")


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)
