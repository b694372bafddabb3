"""Connections to Redis, kept while they lead to a primary.

After a failover behind one address, an open connection leads to the former primary, which refuses writes and serves old
data, and only a new connection reaches the primary. So one refusal of that kind replaces all connections that are open,
and each is replaced after MAX_AGE_S.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from weakref import WeakKeyDictionary

from redis import exceptions
from redis.asyncio import BlockingConnectionPool
from redis.asyncio.connection import AbstractConnection, parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from decant.state.cluster import SlotPrimary
from decant.state.primary import PrimaryAddress, connection_options
from decant.state.sentinel import SentinelPrimary
from decant.state.urls import is_of_cluster, is_of_sentinels, parse_cluster_url, parse_sentinel_url

MAX_AGE_S = 30.0
"""An older connection is replaced before its next use: its server may have been replaced without an error."""

FORMER_PRIMARY = frozenset({"READONLY", "LOADING", "MASTERDOWN", "CLUSTERDOWN", "UNBLOCKED"})
"""Error codes of a server that is no primary now, or not yet; UNBLOCKED ends a blocking read when it becomes none."""
_CODE = re.compile(r"-?([A-Z]+) ")
_WRAPPED_CODE = re.compile(r"Error running script .*?: -([A-Z]+) ", re.DOTALL)


def error_code(error: BaseException) -> str:
    """Return the code of an error reply, such as OOM; "" for another error. Redis before 7 wraps errors of scripts."""
    if not isinstance(error, exceptions.RedisError):
        return ""
    code = error.status_code or ""
    if code in ("", "ERR") and (found := _WRAPPED_CODE.match(str(error)) or _CODE.match(str(error))):
        return found[1]
    return code


class ConnectionAges:
    """Which connections of a process may still be used; shared by its pools."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._opened = WeakKeyDictionary[AbstractConnection, tuple[int, float]]()
        self._generation = 0

    def record(self, connection: AbstractConnection) -> None:
        self._opened[connection] = self._generation, self._clock()

    def replace_all(self) -> None:
        self._generation += 1

    def is_outdated(self, connection: AbstractConnection) -> bool:
        if connection not in self._opened:
            return False  # it was never open
        generation, opened_at = self._opened[connection]
        return generation != self._generation or self._clock() - opened_at > MAX_AGE_S


class ConnectionPool(BlockingConnectionPool):
    """Pool that waits for a free connection without a limit of its own."""

    ages: ConnectionAges
    primary: PrimaryAddress | None

    @classmethod
    def of_url(cls, url: str, key_prefix: str, max_connections: int, ages: ConnectionAges) -> ConnectionPool:
        primary: PrimaryAddress | None = None
        if is_of_sentinels(url):
            sentinels = parse_sentinel_url(url)
            primary = SentinelPrimary(sentinels, ages.replace_all)
            options = connection_options(sentinels.connection, primary)
        elif is_of_cluster(url):
            nodes = parse_cluster_url(url)
            primary = SlotPrimary(nodes, key_prefix, ages.replace_all)
            options = connection_options(nodes.connection, primary)
        else:
            options = dict(parse_url(url))
        pool = cls(
            max_connections=max_connections,
            timeout=None,
            protocol=2,
            socket_timeout=None,
            socket_connect_timeout=None,
            # uvloop raises RuntimeError for a write to a connection that was reset while it was idle
            retry=Retry(NoBackoff(), 1, supported_errors=(exceptions.ConnectionError, RuntimeError)),  # type: ignore[arg-type]
            **options,
        )
        pool.ages, pool.primary = ages, primary
        return pool

    async def close(self) -> None:
        await self.disconnect()
        if self.primary is not None:
            await self.primary.close()

    def make_connection(self) -> AbstractConnection:
        connection: AbstractConnection = super().make_connection()  # type: ignore[no-untyped-call]
        connection.register_connect_callback(self.ages.record)  # type: ignore[no-untyped-call]
        return connection

    async def ensure_connection(self, connection: AbstractConnection) -> None:
        if self.ages.is_outdated(connection):
            await connection.disconnect(nowait=True)
        await super().ensure_connection(connection)
