from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from decant.protos import inference_pb2 as pb
from decant.runtime.connections.channel import open_channel
from decant.runtime.connections.tls import PeerTls
from decant.runtime.error_details import Reason
from decant.runtime.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    QueueFull,
)
from decant.runtime.grpc_options import ACCEPTED
from decant.runtime.serving.interceptor import ClientDisconnected
from decant.runtime.telemetry.metrics import Registry
from tests.router.factories import AT_LENGTH, STOPPED, ScriptedRegistry, write
from tests.router.service_harness import (
    PATIENCE,
    all_of,
    error_of_call,
    generate_request,
    harness,
    make_service,
    writes,
)


async def test_a_stream_arrives_as_it_is_written():
    async with harness() as s:
        call = s.stub.GenerateStream(generate_request(request_id="r"))
        stream = await s.stream()
        write(stream, 5)
        assert (await call.read()).HasField("started")
        assert (await call.read()).delta.num_tokens == 1
        write(stream, 6, 1, end=STOPPED)
        assert (await call.read()).seq == 3
        last = await call.read()
        assert last.finished.eos_token_id == 1
        assert last.usage.completion_tokens == 3
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK
        assert s.requests.lost.empty()


@pytest.mark.parametrize("method", ["Generate", "GenerateStream", "ResumeStream"])
async def test_headers_of_an_accepted_request_arrive_before_its_first_token(method):
    async with harness() as s, open_channel(s.server.address, PeerTls()) as channel:
        request: Any = generate_request(request_id="r")
        if method == "ResumeStream":
            s.stub.GenerateStream(request)
            stream = await s.stream()
            request = pb.ResumeStreamRequest(request_id="r")
        # As a stream: a unary call of grpc.aio shows its headers at its end.
        call: Any = channel.unary_stream(f"/decant.v1.InferenceService/{method}")(request.SerializeToString())
        if method != "ResumeStream":
            stream = await s.stream()
        async with asyncio.timeout(PATIENCE):
            assert (ACCEPTED, "true") in tuple(await call.initial_metadata())
        assert not call.done()
        write(stream, 5, end=AT_LENGTH)
        await all_of(call)


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
async def test_a_refusal_is_trailers_alone_so_that_grpc_may_retry_it(method):
    async with harness() as s:
        for refusal, fields in ((None, {"prompt": ""}), (QueueFull(3, retry_after=1.5), {})):
            s.requests.refusal = refusal
            call = getattr(s.stub, method)(generate_request(**fields))
            await call.code()
            assert not tuple(await call.initial_metadata())


async def test_the_whole_answer_is_one_response():
    async with harness() as s:
        s.requests.plan = writes(5, 6, 1)
        response = await s.stub.Generate(generate_request(response=pb.ResponseOptions(token_ids=True)))
        assert list(response.outputs[0].token_ids) == [5, 6, 1]
        assert response.usage.completion_tokens == 3
        assert response.request_id
        assert s.requests.lost.empty()


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
async def test_errors_arrive_as_they_are(method):
    async with harness() as s:

        def call(**fields: Any) -> Awaitable[Any]:
            made = getattr(s.stub, method)(generate_request(**fields))
            return made if method == "Generate" else all_of(made)

        assert isinstance(await error_of_call(call(prompt="")), InvalidArgument)
        assert isinstance(await error_of_call(call(model="none")), NotFound)
        assert isinstance(await error_of_call(call(lora_name="x")), NotFound)
        s.requests.refusal = QueueFull(3, retry_after=1.5)
        full = await error_of_call(call())
        assert (full.reason, full.retry_after) == (Reason.QUEUE_FULL, 1.5)
        s.requests.refusal = None
        s.requests.plan = writes(5, end=Cancelled())
        assert (await error_of_call(call())).reason is Reason.CANCELLED
        assert s.requests.lost.empty()


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
@pytest.mark.parametrize("tokens", [0, 2])
async def test_a_client_that_leaves_has_lost_its_stream(method, tokens):
    async with harness() as s:
        call = getattr(s.stub, method)(generate_request())
        reading = asyncio.ensure_future(call if method == "Generate" else all_of(call))
        stream = await s.stream()
        write(stream, *[5] * tokens)
        with capture_logs() as lines:
            call.cancel()
            assert await s.lost() is stream
            async with asyncio.timeout(PATIENCE):
                await s.server._interceptor.wait_idle()
        await asyncio.wait([reading])
        assert [line["outcome"] for line in lines if line["event"] == "request ended"] == ["left"]
        assert not [line for line in lines if line["log_level"] in ("warning", "error")]


@pytest.mark.parametrize("error", [grpc.aio.InternalError("gone"), grpc.aio.UsageError("gone")])
async def test_a_write_that_fails_is_the_first_that_is_seen_of_a_client_that_left(error):
    class Context:
        def time_remaining(self) -> None:
            return None

        def invocation_metadata(self) -> tuple[()]:
            return ()

        async def send_initial_metadata(self, metadata: Any) -> None:
            pass

        async def write(self, message: Any) -> None:
            raise error

    requests = ScriptedRegistry()
    requests.plan = lambda stream: write(stream, 5)
    service = make_service(requests, Registry(process=False))
    with pytest.raises(ClientDisconnected):
        await service.GenerateStream(generate_request(), Context())
    assert requests.lost.get_nowait() is requests.streams.get_nowait()


async def test_a_client_that_leaves_while_it_is_being_written_to_has_lost_its_stream():
    async with harness() as s:
        call = s.stub.GenerateStream(generate_request())
        stream = await s.stream()

        async def keep_writing() -> None:
            while True:
                write(stream, *[5] * 50)
                await asyncio.sleep(0)

        writing = asyncio.create_task(keep_writing())
        await call.read()
        with capture_logs() as lines:
            call.cancel()
            assert await s.lost() is stream
            async with asyncio.timeout(PATIENCE):
                await s.server._interceptor.wait_idle()
        writing.cancel()
        assert not [line for line in lines if line["log_level"] in ("warning", "error")]


async def test_a_call_that_ends_after_its_deadline_is_no_lost_stream(monkeypatch):
    async with harness() as s:
        call = s.stub.GenerateStream(generate_request(), timeout=PATIENCE)
        stream = await s.stream()
        monkeypatch.setattr(type(stream.request.deadline), "has_passed", True)
        call.cancel()
        async with asyncio.timeout(PATIENCE):
            await s.server._interceptor.wait_idle()
        assert s.requests.lost.empty()


async def test_the_calls_deadline_is_the_requests_own():
    async with harness() as s:
        call = s.stub.GenerateStream(generate_request(), timeout=30)
        left = (await s.stream()).request.deadline.remaining()
        assert left is not None
        assert 0 < left < 33
        call.cancel()
        s.requests.plan = writes(1)
        await s.stub.Generate(generate_request())
        assert (await s.stream()).request.deadline.remaining() is None


async def test_a_request_that_ends_by_its_deadline_gets_deadline_exceeded():
    async with harness() as s:
        s.requests.plan = writes(5, end=DeadlineExceeded())
        error = await error_of_call(s.stub.Generate(generate_request()))
        assert error.reason is Reason.DEADLINE_EXCEEDED


async def test_requests_are_counted_by_model():
    async with harness() as s:
        s.requests.plan = writes(5, 6, 1)
        await s.stub.Generate(generate_request())
        await all_of(s.stub.GenerateStream(generate_request()))
        assert s.count("generation_tokens_total") == 6
        assert s.count("e2e_request_latency_seconds_count") == 2
        assert s.count("time_to_first_token_seconds_count") == 2
