"""What a prompt's blocks are called, and which of them a worker holds.

    prompt  | block 0 | block 1 | block 2 | ...        name: the first 8 bytes of a hash over all before it and itself
    held    |   x     |    x    |         |            2 blocks need not be computed there

A worker tells what its cache holds (``CacheNews`` in worker.proto, which also says how blocks are hashed). What this
router has sent there and will be held soon counts too, so that the next request of the same prefix follows at once.
"""

from __future__ import annotations

import asyncio
import hashlib
from array import array
from collections.abc import Sequence
from itertools import takewhile

from decant.protos import worker_pb2 as wire

LONG_PROMPT = 8192
"""Tokens that are hashed in a thread rather than on the event loop."""
BEATS_UNTIL_TOLD = 2
"""The first beat after the end of a request may tell of a look that was taken before it."""


def block_hashes(prompt: bytes, salt: bytes, block_tokens: int) -> array[int]:
    """Of the full blocks of a packed prompt, in order."""
    words = memoryview(array("Q", array("I", prompt))).cast("B")
    size = 8 * block_tokens
    digest = hashlib.blake2b(salt, digest_size=16, person=b"decant-kv").digest()
    names = bytearray()
    for start in range(0, len(words) - size + 1, size):
        digest = hashlib.blake2b(words[start : start + size], key=digest, digest_size=16).digest()
        names += digest[:8]
    return array("Q", bytes(names))


class PromptBlocks:
    """One request's prompt, as caches know it: hashed once for each size of block."""

    def __init__(self, work: wire.EngineRequest) -> None:
        self._work = work
        self._names: dict[int, array[int]] = {}
        self.is_shared = not work.bypass_prefix_cache
        """Whether others may find its blocks."""
        self.may_hit = self.is_shared and not work.HasField("prompt_logprobs")

    async def prepare(self, block_tokens: int) -> None:
        """Hash it now, in a thread if it is long, so that ``names`` keeps nobody waiting."""
        if self.is_shared and len(self._work.prompt) // 4 > LONG_PROMPT:
            await asyncio.to_thread(self.hashes, block_tokens)

    def hashes(self, block_tokens: int) -> Sequence[int]:
        """Of its full blocks; none where they are not shared."""
        if not self.is_shared:
            return ()
        names = self._names.get(block_tokens)
        if names is None:
            names = self._names[block_tokens] = block_hashes(self._work.prompt, self._work.salt, block_tokens)
        return names

    def cached_tokens(self, cache: WorkerPrefixCache, block_tokens: int) -> int:
        """Tokens that need not be computed where that cache is; never all: one is computed for its logits."""
        if not self.may_hit:
            return 0
        most = (len(self._work.prompt) // 4 - 1) // block_tokens
        return min(cache.leading(self.hashes(block_tokens)), most) * block_tokens


class ExpectedBlocks:
    """Blocks of one request that a worker is to hold soon."""

    def __init__(self, cache: WorkerPrefixCache, names: Sequence[int]) -> None:
        self.names = names
        self._cache = cache

    def release(self) -> None:
        """The request is no longer there: what was not told by now will be within two beats, or it never comes."""
        self._cache.leaving.append((BEATS_UNTIL_TOLD, self))


class WorkerPrefixCache:
    """What one worker's prefix cache holds, as far as is known here."""

    def __init__(self) -> None:
        self.leaving: list[tuple[int, ExpectedBlocks]] = []
        """Beats that are left, and what is forgotten after them."""
        self._held: set[int] = set()  # told, and expected
        self._expected: dict[int, ExpectedBlocks] = {}  # not told yet: by whom last

    def leading(self, names: Sequence[int]) -> int:
        """How many blocks it holds of a chain, counted from its start."""
        return len(list(takewhile(self._held.__contains__, names)))

    def expect(self, names: Sequence[int]) -> ExpectedBlocks:
        """A request with these blocks goes there; say ``over`` of it in the end."""
        expected = ExpectedBlocks(self, names)
        new = [name for name in names if name not in self._held or name in self._expected]
        self._held.update(new)
        self._expected.update(dict.fromkeys(new, expected))
        return expected

    def apply_heartbeat(self, beat: wire.Heartbeat) -> None:
        """The worker's own word."""
        published, dropped = (array("Q", told) for told in (beat.cache.published, beat.cache.dropped))
        self._held.update(published)
        self._held.difference_update(dropped)
        if self._expected:
            for name in (*published, *dropped):
                self._expected.pop(name, None)
        if self.leaving:
            self._forget()

    def _forget(self) -> None:
        leaving, self.leaving = self.leaving, []
        for beats, expected in leaving:
            if beats > 1:
                self.leaving.append((beats - 1, expected))
                continue
            for name in expected.names:
                if self._expected.get(name) is expected:
                    del self._expected[name]
                    self._held.discard(name)
