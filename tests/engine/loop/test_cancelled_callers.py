from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from decant.engine.engine import Engine
from decant.engine.request import FinishReason
from tests.engine.factories import make_request
from tests.engine.loop.harness import STEP_SECONDS, running
from tests.engine.properties import nothing_is_held


async def test_a_command_of_a_cancelled_caller_is_undone() -> None:
    async with running() as harness:
        started, release = threading.Event(), threading.Event()

        def command(engine: Engine) -> str:
            started.set()
            release.wait(20)
            engine.add(make_request(max_tokens=80))
            return "result"

        undone: list[tuple[str, str]] = []

        def undo(engine: Engine, result: str) -> None:
            undone.append((result, threading.current_thread().name))
            engine.cancel("a")

        harness.device.seconds = STEP_SECONDS
        task = asyncio.create_task(harness.loop.call(command, undo))
        assert await asyncio.to_thread(started.wait, 20)
        task.cancel()
        await asyncio.sleep(0)
        release.set()
        assert (await harness.until_ended("a")).reason is FinishReason.CANCELLED
        assert undone == [("result", "engine")]
        assert task.cancelled()
    nothing_is_held(harness.engine)


async def test_an_answered_command_is_undone_if_its_caller_is_cancelled_then(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as harness:
        harness.device.seconds = STEP_SECONDS
        original = harness.loop._post

        def post(callback: Callable[[], None]) -> None:
            def and_cancel() -> None:
                callback()
                task.cancel()  # behind the answer, before the task goes on

            original(and_cancel)

        monkeypatch.setattr(harness.loop, "_post", post)
        add = harness.loop.call(
            lambda engine: engine.add(make_request(max_tokens=80)), lambda engine, _: engine.cancel("a")
        )
        task = asyncio.create_task(add)
        assert (await harness.until_ended("a")).reason is FinishReason.CANCELLED
        assert task.cancelled()
    nothing_is_held(harness.engine)


async def test_a_pending_command_of_a_cancelled_caller_never_runs() -> None:
    async with running() as harness:
        started, release, ran = threading.Event(), threading.Event(), list[str]()

        def block(_: Engine) -> None:
            started.set()
            release.wait(20)

        blocking = asyncio.create_task(harness.loop.call(block))
        assert await asyncio.to_thread(started.wait, 20)
        task = asyncio.create_task(harness.loop.call(lambda _: ran.append("ran"), lambda *_: ran.append("undone")))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        release.set()
        await blocking
        await harness.loop.call(lambda _: None)
        assert not ran
