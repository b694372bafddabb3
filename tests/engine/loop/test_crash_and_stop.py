from __future__ import annotations

import asyncio
import threading

from decant.engine.engine import Engine
from tests.engine.factories import make_request
from tests.engine.loop.harness import STEP_SECONDS, Scene, fails_as_stopped, running


async def test_a_crash_is_reported_once_and_fails_all_later_commands() -> None:
    scene = Scene()
    scene.device.crash_at = 3
    scene.loop.start()
    await scene.add(make_request())
    await scene.until(lambda: bool(scene.crashes))
    assert not scene.loop.healthy
    assert "the device is broken" in str(scene.crashes[0])
    assert isinstance(scene.crashes[0].__cause__, ZeroDivisionError)
    assert isinstance(await fails_as_stopped(lambda: scene.add(make_request("b"))), ZeroDivisionError)
    scene.loop.post(lambda engine: engine.cancel("a"))  # not needed any more, and no error
    await scene.loop.stop()
    assert len(scene.crashes) == 1
    assert scene.loop.step_age == 0.0


async def test_a_crash_answers_commands_that_ran_and_fails_pending_ones() -> None:
    scene = Scene()
    scene.device.crash_at = 1
    started, release, ran = threading.Event(), threading.Event(), list[str]()
    scene.loop.start()

    def block(engine: Engine) -> bool:
        engine.add(make_request())
        started.set()
        return release.wait(20)

    blocking = asyncio.create_task(scene.loop.call(block))
    assert await asyncio.to_thread(started.wait, 20)
    waiting = asyncio.create_task(scene.loop.call(lambda _: ran.append("waiting")))
    await asyncio.sleep(0.05)
    release.set()
    assert await asyncio.wait_for(blocking, 20)
    await fails_as_stopped(lambda: waiting)
    assert not ran
    await scene.loop.stop()


async def test_a_posted_command_completes_even_if_its_step_crashes() -> None:
    scene = Scene()
    scene.device.crash_at = 1
    scene.loop.start()
    over, never = asyncio.Event(), asyncio.Event()
    scene.loop.post(lambda engine: engine.add(make_request()), then=over.set)
    async with asyncio.timeout(20):
        await over.wait()
        await scene.until(lambda: bool(scene.crashes))
        scene.loop.post(lambda engine: engine.cancel("a"), then=never.set)
        await never.wait()
    await scene.loop.stop()


async def test_stop_ends_the_thread_and_refuses_later_commands() -> None:
    async with running() as scene:
        scene.device.seconds = STEP_SECONDS
        await scene.add(make_request(max_tokens=80))
        healthy = scene.loop.healthy
    assert (healthy, scene.loop.healthy) == (True, False)
    assert not scene.crashes, "a stop is no crash"
    assert await fails_as_stopped(lambda: scene.add(make_request("b"))) is None
    steps = scene.steps
    await asyncio.sleep(0.05)
    assert scene.steps == steps
