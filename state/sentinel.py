"""The primary behind sentinels: each new connection goes to the one that they name then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelManagedConnection, SentinelManagedSSLConnection
from redis.backoff import NoBackoff

from decant.state.urls import SentinelUrl

SENTINEL_SECONDS = 0.3
"""Time for a sentinel to answer before the next one is called: a command to Redis has about one second in all."""


class PrimaryAddress:
    """The primary's address, as redis-py's connections want it: in the place of the pool that it has for sentinels."""

    is_master = True
    check_connection = False

    def __init__(self, url: SentinelUrl, on_change: Callable[[], None]) -> None:
        options = {**url.sentinel, "socket_timeout": SENTINEL_SECONDS, "socket_connect_timeout": SENTINEL_SECONDS}
        retry = Retry(NoBackoff(), 1)  # a sentinel may have closed an idle connection
        self._sentinel = Sentinel(url.addresses, sentinel_kwargs={**options, "retry": retry})  # type: ignore[no-untyped-call]
        self._service = url.service
        self._on_change = on_change
        self._known: tuple[str, int] | None = None

    async def get_master_address(self) -> tuple[str, int]:
        """Raises redis.ConnectionError if no sentinel names one."""
        address: tuple[str, int] = await self._sentinel.discover_master(self._service)
        if self._known not in (None, address):
            self._on_change()
        self._known = address
        return address

    async def close(self) -> None:
        await self._sentinel.aclose()


def connection_options(url: SentinelUrl, primary: PrimaryAddress) -> dict[str, Any]:
    options = dict(url.connection)
    kind: type[AbstractConnection] = SentinelManagedSSLConnection if options.pop("ssl") else SentinelManagedConnection
    return {**options, "connection_class": kind, "connection_pool": primary}
