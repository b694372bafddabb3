"""Calls that wait: for a router that is away, and for a first token behind a proxy that cuts idle connections."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

import decant
from decant.protos import inference_pb2 as pb
from tests.decant.cutting_proxy import CuttingProxy, cutting_proxy
from tests.decant.scripted import PATIENCE_S, Script, serving, short_answer
from tests.decant.two_routers import AsyncClient, Client, SkewedClock
from tests.ports import kept

CUTS = 6
RESUME_S = 30.0

Call = Callable[[str, SkewedClock], Any]


def generate(address: str, clock: SkewedClock) -> str:
    with clock.of(Client(address, resume_seconds=RESUME_S)) as client:
        return str(client.generate("x", request_id="r").text)


def stream(address: str, clock: SkewedClock) -> str:
    with clock.of(Client(address, resume_seconds=RESUME_S)) as client, client.stream("x", request_id="r") as answer:
        return "".join(delta.text for delta in answer)


async def _generate_async(address: str, clock: SkewedClock) -> str:
    async with clock.of(AsyncClient(address, resume_seconds=RESUME_S)) as client:
        return str((await client.generate("x", request_id="r")).text)


def generate_async(address: str, clock: SkewedClock) -> str:
    return asyncio.run(_generate_async(address, clock))


async def _stream_async(address: str, clock: SkewedClock) -> str:
    client = clock.of(AsyncClient(address, resume_seconds=RESUME_S))
    async with client, client.stream("x", request_id="r") as answer:
        return "".join([delta.text async for delta in answer])


def stream_async(address: str, clock: SkewedClock) -> str:
    return asyncio.run(_stream_async(address, clock))


CALLS = [generate, stream, generate_async, stream_async]


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
async def test_a_call_that_begins_while_its_router_is_away_succeeds_when_it_is_back(call: Call) -> None:
    script, clock = Script(), SkewedClock()
    with serving(script) as address:
        port = int(address.rpartition(":")[2])
        held = kept(address)
        held.__enter__()
    try:
        waiting = asyncio.ensure_future(asyncio.to_thread(call, address, clock))
        done, _ = await asyncio.wait([waiting], timeout=1.5)
        assert not done
        with serving(script, port):
            assert await asyncio.wait_for(waiting, PATIENCE_S) == "abc"
    finally:
        held.__exit__(None, None, None)
    assert len(script.requests) == 1


class Waiting:
    """A request behind a proxy, which waits for its first token until it is released."""

    def __init__(self, script: Script, proxy: CuttingProxy) -> None:
        self.script = script
        self.proxy = proxy
        self.released = False

    async def answer(self, request: pb.GenerateRequest, _: Any) -> AsyncIterator[pb.GenerateStreamResponse]:
        while not self.released:  # noqa: ASYNC110 - another loop sets it
            await asyncio.sleep(0.01)
        async for message in short_answer(request, None):
            yield message

    async def calls(self, number: int) -> None:
        """Wait for so many calls to begin, and, if they are accepted, for their headers."""
        async with asyncio.timeout(PATIENCE_S):
            while not self._have_begun(number):  # noqa: ASYNC110 - other loops count them
                await asyncio.sleep(0.01)

    def _have_begun(self, number: int) -> bool:
        return len(self.script.requests) >= number and (not self.script.accepts or self._num_accepted() >= number)

    def _num_accepted(self) -> int:
        """Connections with a response beside that of the health check."""
        return sum(counter.count > 1 for counter in self.proxy.responses)


@pytest.fixture
def waiting() -> Iterator[Waiting]:
    with contextlib.ExitStack() as stack:
        script = Script()
        proxy = stack.enter_context(cutting_proxy(stack.enter_context(serving(script))))
        one = Waiting(script, proxy)
        script.answering = one.answer
        yield one
        one.released = True


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
async def test_an_accepted_request_waits_longer_than_any_idle_limit_of_a_proxy(call: Call, waiting: Waiting) -> None:
    waiting.script.accepts = True
    clock = SkewedClock()
    reading = asyncio.ensure_future(asyncio.to_thread(call, waiting.proxy.address, clock))
    for cut in range(CUTS):
        await waiting.calls(cut + 1)
        clock.skew += 0.9 * RESUME_S
        waiting.proxy.cut()
    await waiting.calls(CUTS + 1)
    waiting.released = True
    assert await asyncio.wait_for(reading, PATIENCE_S) == "abc"
    assert {request.request_id for request in waiting.script.requests} == {"r"}


@pytest.mark.slow
async def test_a_request_that_no_router_accepts_ends_after_resume_seconds(waiting: Waiting) -> None:
    clock = SkewedClock()
    reading = asyncio.ensure_future(asyncio.to_thread(stream, waiting.proxy.address, clock))
    await waiting.calls(1)
    ends = time.monotonic() + PATIENCE_S
    while not reading.done() and time.monotonic() < ends:
        waiting.proxy.cut()
        await asyncio.sleep(0.05)
        clock.skew += 1
    with pytest.raises(decant.Unavailable):
        await asyncio.wait_for(reading, PATIENCE_S)
