"""One way to ask Redis: within a deadline, reconnecting, scripts loaded when it lacks them.

A Redis that is away, starting, or a replica that may not be written is one error, StoreUnavailable. Asking twice is
right for every command of this package, so a connection that broke is tried again once, at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, TypeAlias

from redis import exceptions
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from decant.state.errors import StateError, StoreFault, StoreUnavailable
from decant.state.scripts import Argument, Command

# What Redis answers: bytes, an integer, None, or a list of these. The scripts say what theirs holds.
Reply: TypeAlias = Any

_AWAY = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.ReadOnlyError,
    exceptions.ClusterDownError,
    exceptions.TryAgainError,
    exceptions.OutOfMemoryError,
    OSError,  # TimeoutError is one
)
_AWAY_WORDS = ("BUSY ", "MISCONF ", "NOREPLICAS ")  # errors without a class: nothing can be written for now
_REFUSED = (exceptions.AuthenticationError, exceptions.AuthorizationError)  # ConnectionErrors that waiting won't cure


class Client:
    """A pool of connections to one Redis. Connects when first asked; `close` ends it."""

    def __init__(self, url: str, deadline_s: float, max_connections: int) -> None:
        """`deadline_s` bounds every call, waiting for a free connection included. Raises ValueError for the URL."""
        self._deadline_s = deadline_s
        self._pool = BlockingConnectionPool.from_url(
            url,
            max_connections=max_connections,
            timeout=None,
            protocol=2,
            socket_timeout=None,
            socket_connect_timeout=None,
            retry=Retry(NoBackoff(), 1, supported_errors=(exceptions.ConnectionError,)),
        )
        self._redis = Redis.from_pool(self._pool)

    async def execute(self, *words: Argument) -> Reply:
        """One plain command."""
        return await self.run(Command(words))

    async def run(self, command: Command) -> Reply:
        """One command in one round trip. Raises StoreUnavailable, StoreFault."""
        (reply,) = await self.run_all([command])
        return reply

    async def run_all(self, commands: Sequence[Command]) -> list[Reply]:
        """Several commands in one round trip, in this order, others' between them.

        Raises StoreUnavailable, StoreFault; some may have happened.
        """
        replies = await self.try_all(commands)
        for reply in replies:
            if isinstance(reply, StateError):
                raise reply
        return replies

    async def try_all(self, commands: Sequence[Command], deadlines: float = 1.0) -> list[Reply]:
        """`run_all` with an error in the place of each reply that is one: StoreFault, StoreUnavailable.

        `deadlines`: how many deadlines this may take, for more bytes than usual. Raises StoreUnavailable where no
        reply came, StoreFault where the connection was refused; some commands may have happened.
        """
        return await self._within(deadlines * self._deadline_s, commands) if commands else []

    async def wait_for_entry(self, stream: str, after: bytes, timeout_s: float) -> None:
        """Until the stream has an entry after that one, or the time is over. Holds a connection meanwhile."""
        block_ms = max(1, round(timeout_s * 1000))
        command = Command(("XREAD", "COUNT", 1, "BLOCK", block_ms, "STREAMS", stream, after))
        (reply,) = await self._within(timeout_s + self._deadline_s, [command])
        if isinstance(reply, StateError):
            raise reply

    async def close(self) -> None:
        await self._redis.aclose()
        await self._pool.disconnect()

    async def _within(self, deadline_s: float, commands: Sequence[Command]) -> list[Reply]:
        try:
            async with asyncio.timeout(deadline_s):
                replies = await self._send(commands)
                if any(isinstance(reply, exceptions.NoScriptError) for reply in replies):
                    await self._load(commands)
                    replies = await self._send(commands)
        except (exceptions.RedisError, OSError) as error:
            raise _told(error, deadline_s) from error
        return [_told(reply, deadline_s) if isinstance(reply, exceptions.RedisError) else reply for reply in replies]

    async def _send(self, commands: Sequence[Command]) -> list[Reply]:
        pipeline = self._redis.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command.words)
        return await pipeline.execute(raise_on_error=False)

    async def _load(self, commands: Sequence[Command]) -> None:
        """All of them again: which of them Redis lacks isn't worth finding out."""
        texts = {command.script.text for command in commands if command.script}
        await self._send([Command(("SCRIPT", "LOAD", text)) for text in texts])


def _told(error: Exception, deadline_s: float) -> StoreUnavailable | StoreFault:
    """What an error of Redis, or of the way to it, means to our callers."""
    refused = isinstance(error, _REFUSED) or isinstance(error.__cause__, _REFUSED)  # wrapped while connecting
    if (isinstance(error, _AWAY) or str(error).startswith(_AWAY_WORDS)) and not refused:
        return StoreUnavailable(str(error) or f"no answer within {deadline_s:g} s")
    return StoreFault(str(error))
