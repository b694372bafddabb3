"""Address of a primary that changes: each new connection goes to the one that Redis names then."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from redis.asyncio.connection import AbstractConnection
from redis.asyncio.sentinel import SentinelManagedConnection, SentinelManagedSSLConnection

DISCOVERY_SECONDS = 0.3
"""Time for a server to name the primary before the next one is asked: a command has about one second in all."""

Address: TypeAlias = tuple[str, int]


class PrimaryAddress(ABC):
    """The primary's address, as redis-py's connections want it: in the place of the pool that it has for sentinels."""

    is_master = True
    check_connection = False

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._known: Address | None = None

    async def get_master_address(self) -> Address:
        """Raises redis.ConnectionError if no server names one."""
        address = await self.discover()
        if self._known not in (None, address):
            self._on_change()
        self._known = address
        return address

    @abstractmethod
    async def discover(self) -> Address: ...

    @abstractmethod
    async def close(self) -> None: ...


def connection_options(options: Mapping[str, Any], primary: PrimaryAddress) -> dict[str, Any]:
    """Options of connections to the primary; ``options`` has redis-py's, and whether there is TLS as ``ssl``."""
    own = dict(options)
    kind: type[AbstractConnection] = SentinelManagedSSLConnection if own.pop("ssl") else SentinelManagedConnection
    return {**own, "connection_class": kind, "connection_pool": primary}
