"""Ended requests that Redis keeps: an index by time with their bytes, from which routers delete the oldest.

An entry is written after its result, and removed after it. If a router ends in between, an entry without a result is
removed by the next `trim`, and a result without an entry expires as every result does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from decant.state import keys, scripts
from decant.state.client import Client
from decant.state.errors import StateError
from decant.state.ids import RequestKey
from decant.state.keys import Ttls
from decant.state.scripts import Argument, Command

BATCH = 100  # results in one command
ENTRY_BYTES = 400
"""Memory of an entry and of its result's lifetimes, beside the bytes of the result's keys: measured with Redis 6.2."""


@dataclass(frozen=True)
class StoreMemory:
    used: int  # bytes
    maximum: int  # bytes; 0: no limit
    policy: str  # what Redis evicts when it is full, as maxmemory-policy

    @property
    def evicts(self) -> bool:
        """Whether a full Redis deletes keys: all of Decant's but one have a lifetime, so any policy takes them."""
        return self.maximum > 0 and self.policy != "noeviction"


@dataclass(frozen=True)
class RetainedResults:
    """Results of all routers."""

    bytes: int = 0
    count: int = 0
    oldest_s: float = 0.0  # time since the end of the oldest; 0: there is none
    discarded: int = 0  # by this call


class Results:
    """Ended requests that the store keeps for readers, and the limit of their memory, beyond which the oldest go."""

    def __init__(self, client: Client, ttls: Ttls) -> None:
        self._client = client
        self._ended_ms = round(ttls.ended_s * 1000)
        self._bytes = 0  # of all results, by the last reply
        self._additions = 0
        self._changed = asyncio.Event()

    async def add(self, sizes: Mapping[RequestKey, int], then: Sequence[Command] = ()) -> None:
        """Add ended requests with the bytes of their keys, and run `then` in the same round trip."""
        adds = [self._add_command(batch) for batch in _batches(list(sizes.items()))]
        replies = await self._client.run_all([*adds, *then])
        if adds:
            self._bytes = replies[len(adds) - 1]
            self._additions += 1
            self._changed.set()

    async def wait_above(self, max_bytes: int) -> None:
        """Wait until an addition leaves more than `max_bytes`."""
        while self._bytes <= max_bytes:
            self._changed.clear()
            await self._changed.wait()

    async def trim(self, max_bytes: int) -> RetainedResults:
        """Delete the oldest results until the others have at most `max_bytes`. Redis may be full."""
        discarded = 0
        while True:
            oldest = scripts.RESULTS_OLDEST.call(list(keys.RESULTS), self._ended_ms, max_bytes, BATCH)
            additions = self._additions
            counted, count, age_ms, *names = await self._client.run(oldest)
            if additions == self._additions:  # else what was added meanwhile may not be counted
                self._bytes = counted
            if not names:
                return RetainedResults(counted, count, age_ms / 1000, discarded)
            discarded += await self._discard([name.decode() for name in names])

    async def memory(self) -> StoreMemory:
        info = await self._client.execute("INFO", "memory")
        return StoreMemory(info["used_memory"], info["maxmemory"], info["maxmemory_policy"])

    async def _discard(self, names: Sequence[str]) -> int:
        """Delete results, then their entries; an unreadable one keeps its keys until they expire."""
        discards = [scripts.REQUEST_DISCARD.call(keys.of_request(RequestKey.parse(name))) for name in names]
        remove = scripts.RESULTS_REMOVE.call(list(keys.RESULTS), *names)
        *discarded, removed = await self._client.try_all([*discards, remove])
        if isinstance(removed, StateError):
            raise removed
        return sum(reply for reply in discarded if isinstance(reply, int))

    def _add_command(self, batch: Sequence[tuple[RequestKey, int]]) -> Command:
        sizes: list[Argument] = []
        for key, size in batch:
            sizes += (str(key), size + ENTRY_BYTES)
        return scripts.RESULTS_ADD.call(list(keys.RESULTS), self._ended_ms, *sizes)


def _batches(sizes: Sequence[tuple[RequestKey, int]]) -> list[Sequence[tuple[RequestKey, int]]]:
    return [sizes[start : start + BATCH] for start in range(0, len(sizes), BATCH)]
