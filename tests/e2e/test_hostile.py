from __future__ import annotations

import asyncio
import os
import resource
import struct
from collections.abc import AsyncIterator, Mapping
from typing import Any

import grpc
import pytest

from decant.protos import inference_pb2 as pb
from decant.runtime.error_details import PUSHBACK_KEY, Reason
from decant.runtime.errors import InvalidArgument, NotFound, QueueFull, ServiceError, Unavailable, from_call
from decant.state.private_redis import PrivateRedis
from decant.state.store import Store
from tests.e2e.scripted import PROMPT, Harness, generate_request, read, scripted
from tests.router.conftest import bare, server, store
from tests.router.fake_script import answer
from tests.router.harness import PATIENCE, until

__all__ = ["bare", "server", "store"]

pytestmark = pytest.mark.slow


@pytest.fixture
async def harness(server: PrivateRedis, store: Store) -> AsyncIterator[Harness]:
    async with scripted(server, store) as made:
        yield made


async def test_streams_that_are_not_read_hold_ids_and_can_be_read_later(harness: Harness) -> None:
    streams, tokens = 40, 700
    await harness.is_unharmed()
    before = harness.memory
    calls = [harness.stream(tokens) for _ in range(streams)]
    for call in calls:
        await call.read()  # it has begun
    decode = harness.workers[1]
    await until(lambda: not any(run.end is None for run in decode.runs.values()) and len(decode.starts) > streams)
    await harness.is_unharmed()
    grown = harness.memory - before
    assert grown < 12 << 20, f"{grown} bytes for {streams * tokens} tokens that no client read"
    for call in calls[::7]:
        assert await read(call) == answer(PROMPT, tokens)
    for call in calls:
        call.cancel()
    await harness.is_unharmed()


async def test_a_message_that_is_too_large_is_refused_by_name(harness: Harness) -> None:
    other = harness.stream(500)
    await other.read()
    error = await harness.error_of(harness.stub.Generate(generate_request(5, user="x" * (17 << 20)), timeout=PATIENCE))
    assert isinstance(error, InvalidArgument)
    assert (error.field, error.value) == ("GenerateRequest", str(generate_request(5, user="x" * (17 << 20)).ByteSize()))
    beyond = await harness.error_of(harness.stub.Generate(generate_request(5, user="x" * (65 << 20)), timeout=PATIENCE))
    assert beyond.code is grpc.StatusCode.RESOURCE_EXHAUSTED, "the transport's own word: nothing of it was taken in"
    assert await read(other) == answer(PROMPT, 500), "the connection goes on"


@pytest.mark.parametrize(("count", "size"), [(1, 100_000), (1000, 100)])
async def test_metadata_that_is_too_large_ends_its_own_call_only(harness: Harness, count: int, size: int) -> None:
    other = harness.stream(500)
    await other.read()
    metadata = tuple((f"x-{index}", "x" * size) for index in range(count))
    error = await harness.error_of(harness.stub.Generate(generate_request(5), metadata=metadata, timeout=PATIENCE))
    assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert await read(other) == answer(PROMPT, 500), "the connection goes on"


async def test_too_many_streams_get_a_retry_delay(server: PrivateRedis, store: Store) -> None:
    async with scripted(server, store, "--max-active", "2", "--queue-limit", "3") as harness:
        harness.workers[1].script.pause_at = 2
        taken = [harness.stream(5) for _ in range(2)]
        for call in taken:
            await call.read()
        many = [asyncio.ensure_future(ended(harness.stream(5))) for _ in range(500)]
        first = iter(asyncio.as_completed(many))
        for _ in range(497):
            error, trailers = await next(first)
            assert isinstance(error, QueueFull)
            assert error.reason is Reason.QUEUE_FULL
            assert error.retry_after is not None
            assert int(trailers[PUSHBACK_KEY]) == round(error.retry_after * 1000)
        harness.workers[1].script.pause_at = None
        harness.workers[1].go.set()
        for call in taken:
            assert await read(call) == answer(PROMPT, 5)
        assert [await each for each in first] == [(None, {})] * 3
        await harness.is_unharmed()


