from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest

from decant.engine.errors import InvalidRequest
from decant.engine.output import SequenceFinished, Token
from decant.engine.request import FinishReason, Request
from tests.engine.factories import make_engine, make_request, prompt, run_alone
from tests.engine.loop.harness import STEP_SECONDS, Device, fails_as_stopped
from tests.engine.properties import nothing_is_held
from tests.engine.streams import Streams
from tests.worker.waiting import eventually


async def collect(streams: Streams, request: Request) -> list[Token | SequenceFinished]:
    return [event async for event in streams.generate(request) if isinstance(event, Token | SequenceFinished)]


async def test_each_stream_gets_its_own_events_and_its_end_last() -> None:
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
        with pytest.raises(InvalidRequest, match="not in use by a live sequence"):
            await collect(streams, make_request())
        await eventually(lambda: not streams._queues)
        load = await streams.loop.call(lambda engine: engine.load())
        assert (load.running, load.held_blocks) == (0, 0)
        again = await collect(streams, make_request())
        assert [event.reason for event in again if isinstance(event, SequenceFinished)] == [FinishReason.LENGTH]
        assert len(again) == 9, "it gets no event of the earlier sequence"


async def test_a_reader_cancelled_during_its_request_leaves_nothing() -> None:
    engine = make_engine()
    async with Streams(engine) as streams:
        for turn in range(20):
            task = asyncio.create_task(collect(streams, make_request(f"r{turn}", max_tokens=80)))
            await asyncio.sleep(0.001 * (turn % 4))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await streams.loop.call(lambda _: None)
        await eventually(lambda: not streams._queues)
        await streams.loop.call(nothing_is_held)


async def test_a_crash_fails_every_stream_with_its_cause() -> None:
    device = Device()
    device.crash_at = 4
    async with Streams(make_engine(device=device)) as streams:
        calls = [lambda n=n: collect(streams, make_request(f"r{n}", 4, 20)) for n in range(3)]
        causes = await asyncio.gather(*(fails_as_stopped(call) for call in calls))
        assert [type(cause) for cause in causes] == [ZeroDivisionError] * 3
        assert await fails_as_stopped(calls[0]) is causes[0]
        assert not streams.loop.is_healthy


async def test_a_stop_ends_open_streams() -> None:
    device = Device()
    device.seconds = STEP_SECONDS
    async with Streams(make_engine(device=device)) as streams:
        task = asyncio.create_task(collect(streams, make_request(max_tokens=80)))
        await asyncio.sleep(STEP_SECONDS * 3)
    assert await fails_as_stopped(lambda: task) is None
