from __future__ import annotations

import asyncio
import time

import pytest

from decant.runtime.connections.heartbeat import (
    HEARTBEAT_SECONDS,
    SILENT_SECONDS,
    SUSPECT_SECONDS,
    HeartbeatMonitor,
    LoopTimer,
    loop_timeout,
)


@pytest.mark.parametrize("tick_seconds", [HEARTBEAT_SECONDS, 0.0625])
def test_a_peer_is_suspect_and_then_lost_by_ticks_since_its_last_message(tick_seconds: float) -> None:
    monitor = HeartbeatMonitor() if tick_seconds == HEARTBEAT_SECONDS else HeartbeatMonitor(tick_seconds)
    seen = []
    for _ in range(round(SILENT_SECONDS / tick_seconds) + 1):
        seen.append((monitor.is_suspect, monitor.is_lost))
        monitor.tick()
    assert seen.index((True, False)) == SUSPECT_SECONDS / tick_seconds
    assert seen.index((True, True)) == SILENT_SECONDS / tick_seconds
    monitor.reset()
    assert not monitor.is_suspect


@pytest.mark.rule("stall-counts-as-one-tick", "runtime/connections/heartbeat.py:LoopTimer")
@pytest.mark.slow
async def test_a_stall_of_the_loop_counts_as_one_tick_of_a_timeout() -> None:
    loop = asyncio.get_running_loop()
    async with loop_timeout(0.5):
        loop.call_later(0.01, time.sleep, 0.8)
        await asyncio.sleep(0.02)
    with pytest.raises(TimeoutError):
        async with loop_timeout(0.05):
            await asyncio.sleep(3600)


@pytest.mark.slow
async def test_a_stall_of_the_loop_counts_as_one_tick_of_a_timer() -> None:
    loop, called = asyncio.get_running_loop(), asyncio.Event()
    timer = LoopTimer(0.5, called.set)
    time.sleep(0.8)  # noqa: ASYNC251 - the stall
    for _ in range(3):
        await asyncio.sleep(0)
    assert not called.is_set()
    await asyncio.wait_for(called.wait(), 60)
    timer.cancel()
    again = LoopTimer(0.01, lambda: loop.call_soon(pytest.fail, "it was cancelled"))
    again.cancel()
    await asyncio.sleep(0.05)


async def test_a_timeout_lets_the_cancellation_of_its_task_through() -> None:
    async def waits() -> None:
        async with loop_timeout(60):
            await asyncio.sleep(3600)

    task = asyncio.create_task(waits())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
