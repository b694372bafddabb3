"""The primary behind sentinels."""

from __future__ import annotations

from collections.abc import Callable

from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff

from decant.state.primary import DISCOVERY_SECONDS, Address, PrimaryAddress
from decant.state.urls import SentinelUrl


class SentinelPrimary(PrimaryAddress):
    def __init__(self, url: SentinelUrl, on_change: Callable[[], None]) -> None:
        super().__init__(on_change)
        options = {**url.sentinel, "socket_timeout": DISCOVERY_SECONDS, "socket_connect_timeout": DISCOVERY_SECONDS}
        retry = Retry(NoBackoff(), 1)  # a sentinel may have closed an idle connection
        self._sentinel = Sentinel(url.addresses, sentinel_kwargs={**options, "retry": retry})  # type: ignore[no-untyped-call]
        self._service = url.service

    async def discover(self) -> Address:
        address: Address = await self._sentinel.discover_master(self._service)
        return address

    async def close(self) -> None:
        await self._sentinel.aclose()
