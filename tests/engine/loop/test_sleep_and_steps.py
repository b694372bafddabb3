from __future__ import annotations

import asyncio
import threading

from decant.engine.loop import StepDurations
from decant.engine.request import FinishReason
from tests.engine.factories import make_request, prompt
from tests.engine.loop.harness import running


async def test_the_longest_step_of_a_size_is_recorded() -> None:
    async with running() as harness:
        assert harness.loop.longest_step == 0
        await harness.add(make_request(max_tokens=2))
        await harness.until_ended("a")
        assert 0 < harness.loop.longest_step < 300
        assert harness.loop.step_age == 0


def test_a_size_without_a_step_uses_the_next_larger_one() -> None:
    pace = StepDurations()
    assert pace.longest(1) == 0
    for tokens, seconds in ((512, 3.0), (1, 0.1), (600, 1.0), (1, 0.2)):
        pace.note(tokens, seconds)
    assert [pace.longest(tokens) for tokens in (1, 2, 511, 513, 1023, 5000)] == [0.2, 3.0, 3.0, 3.0, 3.0, 3.0]


async def test_with_no_work_the_thread_sleeps() -> None:
    async with running() as harness:
        assert await harness.stays_asleep()
        await harness.add(make_request())
        await harness.until_ended("a")
        assert await harness.stays_asleep()
        assert harness.loop.step_age == 0.0


async def test_a_stalled_engine_sleeps() -> None:
    async with running(num_blocks=8) as harness:
        await harness.add(make_request("holder", prompt(24), 4, park_after=1))
        await harness.until(lambda: bool(harness.text("holder")))
        await harness.loop.call(lambda engine: engine.transfers.export("holder"))
        await harness.loop.call(lambda engine: engine.transfers.finalize("holder"))
        await harness.add(make_request("blocked", prompt(12, 3), 2))
        assert harness.engine.has_work
        assert await harness.stays_asleep()
        await harness.loop.call(lambda engine: engine.transfers.release("holder"))
        assert (await harness.until_ended("blocked")).reason is FinishReason.LENGTH
        assert await harness.stays_asleep()


async def test_a_slow_step_does_not_block_the_event_loop() -> None:
    async with running() as harness:
        begun, ticked = threading.Event(), threading.Event()

        def wait() -> None:
            begun.set()
            ticked.wait(20)

        harness.device.before = wait
        adding = asyncio.create_task(harness.add(make_request(max_tokens=1)))
        assert await asyncio.to_thread(begun.wait, 20)
        ages = []
        for _ in range(20):
            await asyncio.sleep(0.005)
            ages.append(harness.loop.step_age)
        assert not harness.outputs
        ticked.set()
        await adding
        assert (await harness.until_ended("a")).reason is FinishReason.LENGTH
        assert ages[-1] > ages[-2] > 0, "the age of a long step is visible"
    assert harness.loop.step_age == 0.0
