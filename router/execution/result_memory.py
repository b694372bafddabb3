"""Limit of the memory of results in Redis: a full Redis would lose registrations of workers first, as these expire."""

from __future__ import annotations

import asyncio

from decant.runtime.telemetry import logs
from decant.runtime.telemetry.metrics import ResultMetrics
from decant.state.errors import StateError, StoreFault, StoreUnavailable
from decant.state.results import Results, StoreMemory

DEFAULT_BYTES = 256 << 20
"""Where Redis has no limit of its own."""
DEFAULT_SHARE = 1 / 2
MAX_SHARE = 3 / 4
"""Of Redis' maxmemory: the rest is for running requests, registrations, quotas and connections."""

_log = logs.get(__name__)


def choose_max_bytes(setting: int | None, memory: StoreMemory | None) -> int:
    if memory is None or not memory.maximum:
        return setting or DEFAULT_BYTES
    if setting is None:
        return int(memory.maximum * DEFAULT_SHARE)
    return min(setting, int(memory.maximum * MAX_SHARE))


class ResultMemory:
    """Deletes the oldest results of all routers, at once when one is written and every `check_s` seconds.

    `max_bytes` None: chosen by `choose_max_bytes`. Several routers may do this at the same time.
    """

    def __init__(
        self, results: Results, max_bytes: int | None, metrics: ResultMetrics, check_s: float, retry_s: float
    ) -> None:
        self._results = results
        self._setting = max_bytes
        self._metrics = metrics
        self._check_s = check_s
        self._retry_s = retry_s
        self._memory: StoreMemory | None = None
        self._warnings = frozenset[str]()

    async def run(self) -> None:
        clock = asyncio.get_running_loop().time
        check_at = clock()
        while True:
            try:
                if clock() >= check_at:
                    await self._check_memory()
                    check_at = clock() + self._check_s
                max_bytes = choose_max_bytes(self._setting, self._memory)
                await self._trim(max_bytes)
            except StateError:  # the registration logs that the store is unavailable
                await asyncio.sleep(self._retry_s)
                continue
            try:
                async with asyncio.timeout_at(check_at):
                    await self._results.wait_above(max_bytes)
            except TimeoutError:
                pass

    async def _trim(self, max_bytes: int) -> None:
        retained = await self._results.trim(max_bytes)
        metrics = self._metrics
        metrics.max_bytes.set(max_bytes)
        metrics.bytes.set(retained.bytes)
        metrics.count.set(retained.count)
        metrics.oldest.set(retained.oldest_s)
        metrics.discarded.inc(retained.discarded)

    async def _check_memory(self) -> None:
        try:
            self._memory = memory = await self._results.memory()
        except StoreUnavailable:
            raise
        except StoreFault as error:  # a managed Redis may refuse INFO
            self._warn({"the memory of Redis is unknown": {"error": str(error)}})
            return
        self._metrics.store_used.set(memory.used)
        self._metrics.store_max.set(memory.maximum)
        warnings: dict[str, dict[str, object]] = {}
        if memory.evicts:
            text = "a full Redis would evict registrations and running requests: set maxmemory-policy to noeviction"
            warnings[text] = {"maxmemory_policy": memory.policy}
        if self._setting and (max_bytes := choose_max_bytes(self._setting, memory)) < self._setting:
            text = "--result-memory is more than three quarters of Redis' maxmemory: results get those"
            sizes = {"result_memory": self._setting, "maxmemory": memory.maximum, "used_bytes": max_bytes}
            warnings[text] = dict(sizes)
        self._warn(warnings)

    def _warn(self, warnings: dict[str, dict[str, object]]) -> None:
        for text in warnings.keys() - self._warnings:
            _log.warning(text, **warnings[text])
        self._warnings = frozenset(warnings)
