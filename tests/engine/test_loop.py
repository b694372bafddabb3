"""EngineLoop: nothing polls, nothing blocks the event loop, and a crash fails all callers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import pytest

from decant.engine.engine import Engine
from decant.engine.errors import EngineStopped, InvalidRequest, UnknownSequence
from decant.engine.fake import FakeDevice
from decant.engine.loop import EngineLoop, StepDurations
from decant.engine.output import SequenceFinished, StepOutput, Token
from decant.engine.plan import StepPlan, StepResult
from decant.engine.request import FinishReason, Request
from tests.engine.factories import BLOCK, make_engine, make_request, prompt, run_alone
from tests.engine.properties import nothing_is_held
from tests.engine.streams import Streams

STEP_SECONDS = 0.02


class Device(FakeDevice):
    """Counts its steps, records their thread, sleeps, and crashes on request."""

    def __init__(self, num_blocks: int = 64) -> None:
        super().__init__(num_blocks=num_blocks, block_size=BLOCK, context_length=96, cost=lambda _: self.seconds)
        self.before: Callable[[], object] = lambda: None
        self.seconds = 0.0
        self.runs = 0
        self.crash_at = -1
        self.threads: set[str] = set()

    def run(self, plan: StepPlan) -> StepResult:
        self.runs += 1
        self.threads.add(threading.current_thread().name)
        self.before()
        if self.runs == self.crash_at:
            raise ZeroDivisionError("the device is broken")
        return super().run(plan)


class Scene:
    """An engine that counts its steps, its loop, and what ``on_step`` received."""

    def __init__(self, num_blocks: int = 64) -> None:
        self.device = Device(num_blocks)
        self.engine = make_engine(device=self.device)
        self.steps = 0
        self.outputs: list[StepOutput] = []
        self.crashes: list[EngineStopped] = []
        self._step = self.engine.step
        self.engine.step = self._counted  # type: ignore[method-assign]
        self._heard = asyncio.Event()
        self.loop = EngineLoop(self.engine, self._on_step, self._on_crash)

    def _counted(self) -> StepOutput:
        self.steps += 1
        return self._step()

    def _on_step(self, output: StepOutput) -> None:
        self.outputs.append(output)
        self._heard.set()

    def _on_crash(self, stopped: EngineStopped) -> None:
        self.crashes.append(stopped)
        self._heard.set()

    async def add(self, request: Request) -> None:
        await self.loop.call(lambda engine: engine.add(request))

    async def until(self, reached: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not reached():
                self._heard.clear()
                await self._heard.wait()

    async def until_ended(self, id: str) -> SequenceFinished:
        await self.until(lambda: any(ended.id == id for output in self.outputs for ended in output.ended))
        return next(ended for output in self.outputs for ended in output.ended if ended.id == id)

    async def stays_asleep(self) -> bool:
        """Whether nothing is stepped and the thread takes no time for a while, after what is under way."""
        for _ in range(40):
            before = self._spent()
            await asyncio.sleep(0.05)
            if self._spent() == before:
                await asyncio.sleep(0.15)
                return self._spent() == before
        return False

    def _spent(self) -> tuple[int, float]:
        """Steps, and seconds that the engine's thread had of the processor: who looks now and then has some."""
        thread = self.loop._thread.ident
        assert thread is not None
        return self.steps, time.clock_gettime(time.pthread_getcpuclockid(thread))

    def text(self, id: str) -> list[int]:
        return [token.token for output in self.outputs for token in output.tokens if token.id == id]


@asynccontextmanager
async def running(num_blocks: int = 64) -> AsyncIterator[Scene]:
    scene = Scene(num_blocks)
    scene.loop.start()
    try:
        yield scene
    finally:
        await scene.loop.stop()


# -- commands and steps -----------------------------------------------------------------------------------------


async def test_commands_run_on_the_engines_thread_and_answer() -> None:
    async with running() as scene:
        assert await scene.loop.call(lambda _: threading.current_thread().name) == "engine"
        await scene.add(make_request())
        await scene.until_ended("a")
        assert scene.text("a") == run_alone(make_request()).text
        assert scene.device.threads == {"engine"}
        load = await scene.loop.call(lambda engine: engine.load())
        assert load.held_blocks == 0