async def ended(call: Any) -> tuple[ServiceError | None, dict[str, Any]]:
    try:
        await read(call)
    except grpc.aio.AioRpcError as error:
        return from_call(error), dict(error.trailing_metadata() or ())
    return None, {}


async def test_calls_that_are_opened_and_abandoned_leave_nothing(server: PrivateRedis, store: Store) -> None:
    async with scripted(server, store, "--max-active", "4", "--resume-grace-ms", "0") as harness:
        harness.workers[1].script.pause_at = 3
        for _ in range(10):
            calls = [harness.stream(5) for _ in range(50)]
            await asyncio.sleep(0.01)
            for call in calls[::2]:
                call.cancel()
            await asyncio.sleep(0)
            for call in calls[1::2]:
                call.cancel()
        harness.workers[1].script.pause_at = None
        harness.workers[1].go.set()
        await asyncio.gather(*(harness.is_unharmed() for _ in range(8)))
        await until(lambda: not harness.workers[1].runs)
        await until(lambda: not harness.workers[0].prefilling)


def _sampling(field: str, value: float) -> pb.GenerateRequest:
    request = pb.GenerateRequest()
    setattr(request.sampling, field, value)
    return request


def absurd_requests() -> Mapping[str, tuple[pb.GenerateRequest, str]]:
    """Return requests by name, each with the field for which it is refused; they are too large for a module."""
    return {
        "stop strings": (pb.GenerateRequest(stopping=pb.StoppingParams(stop=["x"] * 100_000)), "stopping.stop"),
        "a stop string": (pb.GenerateRequest(stopping=pb.StoppingParams(stop=["x" * 1_000_000])), "stopping.stop[0]"),
        "an empty stop string": (pb.GenerateRequest(stopping=pb.StoppingParams(stop=[""])), "stopping.stop[0]"),
        "stop tokens": (
            pb.GenerateRequest(stopping=pb.StoppingParams(stop_token_ids=range(100_000))),
            "stopping.stop_token_ids",
        ),
        "a bias for everything": (
            pb.GenerateRequest(sampling=pb.SamplingParams(logit_bias=dict.fromkeys(range(500_000), 1.0))),
            "sampling.logit_bias",
        ),
        "a bias for nothing": (
            pb.GenerateRequest(sampling=pb.SamplingParams(logit_bias={2**32 - 1: 1.0})),
            "sampling.logit_bias",
        ),
        "a bias that is no number": (
            pb.GenerateRequest(sampling=pb.SamplingParams(logit_bias={3: float("nan")})),
            "sampling.logit_bias[3]",
        ),
        "an id": (pb.GenerateRequest(request_id="x" * 5_000_000), "request_id"),
        "messages": (
            pb.GenerateRequest(messages=pb.Messages(messages=[pb.Message()] * 2_000_000)),
            "messages.messages",
        ),
        "tokens": (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5] * 10_000_000)), "token_ids.ids"),
        "a token of no model": (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[2**32 - 1])), "token_ids.ids"),
        "a priority": (pb.GenerateRequest(priority=-(2**31)), "priority"),
        "a negative count": (pb.GenerateRequest(sampling=pb.SamplingParams(top_k=-1)), "sampling.top_k"),
        "logprobs": (pb.GenerateRequest(response=pb.ResponseOptions(logprobs=2**32 - 1)), "response.logprobs"),
        "more than may be written": (
            pb.GenerateRequest(stopping=pb.StoppingParams(min_tokens=2**32 - 1)),
            "stopping.min_tokens",
        ),
    } | {
        f"{name} {value}": (_sampling(name, value), f"sampling.{name}")
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "frequency_penalty",
            "presence_penalty",
            "repetition_penalty",
        )
        for value in (float("nan"), float("inf"), float("-inf"), -1e30)
    }


async def test_extreme_values_are_refused_by_field_limit_and_value(harness: Harness) -> None:
    other = asyncio.ensure_future(read(harness.stream(2000)))
    for name, (absurd, field) in absurd_requests().items():
        error = await harness.error_of(harness.stub.Generate(merged(absurd), timeout=PATIENCE))
        assert isinstance(error, InvalidArgument), (name, error)
        assert error.field == field, name
        assert error.limit
        assert error.value
    assert await other == answer(PROMPT, 2000)


