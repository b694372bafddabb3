from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

PATIENCE = 60.0
"""Seconds that a test waits for an event."""


async def eventually(reached: Callable[[], Any]) -> None:
    """Poll until ``reached``, which may return a coroutine, is true."""
    async with asyncio.timeout(PATIENCE):
        while True:
            result = reached()
            if await result if asyncio.iscoroutine(result) else result:
                return
            await asyncio.sleep(0.02)


def advance(seconds: float) -> None:
    """Advance the event loop's clock: what is due by then runs in the next turn, however long the test took before."""
    loop = asyncio.get_running_loop()
    clock = loop.time
    loop.time = lambda: clock() + seconds  # type: ignore[method-assign]
