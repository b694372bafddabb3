"""Quotas of tenants with limits: leases in Redis, counted over all routers and charged for the tokens used."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress

from decant.runtime.errors import QuotaExceeded
from decant.runtime.telemetry import logs
from decant.state import errors
from decant.state.errors import StateError
from decant.state.ids import RequestKey
from decant.state.quota import Quotas, QuotaUsage, TenantLimits

_log = logs.get(__name__)


class QuotaLeases:
    """Leases of this router; `run` is a background task of the owner, and `close` writes once more after it."""

    def __init__(self, quotas: Quotas, limits: Mapping[str, TenantLimits]) -> None:
        self._quotas = quotas
        self._limits = limits
        self._held: set[RequestKey] = set()
        self._unwritten_releases: list[QuotaUsage] = []
        self._is_renewal_due = False
        self._has_work = asyncio.Event()

    async def acquire(self, key: RequestKey, tokens: int) -> None:
        """Acquire a lease if the tenant has limits and Redis is available. Raises QuotaExceeded."""
        limits = self._limits.get(key.tenant)
        if limits is None:
            return
        try:
            is_new = await self._quotas.acquire(key, tokens, limits)
        except errors.QuotaExceeded as error:
            raise QuotaExceeded(
                key.tenant, error.quota, error.limit, error.value, retry_after=error.retry_after_s
            ) from None
        except StateError:
            return  # recording the request decides whether it may run without Redis
        except asyncio.CancelledError:
            self._write_soon(QuotaUsage(key, 0, limits))  # Redis may have it
            raise
        if is_new:  # else another router has it, or had
            self._held.add(key)

    @asynccontextmanager
    async def lease(self, key: RequestKey) -> AsyncIterator[None]:
        """Hold a lease for a call without tokens; the release is written when the block ends. Raises QuotaExceeded."""
        await self.acquire(key, 0)
        try:
            yield
        finally:
            await self._release_now(key)

    async def _release_now(self, key: RequestKey) -> None:
        if key not in self._held:
            return
        self._held.remove(key)
        used = QuotaUsage(key, 0, self._limits[key.tenant])
        try:
            await self._quotas.release(*used)
        except StateError as error:
            _log.warning("a quota release can't be written", error=str(error))
        except asyncio.CancelledError:
            self._write_soon(used)
            raise

    def hold(self, key: RequestKey) -> None:
        if key.tenant in self._limits and key not in self._held:
            self._held.add(key)
            self._is_renewal_due = True
            self._has_work.set()

    def release(self, key: RequestKey, tokens: int) -> None:
        if key in self._held:
            self._held.remove(key)
            self._write_soon(QuotaUsage(key, tokens, self._limits[key.tenant]))

    def forget(self, key: RequestKey) -> None:
        self._held.discard(key)

    async def close(self) -> None:
        await self._write()

    def _write_soon(self, used: QuotaUsage) -> None:
        self._unwritten_releases.append(used)
        self._has_work.set()

    async def run(self) -> None:
        clock = asyncio.get_running_loop().time
        due = clock() + self._quotas.renew_every_s
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(due):
                    await self._has_work.wait()
            self._has_work.clear()
            if clock() >= due:
                self._is_renewal_due = True
                due = clock() + self._quotas.renew_every_s
            await self._write()

    async def _write(self) -> None:
        """Write renewals and releases once: what can't be written expires with its lease."""
        releases, self._unwritten_releases = self._unwritten_releases, []
        renewed = list(self._held) if self._is_renewal_due else []
        self._is_renewal_due = False
        try:
            await self._quotas.release_all(releases)
            await self._quotas.renew(renewed)
        except StateError as error:
            _log.warning("quota leases can't be written", ended=len(releases), error=str(error))
