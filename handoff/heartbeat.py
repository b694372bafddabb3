from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import TypeVar

from decant.handoff.errors import HandoffFailed
from decant.protos import worker_pb2 as wire
from decant.runtime.connections.heartbeat import loop_timeout

T = TypeVar("T")


async def with_heartbeat_timeout(messages: AsyncIterator[T], peer: str, seconds: float) -> AsyncGenerator[T, None]:
    while True:
        try:
            async with loop_timeout(seconds):  # wait_for may lose a cancellation that comes with a message
                message = await anext(messages, None)
        except TimeoutError:
            raise HandoffFailed(wire.CAUSE_PEER_LOST, f"{peer} was silent for {seconds:g} s") from None
        if message is None:
            return
        yield message
