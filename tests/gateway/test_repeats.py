"""Calls that have a key, and calls with several prompts: what their requests share and what they leave."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

import decant
from decant.client import AsyncClient
from decant.gateway import generation
from decant.gateway.app import Gateway
from decant.gateway.generation import Caller, GenerationRequest
from decant.protos import inference_pb2 as pb
from decant.runtime.connections.channel import Deadline
from tests.decant.scripted import PATIENCE_S, Answering, Script, endless_answer, refuse, short_answer
from tests.gateway.asgi import HttpCall, call

COMPLETIONS = "/v1/completions"
FULL = decant.QuotaExceeded("t", "in_flight", 2, 3, retry_after=1)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_with_a_key_outlives_its_call(gateway: Gateway, script: Script, stream: bool) -> None:
    script.answering = endless_answer
    body = {"prompt": ["one", "two"], "stream": stream}
    leaving = HttpCall(gateway, COMPLETIONS, body, {"Idempotency-Key": "mine"})
    running = asyncio.create_task(leaving())
    assert await asyncio.to_thread(script.was_called.wait, PATIENCE_S)
    leaving.leaves.set()
    await running
    assert script.cancelled == []
    assert {sent.stream.on_disconnect for sent in script.requests} == {pb.StreamOptions.ON_DISCONNECT_DETACH}


async def test_no_key_of_a_client_is_the_id_of_one_of_several_prompts(gateway: Gateway, script: Script) -> None:
    for _ in range(2):
        await call(gateway, COMPLETIONS, {"prompt": ["one", "two"]}, Idempotency_Key="mine")
    first, again = script.requests[:2], script.requests[2:]
    assert len({sent.request_id for sent in first}) == 2
    assert {sent.request_id for sent in again} == {sent.request_id for sent in first}
    reply = await call(gateway, COMPLETIONS, {"prompt": "x"}, Idempotency_Key=first[0].request_id)
    assert (reply.status, reply.error["param"]) == (400, "Idempotency-Key")


class Timing(AsyncClient):
    """Records the time that each request gets."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def generate(self, *_: Any, timeout: float | None = None, **options: Any) -> Any:  # noqa: ASYNC109
        assert timeout is not None
        self.seconds.append(timeout)
        await asyncio.sleep(0.01)


async def test_all_prompts_of_a_call_have_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "PROMPTS_AT_ONCE", 1)
    client, wanted = Timing(), GenerationRequest({}, prompts=["one", "two", "three"])
    began = time.monotonic()
    await generation.answers(Caller(client, "x", Deadline.after(500)), wanted)
    first, second, third = client.seconds
    assert 500 >= first > second > third > 499.9 - (time.monotonic() - began)
    with pytest.raises(decant.DeadlineExceeded):
        await generation.answers(Caller(client, "x", Deadline.after(0)), wanted)
    assert len(client.seconds) == 3


def two_at_a_time(most: list[int]) -> Answering:
    """Answers that count as running a little longer than they run, as those of a router do."""
    num_running = 0

    def end() -> None:
        nonlocal num_running
        num_running -= 1

    async def answering(request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateStreamResponse]:
        nonlocal num_running
        if num_running == 2:
            await refuse(context, FULL)
        num_running += 1
        most.append(num_running)
        async for message in short_answer(request, context):
            yield message
        asyncio.get_running_loop().call_later(0.05, end)

    return answering


@pytest.mark.parametrize("stream", [False, True])
async def test_prompts_wait_for_the_tenant_s_own_limit(gateway: Gateway, script: Script, stream: bool) -> None:
    most: list[int] = []
    script.answering = two_at_a_time(most)
    reply = await call(gateway, COMPLETIONS, {"prompt": ["one", "two", "three", "four"], "stream": stream})
    choices = [choice for part in (reply.chunks if stream else [reply.json]) for choice in part["choices"]]
    texts = dict.fromkeys(range(4), "")
    for choice in choices:
        texts[choice["index"]] += choice["text"]
    assert texts == dict.fromkeys(range(4), "abc")
    assert (len(most), max(most)) == (4, 2)


@pytest.mark.parametrize("stream", [False, True])
async def test_prompts_are_refused_while_other_calls_have_the_limit(
    gateway: Gateway, script: Script, stream: bool
) -> None:
    script.refusal = FULL
    reply = await call(gateway, COMPLETIONS, {"prompt": ["one", "two"], "stream": stream})
    assert (reply.status, reply.error["code"]) == (429, "rate_limit_exceeded")
    assert re.search("at most 2", reply.error["message"])
