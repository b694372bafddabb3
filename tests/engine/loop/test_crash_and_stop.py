from __future__ import annotations

import asyncio
import threading

from decant.engine.engine import Engine
from tests.engine.factories import make_request
from tests.engine.loop.harness import STEP_SECONDS, Harness, fails_as_stopped, running


async def test_a_crash_is_reported_once_and_fails_all_later_commands() -> None:
    harness = Harness()
    harness.device.crash_at = 3
    harness.loop.start()
    await harness.add(make_request())
    await harness.until(lambda: bool(harness.crashes))
    assert not harness.loop.is_healthy
    assert "the device is broken" in str(harness.crashes[0])
    assert isinstance(harness.crashes[0].__cause__, ZeroDivisionError)
    assert isinstance(await fails_as_stopped(lambda: harness.add(make_request("b"))), ZeroDivisionError)
    harness.loop.post(lambda engine: engine.cancel("a"))  # not needed any more, and no error
    await harness.loop.stop()
    assert len(harness.crashes) == 1
    assert harness.loop.step_age == 0.0


async def test_a_crash_answers_commands_that_ran_and_fails_pending_ones() -> None:
    harness = Harness()
    harness.device.crash_at = 1
    started, release, ran = threading.Event(), threading.Event(), list[str]()
    harness.loop.start()

    def block(engine: Engine) -> bool:
        engine.add(make_request())
        started.set()
        return release.wait(20)

    blocking = asyncio.create_task(harness.loop.call(block))
    assert await asyncio.to_thread(started.wait, 20)
    waiting = asyncio.create_task(harness.loop.call(lambda _: ran.append("waiting")))
    await asyncio.sleep(0.05)
    release.set()
    assert await asyncio.wait_for(blocking, 20)
    await fails_as_stopped(lambda: waiting)
    assert not ran
    await harness.loop.stop()


async def test_a_posted_command_completes_even_if_its_step_crashes() -> None:
    harness = Harness()
    harness.device.crash_at = 1
    harness.loop.start()
    over, never = asyncio.Event(), asyncio.Event()
    harness.loop.post(lambda engine: engine.add(make_request()), then=over.set)
    async with asyncio.timeout(20):
        await over.wait()
        await harness.until(lambda: bool(harness.crashes))
        harness.loop.post(lambda engine: engine.cancel("a"), then=never.set)
        await never.wait()
    await harness.loop.stop()


async def test_an_exception_of_a_posted_command_is_a_crash() -> None:
    harness = Harness()
    started, release, over = threading.Event(), threading.Event(), asyncio.Event()
    harness.loop.start()

    def fail(_: Engine) -> float:
        started.set()
        release.wait(20)
        return 1 / 0

    harness.loop.post(fail, then=over.set)
    assert await asyncio.to_thread(started.wait, 20)
    pending = asyncio.create_task(harness.loop.call(lambda engine: engine.steps))
    await asyncio.sleep(0.05)
    release.set()
    assert isinstance(await fails_as_stopped(lambda: pending), ZeroDivisionError)
    assert over.is_set()
    assert [type(stopped.__cause__) for stopped in harness.crashes] == [ZeroDivisionError]
    await harness.loop.stop()


async def test_stop_ends_the_thread_and_refuses_later_commands() -> None:
    async with running() as harness:
        harness.device.seconds = STEP_SECONDS
        await harness.add(make_request(max_tokens=80))
        healthy = harness.loop.is_healthy
    assert (healthy, harness.loop.is_healthy) == (True, False)
    assert not harness.crashes, "a stop is no crash"
    assert await fails_as_stopped(lambda: harness.add(make_request("b"))) is None
    steps = harness.steps
    await asyncio.sleep(0.05)
    assert harness.steps == steps
