from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from decant import Answer, AsyncClient, Client, Finished, FinishReason
from tests.e2e.client_checks import check_greedy
from tests.e2e.deployment import PATIENCE_S, Deployment, Process, deployment

pytestmark = pytest.mark.slow

TOKENS = 400  # a second of work, so that no router is through with an answer before the test has ended it
PROMPT = [0, *(7 + n * 29 % 4000 for n in range(60))]
WANTED: dict[str, Any] = {
    "max_tokens": TOKENS,
    "ignore_eos": True,
    "temperature": 0,
    "token_ids": True,
    "timeout": PATIENCE_S,
}


@dataclass
class Reading:
    stream: Any
    client: Client | AsyncClient
    deltas: Any

    @classmethod
    async def begin(cls, running: Deployment, *, blocking: bool) -> Reading:
        client: Any = (Client if blocking else AsyncClient)(running.addresses)
        stream = client.stream(PROMPT, **WANTED)
        reading = cls(stream, client, iter(stream) if blocking else aiter(stream))
        while stream.seq < 20:
            assert await reading._next()
        assert not stream.is_complete
        return reading

    async def end(self) -> None:
        while await self._next():
            pass
        closing = self.client.close()
        if closing is not None:
            await closing

    async def _next(self) -> bool:
        if isinstance(self.client, Client):
            return await asyncio.to_thread(next, self.deltas, None) is not None
        return await anext(self.deltas, None) is not None

    def read_from(self, running: Deployment) -> Process:
        return running.routers[running.addresses.index(self.stream.router)]


async def undisturbed(running: Deployment) -> Answer:
    async with AsyncClient(running.addresses) as client:
        return await client.generate(PROMPT, **WANTED)


def is_whole(reading: Reading) -> None:
    stream = reading.stream
    ids = stream.outputs[0].token_ids
    check_greedy(PROMPT, stream.text, ids)
    assert (stream.seq, stream.finished) == (TOKENS, Finished(FinishReason.LENGTH))
    assert stream.usage.completion_tokens == len(ids) == TOKENS


@pytest.fixture
async def running(request: pytest.FixtureRequest) -> AsyncIterator[Deployment]:
    router = ("--drain-seconds", "0.1")
    with deployment(routers=3, router=router) as made:
        yield made
        await asyncio.to_thread(made.settled)


async def test_routers_die_one_after_the_other_and_the_text_is_the_same(running: Deployment) -> None:
    reading = await Reading.begin(running, blocking=True)
    reading.read_from(running).kill()
    await reading.end()
    is_whole(reading)
    assert len(reading.stream.resumed_at) == 1
    again = await Reading.begin(running, blocking=False)  # one of those that it knows is dead
    again.read_from(running).kill()
    await again.end()
    is_whole(again)
    assert again.stream.resumed_at
    assert (await undisturbed(running)).text == again.stream.text


async def test_routers_drain_in_mid_stream_and_the_text_is_the_same(running: Deployment) -> None:
    for blocking in (False, True):
        reading = await Reading.begin(running, blocking=blocking)
        reading.read_from(running).ask_to_end(excused=True)
        await reading.end()
        is_whole(reading)
        assert len(reading.stream.resumed_at) == 1
