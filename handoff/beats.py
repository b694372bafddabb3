"""Beats: each end of a fetch says four times a second that it lives, whatever its engine is doing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from handoff.errors import HandoffFailed
from protos import worker_pb2 as wire

BEAT_SECONDS = 0.25
SUSPECT_SECONDS = 1.0
"""A peer that is silent for so long is taken for lost."""

T = TypeVar("T")


async def beating(send: Callable[[], Awaitable[None]]) -> None:
    """Call ``send`` every BEAT_SECONDS until cancelled."""
    while True:
        await asyncio.sleep(BEAT_SECONDS)
        await send()


async def heard(messages: AsyncIterator[T], who: str, seconds: float = SUSPECT_SECONDS) -> AsyncIterator[T]:
    """The messages of a peer that beats. Raises HandoffFailed (PEER_LOST) after ``seconds`` of silence."""
    while True:
        try:
            async with asyncio.timeout(seconds):  # wait_for may lose a cancellation that comes with a message
                message = await anext(messages)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise HandoffFailed(wire.CAUSE_PEER_LOST, f"{who} was silent for {seconds:g} s") from None
        yield message
