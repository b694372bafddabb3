from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import psutil
import pytest
import redis as sync_redis

from decant.protos import inference_pb2 as pb
from decant.protos.inference_pb2_grpc import InferenceServiceStub
from decant.runtime.error_details import Reason
from decant.runtime.errors import Aborted, Cancelled, ServiceError, Unavailable, from_call
from decant.state import keys
from decant.state.ids import RequestKey
from decant.state.private_redis import PrivateRedis
from tests.e2e.client_checks import Answer, ask, check_greedy, generate_request, open_stub
from tests.e2e.deployment import PATIENCE_S, Deployment, deployment
from tests.ports import reserved_port

pytestmark = pytest.mark.slow

TOKENS = 300
SHORT = 80
LONG = 1900
"""Tokens of an answer during which Redis is stopped and started, all that fit into the small model's context."""
PROMPT = [0, *(5 + n * 31 % 4000 for n in range(60))]


@dataclass
class Two:
    running: Deployment
    one: InferenceServiceStub
    other: InferenceServiceStub


@pytest.fixture(scope="module")
def processes() -> Iterator[Deployment]:
    with deployment(routers=2) as running:
        yield running


@pytest.fixture
async def two(processes: Deployment) -> AsyncIterator[Two]:
    first, one = open_stub(processes.addresses[0])
    second, other = open_stub(processes.addresses[1])
    async with first, second:
        yield Two(processes, one, other)
    await asyncio.to_thread(processes.settled)


def request(id: str | None = None) -> pb.GenerateRequest:
    made = generate_request(PROMPT, max_tokens=TOKENS)
    made.request_id = id or str(uuid.uuid4())
    made.stopping.ignore_eos = True
    return made


async def read(call: Any, tokens: int) -> list[pb.GenerateStreamResponse]:
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
    try:
        await rest(call)
    except grpc.aio.AioRpcError as error:
        return from_call(error)
    raise AssertionError("it ended well")


def join_streams(*streams: list[pb.GenerateStreamResponse]) -> tuple[str, list[int]]:
    messages = [message for stream in streams for message in stream]
    ids = [id for message in messages for id in message.delta.token_ids]
    return "".join(message.delta.text for message in messages), ids


def check_answer(tokens: int, *streams: list[pb.GenerateStreamResponse]) -> None:
    text, ids = join_streams(*streams)
    assert len(ids) == tokens, "nothing is missing, nothing twice"
    check_greedy(PROMPT, text, ids)


async def test_a_stream_goes_on_at_the_other_router(two: Two) -> None:
    asking = request()
    call = two.one.GenerateStream(asking, timeout=PATIENCE_S)
    begun = await read(call, 20)
    again = two.other.ResumeStream(
        pb.ResumeStreamRequest(request_id=asking.request_id, after_seq=begun[-1].seq), timeout=PATIENCE_S
    )
    ended = await rest(again)
    check_answer(TOKENS, begun, ended)
    assert ended[-1].usage.completion_tokens == TOKENS
    error = await failed(call)
    assert (type(error), error.reason) == (Aborted, Reason.SUPERSEDED)


def with_logprobs(_: str) -> pb.GenerateRequest:
    return pb.GenerateRequest(response=pb.ResponseOptions(logprobs=2, prompt_logprobs=1))


