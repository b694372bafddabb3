from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from decant.handoff.leases import LeaseTable
    from decant.worker.decode.run_manager import DecodeRunManager

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


def expire(leases: LeaseTable) -> None:
    """End these leases as if their time were over; no other timer is affected."""
    for lease in leases.all():
        leases.expire(lease.ticket.id)


def expire_orphans(manager: DecodeRunManager) -> None:
    """Drop the runs that have no session, as if their lease were over; no other timer is affected."""
    for run in manager.runs:
        if run.owner.orphan_timer is not None:
            manager.executor.forget(run)
