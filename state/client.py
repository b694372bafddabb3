"""Client of Redis with deadlines and reconnection. Loads missing scripts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, TypeAlias

from redis import exceptions
from redis.asyncio import Redis

from decant.state.connections import FORMER_PRIMARY, ConnectionAges, ConnectionPool, error_code
from decant.state.errors import StateError, StoreFault, StoreUnavailable
from decant.state.scripts import Argument, Command
from decant.state.urls import is_of_cluster, split_key_prefix

# bytes, an integer, None, or a list of these; see each script
Reply: TypeAlias = Any

_UNAVAILABLE = (exceptions.ConnectionError, exceptions.TimeoutError)
_UNAVAILABLE_CODES = FORMER_PRIMARY | {"BUSY", "MISCONF", "NOREPLICAS", "NOSCRIPT", "OOM", "TRYAGAIN"}
"""Error codes of a server that can't write now, or lost its scripts twice."""
_CLUSTER_CODES = frozenset({"MOVED", "ASK", "CROSSSLOT"})
"""Error codes of a node of a Cluster that has not all keys of a command."""
_SLOT_MOVES = frozenset({"MOVED", "ASK"})
"""Those that pass: another node has the slot now, or is about to."""
_REFUSED = (
    exceptions.AuthenticationError,
    exceptions.AuthorizationError,
)  # ConnectionErrors that no retry cures


class Client:
    """Commands to one Redis, with a deadline for each and errors of `state.errors` alone.

    `Store` makes one for writes and one for reads; every other class of this package sends its commands by it.
    """

    def __init__(self, url: str, deadline_s: float, max_connections: int, ages: ConnectionAges | None = None) -> None:
        """Make a client; `deadline_s` of a call includes the wait for a connection; clients of a store share `ages`."""
        url, self._prefix = split_key_prefix(url)
        self._deadline_s = deadline_s
        self._ages = ages or ConnectionAges()
        self._is_of_cluster = is_of_cluster(url)
        self._pool = ConnectionPool.of_url(url, self._prefix, max_connections, self._ages)
        self._redis = Redis.from_pool(self._pool)

    async def execute(self, *args: Argument) -> Reply:
        return await self.run(Command(args))

    async def run(self, command: Command) -> Reply:
        (reply,) = await self.run_all([command])
        return reply

    async def run_all(self, commands: Sequence[Command]) -> list[Reply]:
        """Run commands in order, in one round trip. Raises the first error; other commands may have run."""
        replies = await self.try_all(commands)
        for reply in replies:
            if isinstance(reply, StateError):
                raise reply
        return replies

    async def try_all(self, commands: Sequence[Command], deadlines: float = 1.0) -> list[Reply]:
        """Run commands in order; the reply to a failed one is its StoreFault or StoreUnavailable.

        `deadlines` multiplies the deadline, for large commands. Raises StoreUnavailable without any reply, StoreFault
        if the connection is refused.
        """
        return await self._within(deadlines * self._deadline_s, commands) if commands else []

    async def wait_for_entry(self, stream: str, after: bytes, timeout_s: float) -> None:
        """Wait at most `timeout_s` for an entry, and occupy a connection meanwhile."""
        block_ms = max(1, round(timeout_s * 1000))
        command = Command(("XREAD", "COUNT", 1, "BLOCK", block_ms, "STREAMS", stream, after), keys=(6, 7))
        (reply,) = await self._within(timeout_s + self._deadline_s, [command])
        if isinstance(reply, StateError):
            raise reply

    async def close(self) -> None:
        await self._redis.aclose()
        await self._pool.close()

    async def _within(self, deadline_s: float, commands: Sequence[Command]) -> list[Reply]:
        try:
            async with asyncio.timeout(deadline_s):
                replies = await self._send(commands)
                if any(isinstance(reply, exceptions.NoScriptError) for reply in replies):
                    await self._load(commands)
                    replies = await self._send(commands)
        except Exception as error:  # whatever the library raises is a fault of this border
            raise self._translate(error, deadline_s) from error
        return [self._translate(reply, deadline_s) if isinstance(reply, Exception) else reply for reply in replies]

    def _translate(self, error: Exception, deadline_s: float) -> StoreUnavailable | StoreFault:
        code = error_code(error)
        if code in FORMER_PRIMARY:
            self._ages.replace_all()
        if code in _CLUSTER_CODES and not self._is_of_cluster:
            return StoreFault(f"a node of a Redis Cluster needs a redis+cluster:// URL: {error}")
        if code in _SLOT_MOVES:
            self._ages.replace_all()
            return StoreUnavailable(str(error))
        if _is_permanent(error, code):
            return StoreFault(str(error))
        if isinstance(error, TimeoutError):
            return StoreUnavailable(f"no answer within {deadline_s:g} s")
        return StoreUnavailable(str(error) or type(error).__name__)

    async def _send(self, commands: Sequence[Command]) -> list[Reply]:
        pipeline = self._redis.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command.with_prefix(self._prefix))
        return await pipeline.execute(raise_on_error=False)

    async def _load(self, commands: Sequence[Command]) -> None:
        texts = {command.script.text for command in commands if command.script}
        for reply in await self._send([Command(("SCRIPT", "LOAD", text)) for text in texts]):
            if isinstance(reply, Exception):
                raise reply


def _is_permanent(error: Exception, code: str) -> bool:
    if isinstance(error, _REFUSED) or isinstance(error.__cause__, _REFUSED):  # wrapped while connecting
        return True
    return (
        isinstance(error, exceptions.RedisError)
        and not isinstance(error, _UNAVAILABLE)
        and code not in _UNAVAILABLE_CODES
    )
