from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

PATIENCE = 60.0
"""Seconds that a test waits for an event."""


async def eventually(reached: Callable[[], Any]) -> None:
    """Polls; ``reached`` may return a coroutine."""
    async with asyncio.timeout(PATIENCE):
        while True:
            result = reached()
            if await result if asyncio.iscoroutine(result) else result:
                return
            await asyncio.sleep(0.02)