def merged(absurd: pb.GenerateRequest) -> pb.GenerateRequest:
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT))
    if absurd.WhichOneof("input"):
        request.ClearField("token_ids")
    request.MergeFrom(absurd)
    return request


async def test_ids_of_any_size_are_refused_before_they_are_looked_up(harness: Harness) -> None:
    long = "x" * 5_000_000
    for call in (
        harness.stub.GetGeneration(pb.GetGenerationRequest(request_id=long)),
        harness.stub.CancelGeneration(pb.CancelGenerationRequest(request_id=long)),
        harness.stub.ResumeStream(pb.ResumeStreamRequest(request_id=long)).read(),
    ):
        error = await harness.error_of(call)
        assert isinstance(error, InvalidArgument)
        assert error.field == "request_id"
    strange = await harness.error_of(harness.stub.GetGeneration(pb.GetGenerationRequest(request_id="\0{}\r\n*/../🙂")))
    assert isinstance(strange, NotFound | Unavailable)  # not known, or not known yet: the store is new


METHODS = ["Generate", "GenerateStream", "ResumeStream", "GetGeneration", "CancelGeneration", "Tokenize", "Detokenize"]
NO_UTF8 = b"\x0a\x02\xff\xfe"  # field 1, a text of two bytes that are none
CUT_OFF = b"\x0a\x7f"


async def test_undecodable_bytes_are_refused_by_name(harness: Harness) -> None:
    for method in METHODS:
        path = f"/decant.v1.InferenceService/{method}"
        streams = method in ("GenerateStream", "ResumeStream")
        ask: Any = harness.channel.unary_stream(path) if streams else harness.channel.unary_unary(path)
        for data in (CUT_OFF, NO_UTF8):
            error = await harness.error_of(ask(data).read() if streams else ask(data))
            assert isinstance(error, InvalidArgument), (method, error)
            assert error.field == "request"
    await harness.is_unharmed()


async def test_connections_without_http2_stop_no_other_call(harness: Harness) -> None:
    host, _, port = harness.address.rpartition(":")
    open_ = []
    for index in range(200):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write([b"", b"G", b"GET / HTTP/1.1\r\nhost: x\r\n", b"\0" * 500, PREFACE[:10]][index % 5])
        open_.append((reader, writer))
    await asyncio.gather(*(harness.is_unharmed() for _ in range(3)))
    for _, writer in open_:
        writer.close()
    await harness.is_unharmed()


async def test_a_flood_that_takes_every_file_descriptor_ends_no_stream_and_the_router_serves_again(
    harness: Harness,
) -> None:
    running = harness.stream(700)
    await running.read()
    host, _, port = harness.address.rpartition(":")
    limits = resource.prlimit(harness.process.pid, resource.RLIMIT_NOFILE)
    opened = len(os.listdir(f"/proc/{harness.process.pid}/fd"))
    resource.prlimit(harness.process.pid, resource.RLIMIT_NOFILE, (opened + 20, limits[1]))
    flood = [await asyncio.open_connection(host, int(port)) for _ in range(100)]
    await until(lambda: len(os.listdir(f"/proc/{harness.process.pid}/fd")) >= opened + 20)
    assert await read(running) == answer(PROMPT, 700)
    for _, writer in flood:
        writer.close()
    await harness.is_unharmed()


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\0\0\0\x04\0\0\0\0\0"
PING = struct.pack(">I", 8)[1:] + b"\x06\0\0\0\0\0" + b"12345678"
GOAWAY = 7


async def test_a_client_that_pings_too_often_loses_its_own_connection_only(harness: Harness) -> None:
    other = asyncio.ensure_future(read(harness.stream(2000)))
    host, _, port = harness.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(PREFACE + SETTINGS + PING * 2000)
    kinds = set()
    async with asyncio.timeout(PATIENCE):
        while head := await reader.read(9):
            if len(head) < 9:
                head += await reader.readexactly(9 - len(head))
            kinds.add(head[3])
            await reader.readexactly(int.from_bytes(head[:3]))
    assert GOAWAY in kinds
    writer.close()
    assert await other == answer(PROMPT, 2000)