async def test_a_step_is_measured_against_the_longest_of_its_size() -> None:
    async with running() as scene:
        assert scene.loop.longest_step == 0
        await scene.add(make_request(max_tokens=2))
        await scene.until_ended("a")
        assert 0 < scene.loop.longest_step < 300
        assert scene.loop.step_age == 0


def test_a_size_without_a_step_is_taken_for_the_next_larger_one() -> None:
    pace = StepDurations()
    assert pace.longest(1) == 0
    for tokens, seconds in ((512, 3.0), (1, 0.1), (600, 1.0), (1, 0.2)):
        pace.note(tokens, seconds)
    assert [pace.longest(tokens) for tokens in (1, 2, 511, 513, 1023, 5000)] == [0.2, 3.0, 3.0, 3.0, 3.0, 3.0]


async def test_the_listener_hears_on_the_event_loop() -> None:
    result: set[str] = set()
    engine = make_engine()
    loop = EngineLoop(engine, lambda _: result.add(threading.current_thread().name))
    loop.start()
    await loop.call(lambda engine: engine.add(make_request()))
    await loop.stop()
    assert result == {threading.current_thread().name}


async def test_an_error_of_a_command_reaches_only_its_caller() -> None:
    async with running() as scene:
        await scene.add(make_request(max_tokens=80))
        with pytest.raises(InvalidRequest):
            await scene.add(make_request(max_tokens=80))
        with pytest.raises(UnknownSequence):
            await scene.loop.call(lambda engine: engine.park("nobody"))
        with pytest.raises(ZeroDivisionError):
            await scene.loop.call(lambda _: 1 // 0)
        assert (await scene.until_ended("a")).reason is FinishReason.LENGTH
        assert scene.loop.healthy
        assert scene.text("a") == run_alone(make_request(max_tokens=80)).text


async def test_a_step_is_delivered_in_one_callback(monkeypatch: pytest.MonkeyPatch) -> None:
    """All calls made meanwhile run in one batch, too."""
    async with running() as scene:
        posts: list[object] = []
        original = scene.loop._post

        def post(callback: Callable[[], None]) -> None:
            posts.append(callback)
            original(callback)

        monkeypatch.setattr(scene.loop, "_post", post)
        scene.device.seconds = STEP_SECONDS
        requests = [make_request(f"r{index}", prompt(4, index)) for index in range(6)]
        await asyncio.gather(*(scene.add(request) for request in requests))
        for request in requests:
            await scene.until_ended(request.id)
        assert scene.steps == len(scene.outputs)
        assert len(posts) - scene.steps <= 2, "answers to six calls that came together"
        assert scene.steps < len(requests) * 8 / 2, "requests that come together are stepped together"


async def test_a_call_during_a_step_waits_for_one_step() -> None:
    async with running() as scene:
        begun, let = threading.Event(), threading.Semaphore(0)

        def wait() -> None:
            begun.set()
            assert let.acquire(timeout=20)

        scene.device.before = wait
        await scene.add(make_request(max_tokens=3))  # answered before its first step
        assert await asyncio.to_thread(begun.wait, 20)
        asking = asyncio.create_task(scene.loop.call(lambda engine: engine.steps))
        await asyncio.sleep(0)
        steps = scene.engine.steps
        let.release()  # the step under way, and no other
        async with asyncio.timeout(20):
            assert await asking == steps + 1
        for _ in range(10):
            let.release()
        assert (await scene.until_ended("a")).reason is FinishReason.LENGTH


async def test_calls_are_answered_before_their_step_and_posted_commands_after_it() -> None:
    async with running() as scene:
        let, items = threading.Event(), asyncio.Event()
        scene.device.before = lambda: let.wait(20)
        scene.loop.post(lambda engine: None, then=items.set)
        await scene.add(make_request("a", max_tokens=1))  # returns, though its step does not
        assert not scene.outputs
        again = asyncio.Event()
        scene.loop.post(lambda engine: None, then=again.set)
        let.set()
        async with asyncio.timeout(20):
            await again.wait()
        assert [token.id for output in scene.outputs for token in output.tokens] == ["a"]
        assert items.is_set()


# -- nothing polls ----------------------------------------------------------------------------------------------


async def test_with_no_work_the_thread_sleeps() -> None:
    async with running() as scene:
        assert await scene.stays_asleep()
        await scene.add(make_request())
        await scene.until_ended("a")
        assert await scene.stays_asleep()
        assert scene.loop.step_age == 0.0


async def test_a_stalled_engine_sleeps() -> None:
    """A lease holds the blocks that a waiting sequence needs; it runs as soon as the lease ends."""
    async with running(num_blocks=8) as scene:
        await scene.add(make_request("holder", prompt(24), 4, park_after=1))
        await scene.until(lambda: bool(scene.text("holder")))
        await scene.loop.call(lambda engine: engine.transfers.export("holder"))
        await scene.loop.call(lambda engine: engine.transfers.finalize("holder"))
        await scene.add(make_request("blocked", prompt(12, 3), 2))
        assert scene.engine.has_work
        assert await scene.stays_asleep()
        await scene.loop.call(lambda engine: engine.transfers.release("holder"))
        assert (await scene.until_ended("blocked")).reason is FinishReason.LENGTH
        assert await scene.stays_asleep()


# -- the event loop goes on -------------------------------------------------------------------------------------


async def test_a_slow_step_does_not_block_the_event_loop() -> None:
    """The step ends only after the event loop has gone on for a while."""
    async with running() as scene:
        begun, ticked = threading.Event(), threading.Event()

        def wait() -> None:
            begun.set()
            ticked.wait(20)

        scene.device.before = wait
        adding = asyncio.create_task(scene.add(make_request(max_tokens=1)))
        assert await asyncio.to_thread(begun.wait, 20)
        ages = []
        for _ in range(20):
            await asyncio.sleep(0.005)
            ages.append(scene.loop.step_age)
        assert not scene.outputs
        ticked.set()
        await adding
        assert (await scene.until_ended("a")).reason is FinishReason.LENGTH
        assert ages[-1] > ages[-2] > 0, "a step that takes long can be seen from outside"
    assert scene.loop.step_age == 0.0


# -- crashes and stops ------------------------------------------------------------------------------------------


async def fails_as_stopped(call: Callable[[], Awaitable[object]]) -> BaseException | None:
    """The cause that comes with the error."""
    with pytest.raises(EngineStopped) as stopped:
        await asyncio.wait_for(call(), 20)
    return stopped.value.__cause__


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


async def test_a_crash_answers_what_ran_and_refuses_what_waits() -> None:
    scene = Scene()
    scene.device.crash_at = 1
    release, ran = threading.Event(), list[str]()
    scene.loop.start()

    def hold(engine: Engine) -> bool:
        engine.add(make_request())
        return release.wait(20)

    held = asyncio.create_task(scene.loop.call(hold))
    await asyncio.sleep(0.05)
    waiting = asyncio.create_task(scene.loop.call(lambda _: ran.append("waiting")))
    await asyncio.sleep(0.05)
    release.set()
    assert await asyncio.wait_for(held, 20)
    await fails_as_stopped(lambda: waiting)
    assert not ran
    await scene.loop.stop()


async def test_a_posted_command_is_reported_over_even_if_its_step_crashes() -> None:
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


async def test_stop_ends_the_thread_and_refuses_what_comes() -> None:
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


# -- callers that go --------------------------------------------------------------------------------------------


async def test_a_command_of_a_cancelled_caller_is_undone() -> None:
    async with running() as scene:
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

        scene.device.seconds = STEP_SECONDS
        task = asyncio.create_task(scene.loop.call(command, undo))
        assert await asyncio.to_thread(started.wait, 20)
        task.cancel()
        await asyncio.sleep(0)
        release.set()
        assert (await scene.until_ended("a")).reason is FinishReason.CANCELLED
        assert undone == [("result", "engine")]
        assert task.cancelled()
    nothing_is_held(scene.engine)


async def test_what_is_answered_to_a_caller_that_goes_in_that_moment_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as scene:
        scene.device.seconds = STEP_SECONDS
        original = scene.loop._post

        def post(callback: Callable[[], None]) -> None:
            def and_cancel() -> None:
                callback()
                task.cancel()  # behind the answer, before the task goes on

            original(and_cancel)

        monkeypatch.setattr(scene.loop, "_post", post)
        add = scene.loop.call(
            lambda engine: engine.add(make_request(max_tokens=80)), lambda engine, _: engine.cancel("a")
        )
        task = asyncio.create_task(add)
        assert (await scene.until_ended("a")).reason is FinishReason.CANCELLED
        assert task.cancelled()
    nothing_is_held(scene.engine)


async def test_a_pending_command_of_a_cancelled_caller_never_runs() -> None:
    async with running() as scene:
        release, ran = threading.Event(), list[str]()
        held = asyncio.create_task(scene.loop.call(lambda _: release.wait(20)))
        await asyncio.sleep(0.05)
        task = asyncio.create_task(scene.loop.call(lambda _: ran.append("ran"), lambda *_: ran.append("undone")))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        release.set()
        await held
        await scene.loop.call(lambda _: None)
        assert not ran


# -- streams ----------------------------------------------------------------------------------------------------


async def collect(streams: Streams, request: Request) -> list[Token | SequenceFinished]:
    return [event async for event in streams.generate(request) if isinstance(event, Token | SequenceFinished)]


async def test_each_stream_hears_its_own_and_its_end_last() -> None:
    requests = [make_request(f"r{index}", prompt(5 + index, index)) for index in range(5)]
    async with Streams(make_engine()) as streams:
        items = await asyncio.gather(*(collect(streams, request) for request in requests))
    for request, events in zip(requests, items, strict=True):
        assert [event.token for event in events if isinstance(event, Token)] == run_alone(request).text
        assert isinstance(events[-1], SequenceFinished)
        assert sum(isinstance(event, SequenceFinished) for event in events) == 1


async def test_a_bad_request_fails_only_its_own_stream() -> None:
    async with Streams(make_engine()) as streams:
        good = asyncio.create_task(collect(streams, make_request("good")))
        with pytest.raises(InvalidRequest):
            await collect(streams, replace(make_request("bad"), token_ids=(10**6,)))
        assert [e.token for e in await good if isinstance(e, Token)] == run_alone(make_request("good")).text
        assert len(await collect(streams, make_request("bad"))) == 9, "its id is free"


async def test_leaving_a_stream_early_cancels_its_sequence() -> None:
    device = Device()
    device.seconds = STEP_SECONDS
    engine = make_engine(device=device)
    async with Streams(engine) as streams:
        async with aclosing(streams.generate(make_request(max_tokens=80))) as events:
            async for _ in events:
                break
        with pytest.raises(InvalidRequest, match="alive"):
            await collect(streams, make_request())
        await asyncio.sleep(STEP_SECONDS * 5)
        load = await streams.loop.call(lambda engine: engine.load())
        assert (load.running, load.held_blocks) == (0, 0)
        again = await collect(streams, make_request())
        assert [event.reason for event in again if isinstance(event, SequenceFinished)] == [FinishReason.LENGTH]
        assert len(again) == 9, "it hears nothing of the one before it"


async def test_a_reader_that_is_cancelled_while_it_asks_leaves_nothing() -> None:
    engine = make_engine()
    async with Streams(engine) as streams:
        for turn in range(20):
            task = asyncio.create_task(collect(streams, make_request(f"r{turn}", max_tokens=80)))
            await asyncio.sleep(0.001 * (turn % 4))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await streams.loop.call(lambda _: None)
        await asyncio.sleep(0.05)
        await streams.loop.call(nothing_is_held)
        assert not streams._queues


async def test_a_crash_fails_every_stream_with_its_cause() -> None:
    device = Device()
    device.crash_at = 4
    async with Streams(make_engine(device=device)) as streams:
        calls = [lambda n=n: collect(streams, make_request(f"r{n}", 4, 20)) for n in range(3)]
        causes = await asyncio.gather(*(fails_as_stopped(call) for call in calls))
        assert [type(cause) for cause in causes] == [ZeroDivisionError] * 3
        assert await fails_as_stopped(calls[0]) is causes[0]
        assert not streams.loop.healthy


async def test_a_stop_ends_streams_that_are_still_read() -> None:
    device = Device()
    device.seconds = STEP_SECONDS
    async with Streams(make_engine(device=device)) as streams:
        task = asyncio.create_task(collect(streams, make_request(max_tokens=80)))
        await asyncio.sleep(STEP_SECONDS * 3)
    assert await fails_as_stopped(lambda: task) is None
