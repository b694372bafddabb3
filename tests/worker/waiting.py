"""Waiting for a condition that has no event."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

PATIENCE = 60.0
"""Seconds that a test waits for an event; machines may be very busy."""


async def eventually(reached: Callable[[], Any]) -> None:
    """Poll a condition, which may be a coroutine."""
    async with asyncio.timeout(PATIENCE):
        while True:
            result = reached()
            if await result if asyncio.iscoroutine(result) else result:
                return
            await asyncio.sleep(0.02)
