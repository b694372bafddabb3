"""Hashes of a prompt's blocks, and which of them each worker has in its prefix cache.

    prompt     | block 0 | block 1 | block 2 |    hash: see ``PrefixCacheUpdate`` in worker.proto
    holders    |  0b01   |  0b01   |  0b10   |    worker 0 has two leading blocks, worker 1 none

Blocks just sent to a worker count before it reports them.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import takewhile

from decant.engine.block_hashes import REPORTED_BYTES, BlockHash, cache_salt, hash_blocks, root_hash
from decant.protos import worker_pb2 as wire
from decant.runtime import packed

MAX_INLINE_TOKENS = 8192
"""Longer prompts are hashed in a thread."""
HEARTBEATS_UNTIL_REPORTED = 2
"""The first heartbeat after a request's end may hold an older report."""


def reported_hashes(prompt: bytes, salt: bytes, block_size: int) -> array[int]:
    return _reported(hash_blocks(root_hash(salt), packed.unpack(prompt), block_size))


def _reported(hashes: Iterable[BlockHash]) -> array[int]:
    return array("Q", b"".join([block_hash[:REPORTED_BYTES] for block_hash in hashes]))


class PromptBlocks:
    """Block hashes of one prompt, computed once for each block size, to find workers that have its prefix cached."""

    def __init__(self, request: wire.EngineRequest) -> None:
        self._request = request
        self._hashes: dict[int, array[int]] = {}
        self._last: dict[int, BlockHash] = {}  # whole hash of the last block, or what comes before the first
        self.is_shared = not request.bypass_prefix_cache
        self._max_cached = self._max_cached_tokens() if self.is_shared else 0
        self.may_hit = self._max_cached > 0

    def _max_cached_tokens(self) -> int:
        """Leading tokens that a prefix cache may serve: of the others logits or hidden states are wanted."""
        request = self._request
        if request.embedding.pooling == wire.Embedding.POOLING_MEAN:
            return 0
        if request.HasField("prompt_logprobs"):
            return max(1, request.prompt_logprobs_from) - 1
        return packed.count(request.prompt) - 1

    async def prepare(self, block_size: int) -> None:
        if self.is_shared and packed.count(self._request.prompt) > MAX_INLINE_TOKENS:
            await asyncio.to_thread(self.hashes, block_size)

    def hashes(self, block_size: int) -> Sequence[int]:
        if not self.is_shared:
            return ()
        hashes = self._hashes.get(block_size)
        if hashes is None:
            root = root_hash(cache_salt(self._request.salt, self._request.adapter))
            whole = hash_blocks(root, packed.unpack(self._request.prompt), block_size)
            self._last[block_size] = whole[-1] if whole else root
            hashes = self._hashes[block_size] = _reported(whole)
        return hashes

    @property
    def block_sizes(self) -> Collection[int]:
        """Sizes of blocks for which it has hashes; ``prepare`` may be adding another one in its thread."""
        return tuple(self._hashes)

    def hashes_after(self, block_size: int, output: Iterable[int]) -> Sequence[int]:
        """Hashes of the blocks behind the last whole block of the prompt, with the output tokens after it."""
        if not self.is_shared:
            return ()
        rest = packed.unpack(self._request.prompt)[len(self.hashes(block_size)) * block_size :]
        rest.extend(output)
        return _reported(hash_blocks(self._last[block_size], rest, block_size))

    def cached_tokens(self, cache: WorkerPrefixCache, block_size: int) -> int:
        """Prompt tokens in ``cache``, never all: the last token is computed for its logits."""
        if not self.may_hit:
            return 0
        max_blocks = self._max_cached // block_size
        return min(cache.count_leading(self.hashes(block_size)), max_blocks) * block_size

    def cached_by_worker(self, index: PrefixIndex) -> dict[int, int]:
        cached: dict[int, int] = {}
        if self.may_hit:
            for block_size in index.block_sizes:
                max_blocks = self._max_cached // block_size
                leading = index.count_leading(self.hashes(block_size)[:max_blocks])
                cached.update((worker, blocks * block_size) for worker, blocks in leading.items())
        return cached


OnReported = Callable[[int, Iterable[int], Iterable[int]], None]
"""Takes the number of a worker, and the hashes of blocks that it has reported to have, and to have no longer."""


def _ignore_report(worker: int, published: Iterable[int], dropped: Iterable[int]) -> None:
    pass


