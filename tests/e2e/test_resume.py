"""Two routers on one Redis: a request is come back to on either, and what was shown of it is never shown otherwise."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from protos import inference_pb2 as pb
from protos.inference_pb2_grpc import InferenceServiceStub
from runtime.errors import Aborted, Cancelled, ServiceError, from_call
from runtime.fault import Reason
from tests.e2e.asking import ask, asked, open_stub
from tests.e2e.deployment import PATIENCE_S, SMALL_KV, Deployment, deployment

pytestmark = pytest.mark.slow

TOKENS = 600
PROMPT = [0, *(5 + n * 31 % 4000 for n in range(60))]


@dataclass
class Two:
    running: Deployment
    one: InferenceServiceStub
    other: InferenceServiceStub


@pytest.fixture(scope="module")
def processes() -> Iterator[Deployment]:
    with deployment(routers=2, worker=(*SMALL_KV, "--lease-ms", "3000")) as running:
        yield running


@pytest.fixture
async def two(processes: Deployment) -> AsyncIterator[Two]:
    """Whatever a test does, nothing is left at any worker."""
    first, one = open_stub(processes.addresses[0])
    second, other = open_stub(processes.addresses[1])
    async with first, second:
        yield Two(processes, one, other)
    await asyncio.to_thread(processes.settled)


def request(id: str | None = None) -> pb.GenerateRequest:
    made = asked(PROMPT, max_tokens=TOKENS)
    made.request_id = id or str(uuid.uuid4())
    made.stopping.ignore_eos = True
    return made


async def read(call: Any, tokens: int) -> list[pb.GenerateStreamResponse]:
    """Messages until so many tokens are there."""
    messages: list[pb.GenerateStreamResponse] = []
    async with asyncio.timeout(PATIENCE_S):
        while not messages or messages[-1].seq < tokens:
            messages.append(await call.read())
    return messages


async def rest(call: Any) -> list[pb.GenerateStreamResponse]:
    async with asyncio.timeout(PATIENCE_S):
        messages = []
        while (message := await call.read()) is not grpc.aio.EOF:
            messages.append(message)
        assert await call.code() is grpc.StatusCode.OK, await call.details()
        return messages


async def failed(call: Any) -> ServiceError:
    """What a stream ends with that can't end well."""
    try:
        await rest(call)
    except grpc.aio.AioRpcError as error:
        return from_call(error)
    raise AssertionError("it ended well")


def joined(*streams: list[pb.GenerateStreamResponse]) -> tuple[str, list[int]]:
    messages = [message for stream in streams for message in stream]
    ids = [id for message in messages for id in message.delta.token_ids]
    return "".join(message.delta.text for message in messages), ids


async def test_a_stream_goes_on_at_the_other_router(two: Two) -> None:
    whole = await ask(two.one, request())
    asking = request()
    call = two.one.GenerateStream(asking, timeout=PATIENCE_S)
    begun = await read(call, 20)
    again = two.other.ResumeStream(
        pb.ResumeStreamRequest(request_id=asking.request_id, after_seq=begun[-1].seq), timeout=PATIENCE_S
    )
    ended = await rest(again)
    assert joined(begun, ended) == (whole.text, whole.ids)
    assert ended[-1].usage.completion_tokens == TOKENS
    error = await failed(call)
    assert (type(error), error.reason) == (Aborted, Reason.SUPERSEDED)


async def test_an_equal_request_is_replayed_by_the_other_router(two: Two) -> None:
    asking = request()
    whole = await ask(two.one, asking)
    again = await ask(two.other, asking)
    assert (again.text, again.ids, again.finished) == (whole.text, whole.ids, whole.finished)
    told = await two.other.GetGeneration(pb.GetGenerationRequest(request_id=asking.request_id))
    assert told.state == pb.Generation.STATE_SUCCEEDED
    assert (told.result.outputs[0].text, list(told.result.outputs[0].token_ids)) == (whole.text, whole.ids)


async def test_the_other_router_cancels(two: Two) -> None:
    asking = request()
    call = two.one.GenerateStream(asking, timeout=PATIENCE_S)
    await read(call, 20)
    for stub in (two.other, two.one, two.other):
        answer = await stub.CancelGeneration(pb.CancelGenerationRequest(request_id=asking.request_id))
        assert answer.status == pb.CancelGenerationResponse.STATUS_CANCELLED
    assert isinstance(await failed(call), Aborted | Cancelled)


async def test_a_router_that_dies_takes_no_answer_with_it() -> None:
    with deployment(routers=2, worker=(*SMALL_KV, "--lease-ms", "3000")) as running:
        first, one = open_stub(running.addresses[0])
        second, other = open_stub(running.addresses[1])
        async with first, second:
            whole = await ask(other, request())
            asking = request()
            begun = await read(one.GenerateStream(asking, timeout=PATIENCE_S), 20)
            running.routers[0].kill()
            resume = pb.ResumeStreamRequest(request_id=asking.request_id, after_seq=begun[-1].seq)
            ended = await rest(other.ResumeStream(resume, timeout=PATIENCE_S))
            assert joined(begun, ended) == (whole.text, whole.ids)
        await asyncio.to_thread(running.settled)