def with_text_held_back(text: str) -> pb.GenerateRequest:
    begun = [text[place : place + 12] + "\N{SNOWMAN}" for place in range(0, len(text), len(text) // 15)]
    return pb.GenerateRequest(stopping=pb.StoppingParams(stop=[stop for stop in begun if len(stop) > 1][:16]))


def with_echo(_: str) -> pb.GenerateRequest:
    return pb.GenerateRequest(response=pb.ResponseOptions(echo=True))


@pytest.mark.rule("equal-seq", "router/api/response_writer.py:ResponseWriter.stream")
@pytest.mark.parametrize("variant", [with_logprobs, with_text_held_back, with_echo])
async def test_both_parts_of_a_cut_stream_are_the_complete_output(
    two: Two, variant: Callable[[str], pb.GenerateRequest]
) -> None:
    plain = await ask(two.one, shortened())
    extra = variant(plain.text)
    whole = await ask(two.one, shortened(extra))
    for cut in (1, 17, SHORT - 1):
        asking = shortened(extra)
        begun = await read(two.one.GenerateStream(asking, timeout=PATIENCE_S), cut)
        generation = await two.other.GetGeneration(pb.GetGenerationRequest(request_id=asking.request_id))
        check_beginning(generation.result, whole)
        again = await rest(two.other.ResumeStream(resumed(asking, begun[-1].seq), timeout=PATIENCE_S))
        assert again[0].started.prompt_logprobs == whole.started.prompt_logprobs
        parts = join_streams(begun, again)
        assert parts == (whole.text, whole.ids)
        assert [one for message in begun + again for one in message.delta.logprobs] == whole.logprobs
        for stub in (two.one, two.other):
            assert (await ended_generation(stub, asking, whole)).last_seq == SHORT
            part = await rest(stub.ResumeStream(resumed(asking, cut), timeout=PATIENCE_S))
            ids = [id for message in part for id in message.delta.token_ids]
            assert ids == whole.ids[cut:]
            assert whole.text.endswith("".join(message.delta.text for message in part))
            assert [one for message in part for one in message.delta.logprobs] == whole.logprobs[cut:]


async def ended_generation(stub: InferenceServiceStub, asking: pb.GenerateRequest, whole: Answer) -> pb.Generation:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            generation: pb.Generation = await stub.GetGeneration(pb.GetGenerationRequest(request_id=asking.request_id))
            check_beginning(generation.result, whole)
            if generation.HasField("expire_time"):
                return generation
            await asyncio.sleep(0.05)


def shortened(extra: pb.GenerateRequest | None = None) -> pb.GenerateRequest:
    made = request()
    made.stopping.max_tokens = SHORT
    made.MergeFrom(extra or pb.GenerateRequest())
    return made


def resumed(asking: pb.GenerateRequest, after_seq: int) -> pb.ResumeStreamRequest:
    return pb.ResumeStreamRequest(request_id=asking.request_id, after_seq=after_seq)


def check_beginning(response: pb.GenerateResponse, whole: Answer) -> None:
    (output,) = response.outputs
    count = len(output.token_ids)
    assert list(output.token_ids) == whole.ids[:count]
    assert list(output.logprobs) == whole.logprobs[:count]
    assert whole.text.startswith(output.text)
    if count:
        assert response.prompt_logprobs == whole.started.prompt_logprobs


async def test_an_equal_request_is_replayed_by_the_other_router(two: Two) -> None:
    asking = request()
    whole = await ask(two.one, asking)
    again = await ask(two.other, asking)
    assert (again.text, again.ids, again.finished) == (whole.text, whole.ids, whole.finished)
    generation = await two.other.GetGeneration(pb.GetGenerationRequest(request_id=asking.request_id))
    assert generation.state == pb.Generation.STATE_SUCCEEDED
    assert (generation.result.outputs[0].text, list(generation.result.outputs[0].token_ids)) == (whole.text, whole.ids)


async def test_the_other_router_cancels(two: Two) -> None:
    asking = request()
    call = two.one.GenerateStream(asking, timeout=PATIENCE_S)
    await read(call, 20)
    for stub in (two.other, two.one, two.other):
        answer = await stub.CancelGeneration(pb.CancelGenerationRequest(request_id=asking.request_id))
        assert answer.status == pb.CancelGenerationResponse.STATUS_CANCELLED
    assert isinstance(await failed(call), Cancelled), "its client learns that, and not that somebody else reads it"


async def test_a_killed_router_loses_no_output() -> None:
    with deployment(routers=2) as running:
        first, one = open_stub(running.addresses[0])
        second, other = open_stub(running.addresses[1])
        async with first, second:
            asking = request()
            begun = await read(one.GenerateStream(asking, timeout=PATIENCE_S), 20)
            running.routers[0].kill()
            resume = pb.ResumeStreamRequest(request_id=asking.request_id, after_seq=begun[-1].seq)
            ended = await rest(other.ResumeStream(resume, timeout=PATIENCE_S))
            check_answer(TOKENS, begun, ended)
        await asyncio.to_thread(running.settled)


async def test_detached_requests_of_a_lost_router_are_finished_by_the_other() -> None:
    with deployment(routers=2) as running:
        first, one = open_stub(running.addresses[0])
        second, other = open_stub(running.addresses[1])
        async with first, second:
            calls = []
            for _ in range(3):
                asking = request()
                asking.stream.on_disconnect = pb.StreamOptions.ON_DISCONNECT_DETACH
                asking.stream.detach_ttl_ms = 600_000
                calls.append((asking, one.GenerateStream(asking, timeout=PATIENCE_S)))
            cut = [(asking, await read(call, 5)) for asking, call in calls]  # none ends before the router does
            for _, call in calls:
                call.cancel()
            running.routers[0].kill()
            for asking, begun in cut:
                await asyncio.to_thread(running.routers[1].until, "request adopted", request_id=asking.request_id)
                ended = await rest(other.ResumeStream(resumed(asking, begun[-1].seq), timeout=PATIENCE_S))
                check_answer(TOKENS, begun, ended)
        await asyncio.to_thread(running.settled)


async def test_a_tail_that_only_its_reader_has_comes_out_the_same_again() -> None:
    with (
        deployment(routers=2) as running,
        sync_redis.Redis.from_url(running.redis.url, protocol=2) as bare,
    ):
        first, one = open_stub(running.addresses[0])
        second, other = open_stub(running.addresses[1])
        async with first, second:
            asking = request()
            asking.stopping.max_tokens = 2 * TOKENS  # the kill comes within the first third
            call = one.GenerateStream(asking, timeout=PATIENCE_S)
            begun = await read(call, 5)
            named = pb.GetGenerationRequest(request_id=asking.request_id)
            while (await other.GetGeneration(named)).state != pb.Generation.STATE_DECODING:
                begun += await read(call, begun[-1].seq + 1)
            bare.execute_command("CLIENT", "PAUSE", 60_000, "WRITE")
            written = bare.strlen(keys.journal(RequestKey("default", asking.request_id))) // 4
            begun += await read(call, max(begun[-1].seq, written) + 20)
            for process in (running.routers[0], running.workers[1].process):
                gone = psutil.Process(process.pid)
                process.kill()
                gone.wait(PATIENCE_S)
            bare.execute_command("CLIENT", "UNPAUSE")
            seq = begun[-1].seq
            assert (await other.GetGeneration(named)).last_seq < seq, "the journal has it all: nothing is tried here"
            ended = await rest(other.ResumeStream(resumed(asking, seq), timeout=PATIENCE_S))
            check_answer(2 * TOKENS, begun, ended)


@pytest.mark.rule("no-adoption-without-redis", "router/execution/adoption.py:Adoptions.read")
async def test_streams_outlive_a_redis_that_comes_back_empty() -> None:
    with (
        reserved_port() as port,
        deployment(routers=2, redis=(redis := PrivateRedis(port=port))) as running,
    ):
        first, one = open_stub(running.addresses[0])
        second, other = open_stub(running.addresses[1])
        async with first, second:
            asking = request()
            asking.stopping.max_tokens = LONG
            call = one.GenerateStream(asking, timeout=PATIENCE_S)
            begun = await read(call, 5)
            redis.stop()
            error = await failed(other.ResumeStream(resumed(asking, 5), timeout=PATIENCE_S))
            assert (type(error), error.reason) == (Unavailable, Reason.STATE_STORE_UNAVAILABLE), (
                "no adoption without Redis"
            )
            await asyncio.to_thread(running.routers[0].until, "the state store is unavailable: requests continue")
            meanwhile = await ask(one, generate_request(PROMPT, max_tokens=10))
            assert not meanwhile.started.resumable
            check_greedy(PROMPT, meanwhile.text, meanwhile.ids)
            assert len(meanwhile.ids) == 10
            begun += await read(call, begun[-1].seq + 1)
            redis.start()
            await asyncio.to_thread(running.routers[0].until, "the state store is available again")
            ended = await taken_over(other, resumed(asking, begun[-1].seq))
            check_answer(LONG, begun, ended)
            assert (await failed(call)).reason is Reason.SUPERSEDED
        await asyncio.to_thread(running.settled)


async def taken_over(stub: InferenceServiceStub, asking: pb.ResumeStreamRequest) -> list[pb.GenerateStreamResponse]:
    """Return the rest of a stream. Until its takeover, resuming is UNAVAILABLE, never NOT_FOUND."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                return await rest(stub.ResumeStream(asking, timeout=PATIENCE_S))
            except grpc.aio.AioRpcError as error:
                refusal = from_call(error)
                assert (type(refusal), refusal.reason) == (Unavailable, Reason.STATE_STORE_UNAVAILABLE)
                await asyncio.sleep(0.05)