class PrefixIndex:
    """Which workers have which blocks in their prefix caches, by the hash of the block's tokens.

    The membership owns one for each model, and each worker's load writes its own bit. Placement looks up a prompt once
    for all workers.
    """

    def __init__(self) -> None:
        self.block_sizes = Counter[int]()
        self.on_reported: OnReported = _ignore_report
        """Called with what workers report. A worker that is closed has all its blocks no longer, also expected ones."""
        self._holders: dict[int, int] = {}  # bit n: worker n has the block
        self._free: list[int] = []
        self._workers = 0

    def add_worker(self, block_size: int) -> int:
        """Return the number of a new worker; remove its blocks before ``remove_worker``."""
        self.block_sizes[block_size] += 1
        if self._free:
            return self._free.pop()
        self._workers += 1
        return self._workers - 1

    def remove_worker(self, worker: int, block_size: int) -> None:
        self.block_sizes -= Counter((block_size,))
        self._free.append(worker)

    def add(self, worker: int, hashes: Iterable[int]) -> None:
        holders, bit = self._holders, 1 << worker
        for block_hash in hashes:
            holders[block_hash] = holders.get(block_hash, 0) | bit

    def remove(self, worker: int, hashes: Iterable[int]) -> None:
        holders, others = self._holders, ~(1 << worker)
        for block_hash in hashes:
            remaining = holders.pop(block_hash, 0) & others
            if remaining:
                holders[block_hash] = remaining

    def count_leading(self, hashes: Sequence[int]) -> dict[int, int]:
        counts: dict[int, int] = {}
        workers, number = (self._holders.get(hashes[0], 0) if hashes else 0), 0
        while workers:
            number += 1
            workers_of_next = workers & self._holders.get(hashes[number], 0) if number < len(hashes) else 0
            if workers_of_next != workers:
                counts.update(dict.fromkeys(_bits(workers ^ workers_of_next), number))
                workers = workers_of_next
        return counts


def _bits(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


class ExpectedBlocks:
    def __init__(self, cache: WorkerPrefixCache, hashes: Sequence[int]) -> None:
        self.hashes = hashes
        self._cache = cache

    def release(self) -> None:
        """Forget the blocks that the worker does not report in the next two heartbeats."""
        self._cache.expiring.append((HEARTBEATS_UNTIL_REPORTED, self))


class WorkerPrefixCache:
    def __init__(self, index: PrefixIndex | None = None, worker: int = 0) -> None:
        self._index = index or PrefixIndex()
        self._worker = worker
        self.expiring: list[tuple[int, ExpectedBlocks]] = []
        """Heartbeats left, and what is then forgotten."""
        self._cached: set[int] = set()  # reported and expected
        self._expected: dict[int, ExpectedBlocks] = {}  # not reported yet: the newest request with it

    def count_leading(self, hashes: Sequence[int]) -> int:
        return len(list(takewhile(self._cached.__contains__, hashes)))

    def expect(self, hashes: Sequence[int]) -> ExpectedBlocks:
        """Count blocks as cached; ``release`` the result when the request has left."""
        expected = ExpectedBlocks(self, hashes)
        new = [block_hash for block_hash in hashes if block_hash not in self._cached or block_hash in self._expected]
        self._cached.update(new)
        self._index.add(self._worker, new)
        self._expected.update(dict.fromkeys(new, expected))
        return expected

    def apply_heartbeat(self, heartbeat: wire.Heartbeat) -> None:
        published, dropped = (array("Q", hashes) for hashes in (heartbeat.cache.published, heartbeat.cache.dropped))
        self._cached.update(published)
        self._cached.difference_update(dropped)
        self._index.add(self._worker, published)
        self._index.remove(self._worker, dropped)
        self._index.on_reported(self._worker, published, dropped)
        if self._expected:
            for block_hash in (*published, *dropped):
                self._expected.pop(block_hash, None)
        if self.expiring:
            self._forget_expired()

    def close(self) -> None:
        self._index.remove(self._worker, self._cached)
        self._index.on_reported(self._worker, (), self._cached)
        self._index = PrefixIndex()

    def _forget_expired(self) -> None:
        expiring, self.expiring = self.expiring, []
        for heartbeats, expected in expiring:
            if heartbeats > 1:
                self.expiring.append((heartbeats - 1, expected))
                continue
            for block_hash in expected.hashes:
                if self._expected.get(block_hash) is expected:
                    del self._expected[block_hash]
                    self._cached.discard(block_hash)
                    self._index.remove(self._worker, (block_hash,))
