"""Streams on which a router sends ``waiting``, or an event of a later version, where it has nothing else to send."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

import decant
from decant.protos import inference_pb2 as pb
from tests.decant.scripted import PATIENCE_S, Break, Script, serving, short_answer, with_a_tail
from tests.decant.test_resuming import read, read_async
from tests.decant.two_routers import LOST, AsyncClient, Two

MESSAGES = 6
"""Of `with_a_tail`."""
WAITING = pb.Waiting(state=pb.Generation.STATE_QUEUED, attempt=1, silent_ms=2000.0, requests_ahead=3)


def waiting(request: pb.GenerateRequest, seq: int) -> pb.GenerateStreamResponse:
    return pb.GenerateStreamResponse(request_id=request.request_id, seq=seq, waiting=WAITING)


def later_event(request: pb.GenerateRequest, seq: int) -> pb.GenerateStreamResponse:
    """A message whose event is field 99, as an older client sees one that it does not know."""
    known = pb.GenerateStreamResponse(request_id=request.request_id, seq=seq)
    return pb.GenerateStreamResponse.FromString(known.SerializeToString() + b"\x9a\x06\x00")


async def often_silent(request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateStreamResponse]:
    seq = 0
    async for message in with_a_tail(request, context):
        yield waiting(request, seq)
        yield later_event(request, seq)
        yield message
        seq = message.seq


@pytest.mark.parametrize("after", range(0, 3 * MESSAGES + 1, 2))
async def test_a_silent_stream_is_read_and_resumed_like_any_other(two: Two, after: int) -> None:
    for blocking in (True, False):
        two.reset([Break(after, LOST)])
        for script in two.routers:
            script.answering = often_silent
        stream = await (asyncio.to_thread(read, two.address) if blocking else read_async(two.address))
        assert len(stream.resumed_at) <= 1
        assert stream.waiting is None


async def test_a_stream_has_what_its_request_waits_for_until_the_next_message() -> None:
    script, released = Script(), threading.Event()

    async def answer(request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateStreamResponse]:
        yield waiting(request, 0)
        await asyncio.to_thread(released.wait, PATIENCE_S)
        async for message in short_answer(request, context):
            yield message

    script.answering = answer
    with serving(script) as address:
        async with AsyncClient(address) as client, client.stream("x") as stream:
            reading = asyncio.ensure_future(anext(aiter(stream)))
            async with asyncio.timeout(PATIENCE_S):
                while stream.waiting is None:  # noqa: ASYNC110 - a message sets it
                    await asyncio.sleep(0.01)
            assert stream.waiting == decant.Waiting(decant.GenerationState.QUEUED, 1, 2000.0, 3)
            assert not reading.done()
            released.set()
            assert (await reading).text == "a"
            assert stream.waiting is None
