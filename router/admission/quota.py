"""What tenants with limits have at work, booked in Redis for all routers together. Other tenants cost nothing.

    book --> held: renewed several times within its lease --release--> charged for what was used
      '--no room--> QuotaExceeded     '--forget--> another router's, or nobody's: the lease runs out

While Redis is away nobody is refused: what runs is held here, and counted by the first renewal that gets through.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress

from decant.runtime import logs
from decant.runtime.errors import QuotaExceeded
from decant.state import errors
from decant.state.errors import StateError
from decant.state.ids import RequestKey
from decant.state.quota import Quotas, QuotaUsage, TenantLimits

_log = logs.get(__name__)


class QuotaLeases:
    """Those of one router. `limits` by tenant. Only `run` writes renewals and releases, so that none overtakes another.
    Its owner runs it as a background task, and calls `close` after it."""

    def __init__(self, quotas: Quotas, limits: Mapping[str, TenantLimits]) -> None:
        self._quotas = quotas
        self._limits = limits
        self._held: set[RequestKey] = set()
        self._used: list[QuotaUsage] = []
        self._is_renewal_due = False
        self._something = asyncio.Event()

    async def book(self, key: RequestKey, tokens: int) -> None:
        """For a request that may use so many tokens, of prompt and answer. Raises QuotaExceeded."""
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
            return  # whether it may run without Redis is decided where it is recorded
        except asyncio.CancelledError:
            self._write_soon(QuotaUsage(key, 0, limits))  # perhaps it is booked
            raise
        if is_new:  # else another router runs it, or did
            self._held.add(key)

    @asynccontextmanager
    async def during(self, key: RequestKey) -> AsyncIterator[None]:
        """Books a call that uses no tokens, until the block ends. Its release is written by then, as far as Redis is
        there: the tenant's next call finds the place free. Raises QuotaExceeded."""
        await self.book(key, 0)
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
            _log.warning("a booking's release can't be written", error=str(error))
        except asyncio.CancelledError:
            self._write_soon(used)
            raise

    def hold(self, key: RequestKey) -> None:
        """It is at work here, whoever booked it."""
        if key.tenant in self._limits and key not in self._held:
            self._held.add(key)
            self._is_renewal_due = True
            self._something.set()

    def release(self, key: RequestKey, tokens: int) -> None:
        """It is over, and used so many tokens. Nothing happens for one that is not held here."""
        if key in self._held:
            self._held.remove(key)
            self._write_soon(QuotaUsage(key, tokens, self._limits[key.tenant]))

    def forget(self, key: RequestKey) -> None:
        """It goes on elsewhere."""
        self._held.discard(key)

    async def close(self) -> None:
        """Write once more, after `run` was cancelled."""
        await self._write()

    def _write_soon(self, used: QuotaUsage) -> None:
        self._used.append(used)
        self._something.set()

    async def run(self) -> None:
        """Releases as they come, renewals when they are due."""
        clock = asyncio.get_running_loop().time
        due = clock() + self._quotas.renew_every_s
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(due):
                    await self._something.wait()
            self._something.clear()
            if clock() >= due:
                self._is_renewal_due = True
                due = clock() + self._quotas.renew_every_s
            await self._write()

    async def _write(self) -> None:
        """What can't be written is left to its lease."""
        used, self._used = self._used, []
        renewed = list(self._held) if self._is_renewal_due else []
        self._is_renewal_due = False
        try:
            await self._quotas.release_all(used)
            await self._quotas.renew(renewed)
        except StateError as error:
            _log.warning("bookings can't be written", ended=len(used), error=str(error))
