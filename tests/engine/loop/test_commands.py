from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from decant.engine.errors import InvalidRequest, UnknownSequence
from decant.engine.loop import EngineLoop
from decant.engine.request import FinishReason
from tests.engine.factories import make_engine, make_request, prompt, run_alone
from tests.engine.loop.harness import running


async def test_commands_run_on_the_engines_thread_and_answer() -> None:
    async with running() as harness:
        assert await harness.loop.call(lambda _: threading.current_thread().name) == "engine"
        await harness.add(make_request())
        await harness.until_ended("a")
        assert harness.text("a") == run_alone(make_request()).text
        assert harness.device.threads == {"engine"}
        load = await harness.loop.call(lambda engine: engine.load())
        assert load.held_blocks == 0


async def test_the_listener_runs_on_the_event_loop() -> None:
    result: set[str] = set()
    engine = make_engine()
    loop = EngineLoop(engine, lambda _: result.add(threading.current_thread().name))
    loop.start()
    await loop.call(lambda engine: engine.add(make_request()))
    await loop.stop()
    assert result == {threading.current_thread().name}


async def test_an_error_of_a_command_reaches_only_its_caller() -> None:
    async with running() as harness:
        await harness.add(make_request(max_tokens=80))
        with pytest.raises(InvalidRequest):
            await harness.add(make_request(max_tokens=80))
        with pytest.raises(UnknownSequence):
            await harness.loop.call(lambda engine: engine.park("unknown"))
        with pytest.raises(ZeroDivisionError):
            await harness.loop.call(lambda _: 1 // 0)
        assert (await harness.until_ended("a")).reason is FinishReason.LENGTH
        assert harness.loop.is_healthy
        assert harness.text("a") == run_alone(make_request(max_tokens=80)).text


async def test_a_step_is_delivered_in_one_callback(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as harness:
        posts: list[object] = []
        original = harness.loop._post

        def post(callback: Callable[[], None]) -> None:
            posts.append(callback)
            original(callback)

        monkeypatch.setattr(harness.loop, "_post", post)
        let = threading.Event()
        harness.device.before = lambda: let.wait(20)
        requests = [make_request(f"r{index}", prompt(4, index)) for index in range(6)]
        adding = [asyncio.create_task(harness.add(request)) for request in requests]
        await asyncio.sleep(0)
        let.set()
        await asyncio.gather(*adding)
        for request in requests:
            await harness.until_ended(request.id)
        assert harness.steps == len(harness.outputs)
        assert len(posts) - harness.steps <= 2, "answers to six calls that came together"
        assert harness.steps < len(requests) * 8 / 2, "requests that come together are stepped together"


async def test_a_call_during_a_step_waits_for_one_step() -> None:
    async with running() as harness:
        begun, let = threading.Event(), threading.Semaphore(0)

        def wait() -> None:
            begun.set()
            assert let.acquire(timeout=20)

        harness.device.before = wait
        await harness.add(make_request(max_tokens=3))  # answered before its first step
        assert await asyncio.to_thread(begun.wait, 20)
        call = asyncio.create_task(harness.loop.call(lambda engine: engine.steps))
        await asyncio.sleep(0)
        steps = harness.engine.steps
        let.release()  # the step under way, and no other
        async with asyncio.timeout(20):
            assert await call == steps + 1
        for _ in range(10):
            let.release()
        assert (await harness.until_ended("a")).reason is FinishReason.LENGTH


async def test_calls_are_answered_before_their_step_and_posted_commands_after_it() -> None:
    async with running() as harness:
        let, items = threading.Event(), asyncio.Event()
        harness.device.before = lambda: let.wait(20)
        harness.loop.post(lambda engine: None, then=items.set)
        await harness.add(make_request("a", max_tokens=1))  # returns, though its step does not
        assert not harness.outputs
        again = asyncio.Event()
        harness.loop.post(lambda engine: None, then=again.set)
        let.set()
        async with asyncio.timeout(20):
            await again.wait()
        assert [token.id for output in harness.outputs for token in output.tokens] == ["a"]
        assert items.is_set()
