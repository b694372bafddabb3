"""The service over real connections, before a dispatcher that does what a test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from protos.state_pb2 import RequestRecord
from router.limits import limits
from router.models import Models
from router.request import Course
from router.service import RETRY_SECONDS, About, InferenceService, found_in
from router.validation import UNIMPLEMENTED_FIELDS
from runtime.channel import open_channel
from runtime.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    QueueFull,
    ServiceError,
    Unavailable,
    Unimplemented,
    from_call,
)
from runtime.fault import Reason
from runtime.health import Readiness
from runtime.interceptor import Gone
from runtime.listening import ServerSettings
from runtime.metrics import Registry, RequestMetrics
from runtime.server import Server
from runtime.tls import PeerTls
from state.errors import NotYetKnown, StoreUnavailable, UnknownRequest
from state.names import Life, RequestKey
from state.owned import StoredRequest
from state.requests import Requests
from tests.router.scenes import AT_LENGTH, STOPPED, ScriptedDispatcher, model, tiny, write

PATIENCE = 60.0
HERE = Life("router-a", 1)
CANCEL = pb.CancelGenerationResponse


@dataclass
class Scene:
    stub: Any
    dispatcher: ScriptedDispatcher
    stored: dict[RequestKey, StoredRequest]
    server: Server
    registry: Registry

    async def course(self) -> Course:
        async with asyncio.timeout(PATIENCE):
            return await self.dispatcher.courses.get()

    async def lost(self) -> Course:
        async with asyncio.timeout(PATIENCE):
            return await self.dispatcher.lost.get()

    def count(self, name: str) -> float | None:
        return self.registry.collectors.get_sample_value(f"decant_{name}", {"model": "tiny-python"})


def made(
    dispatcher: ScriptedDispatcher,
    registry: Registry,
    stored: Mapping[RequestKey, StoredRequest] = MappingProxyType({}),
    served: Models | None = None,
) -> InferenceService:
    async def look_up(key: RequestKey) -> StoredRequest | None:
        return stored.get(key)

    told = limits(max_queued_requests=8, resume_grace_ms=0, result_ttl_ms=0)
    about = About(HERE, "1.2.3", told, lambda: True, lambda: False)
    return InferenceService(served or Models([tiny()]), dispatcher, look_up, about, RequestMetrics(registry))


@asynccontextmanager
async def scene(served: Models | None = None) -> AsyncIterator[Scene]:
    dispatcher, registry = ScriptedDispatcher(), Registry(process=False)
    stored: dict[RequestKey, StoredRequest] = {}
    service = made(dispatcher, registry, stored, served)
    server = Server([service.service()], ServerSettings(port=0, drain_seconds=1.0), Readiness(), registry)
    await server.start()
    running = asyncio.create_task(server.run())
    channel = open_channel(server.address, PeerTls())
    try:
        yield Scene(inference_pb2_grpc.InferenceServiceStub(channel), dispatcher, stored, server, registry)
    finally:
        await channel.close()
        server.shutdown.request("the test ends")
        server.shutdown.request("the test ends")
        await asyncio.wait([running])


def asked(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(**{"prompt": "def f(x):", **fields})


async def refused(call: Awaitable[Any]) -> ServiceError:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return from_call(error.value)


async def all_of(call: Any) -> list[pb.GenerateStreamResponse]:
    return [message async for message in call]


def writes(*tokens: int, end: Any = STOPPED) -> Callable[[Course], None]:
    return lambda course: write(course, *tokens, end=end)


# ------------------------------------------------------------------------------------------- generating


async def test_a_stream_arrives_as_it_is_written():
    async with scene() as s:
        call = s.stub.GenerateStream(asked(request_id="r"))
        course = await s.course()
        write(course, 5)
        assert (await call.read()).HasField("started")
        assert (await call.read()).delta.num_tokens == 1
        write(course, 6, 1, end=STOPPED)
        assert (await call.read()).seq == 3
        last = await call.read()
        assert last.finished.eos_token_id == 1
        assert last.usage.completion_tokens == 3
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK
        assert s.dispatcher.lost.empty()


async def test_nothing_is_sent_before_the_first_token():
    """Metadata alone would commit the call: a client's gRPC could not try again elsewhere."""
    async with scene() as s:
        call = s.stub.GenerateStream(asked())
        course = await s.course()
        metadata = asyncio.ensure_future(call.initial_metadata())
        done, _ = await asyncio.wait([metadata], timeout=0.3)
        assert not done
        write(course, 5)
        async with asyncio.timeout(PATIENCE):
            await metadata
        write(course, end=AT_LENGTH)
        await all_of(call)


async def test_the_whole_answer_is_one_response():
    async with scene() as s:
        s.dispatcher.plan = writes(5, 6, 1)
        response = await s.stub.Generate(asked(response=pb.ResponseOptions(token_ids=True)))
        assert list(response.outputs[0].token_ids) == [5, 6, 1]
        assert response.usage.completion_tokens == 3
        assert response.request_id
        assert s.dispatcher.lost.empty()


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
async def test_errors_arrive_as_they_are(method):
    async with scene() as s:

        def call(**fields: Any) -> Awaitable[Any]:
            made = getattr(s.stub, method)(asked(**fields))
            return made if method == "Generate" else all_of(made)

        assert isinstance(await refused(call(prompt="")), InvalidArgument)
        assert isinstance(await refused(call(model="none")), NotFound)
        assert isinstance(await refused(call(lora_name="x")), Unimplemented)
        s.dispatcher.refusal = QueueFull(3, retry_after=1.5)
        full = await refused(call())
        assert (full.reason, full.retry_after) == (Reason.QUEUE_FULL, 1.5)
        s.dispatcher.refusal = None
        s.dispatcher.plan = writes(5, end=Cancelled())
        assert (await refused(call())).reason is Reason.CANCELLED
        assert s.dispatcher.lost.empty()


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
@pytest.mark.parametrize("tokens", [0, 2])
async def test_a_client_that_leaves_has_lost_its_stream(method, tokens):
    async with scene() as s:
        call = getattr(s.stub, method)(asked())
        reading = asyncio.ensure_future(call if method == "Generate" else all_of(call))
        course = await s.course()
        write(course, *[5] * tokens)
        with capture_logs() as lines:
            call.cancel()
            assert await s.lost() is course
            async with asyncio.timeout(PATIENCE):
                await s.server._interceptor.idle()
        await asyncio.wait([reading])
        assert [line["outcome"] for line in lines if line["event"] == "request ended"] == ["left"]
        assert not [line for line in lines if line["log_level"] in ("warning", "error")]


@pytest.mark.parametrize("error", [grpc.aio.InternalError("gone"), grpc.aio.UsageError("gone")])
async def test_a_write_that_fails_is_the_first_that_is_seen_of_a_client_that_left(error):
    class Context:
        def time_remaining(self) -> None:
            return None

        async def write(self, message: Any) -> None:
            raise error

    dispatcher = ScriptedDispatcher()
    dispatcher.plan = lambda course: write(course, 5)
    service = made(dispatcher, Registry(process=False))
    with pytest.raises(Gone):
        await service.GenerateStream(asked(), Context())  # type: ignore[arg-type]
    assert dispatcher.lost.get_nowait() is dispatcher.courses.get_nowait()


async def test_a_client_that_leaves_while_it_is_being_written_to_has_lost_its_stream():
    async with scene() as s:
        call = s.stub.GenerateStream(asked())
        course = await s.course()

        async def keep_writing() -> None:
            while True:
                write(course, *[5] * 50)
                await asyncio.sleep(0)

        writing = asyncio.create_task(keep_writing())
        await call.read()
        with capture_logs() as lines:
            call.cancel()
            assert await s.lost() is course
            async with asyncio.timeout(PATIENCE):
                await s.server._interceptor.idle()
        writing.cancel()
        assert not [line for line in lines if line["log_level"] in ("warning", "error")]


async def test_a_call_that_ends_after_its_deadline_is_no_lost_stream(monkeypatch):
    async with scene() as s:
        call = s.stub.GenerateStream(asked(), timeout=PATIENCE)
        course = await s.course()
        monkeypatch.setattr(type(course.request.deadline), "is_over", True)
        call.cancel()
        async with asyncio.timeout(PATIENCE):
            await s.server._interceptor.idle()
        assert s.dispatcher.lost.empty()


async def test_the_calls_deadline_is_the_requests_own():
    async with scene() as s:
        call = s.stub.GenerateStream(asked(), timeout=30)
        left = (await s.course()).request.deadline.remaining()
        assert left is not None
        assert 0 < left < 33
        call.cancel()
        s.dispatcher.plan = writes(1)
        await s.stub.Generate(asked())
        assert (await s.course()).request.deadline.remaining() is None


async def test_a_request_that_dispatch_ends_by_its_deadline_says_so():
    async with scene() as s:
        s.dispatcher.plan = writes(5, end=DeadlineExceeded())
        error = await refused(s.stub.Generate(asked()))
        assert error.reason is Reason.DEADLINE_EXCEEDED


async def test_requests_are_counted_by_model():
    async with scene() as s:
        s.dispatcher.plan = writes(5, 6, 1)
        await s.stub.Generate(asked())
        await all_of(s.stub.GenerateStream(asked()))
        assert s.count("generation_tokens_total") == 6
        assert s.count("e2e_request_latency_seconds_count") == 2
        assert s.count("time_to_first_token_seconds_count") == 2


# ------------------------------------------------------------------------------------------- cancelling


def stored(key: RequestKey, state: Any, owner: Life) -> StoredRequest:
    return StoredRequest(key, 1, 1, state, owner, RequestRecord(), pb.GenerateRequest(), [], 0, 60.0)


async def cancelled(s: Scene, id: str = "r") -> Any:
    return (await s.stub.CancelGeneration(pb.CancelGenerationRequest(request_id=id))).status


async def test_what_runs_here_is_cancelled():
    async with scene() as s:
        s.dispatcher.running.add(RequestKey("default", "r"))
        assert await cancelled(s) == CANCEL.STATUS_CANCELLED


@pytest.mark.parametrize(
    ("state", "status"),
    [
        (pb.Generation.STATE_SUCCEEDED, CANCEL.STATUS_ALREADY_FINISHED),
        (pb.Generation.STATE_FAILED, CANCEL.STATUS_ALREADY_FINISHED),
        (pb.Generation.STATE_CANCELLED, CANCEL.STATUS_CANCELLED),
    ],
)
async def test_what_has_ended_is_told_as_it_ended(state, status):
    async with scene() as s:
        key = RequestKey("default", "r")
        s.stored[key] = stored(key, state, Life("router-b", 1))
        assert await cancelled(s) == status


async def test_what_was_ours_and_runs_no_more_has_ended():
    async with scene() as s:
        key = RequestKey("default", "r")
        s.stored[key] = stored(key, pb.Generation.STATE_DECODING, HERE)
        assert await cancelled(s) == CANCEL.STATUS_ALREADY_FINISHED


async def test_another_routers_request_is_refused_with_its_name():
    async with scene() as s:
        key = RequestKey("default", "r")
        s.stored[key] = stored(key, pb.Generation.STATE_DECODING, Life("router-b", 1))
        error = await refused(cancelled(s))
        assert isinstance(error, Unimplemented)
        assert "router-b" in str(error)


async def test_what_nobody_knows_is_unknown():
    async with scene() as s:
        assert await cancelled(s) == CANCEL.STATUS_UNKNOWN_REQUEST
        assert isinstance(await refused(cancelled(s, "")), InvalidArgument)


KEY = RequestKey("default", "r")


class Stored(Requests):
    """A store with one answer."""

    def __init__(self, answer: StoredRequest | Exception) -> None:
        self._answer = answer

    async def read(self, key: RequestKey, first: int = 0) -> StoredRequest:
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


@pytest.mark.parametrize(
    ("error", "retry_after"), [(StoreUnavailable("away"), RETRY_SECONDS), (NotYetKnown(KEY, 4.0), 4.0)]
)
async def test_a_store_that_can_not_tell_is_said_to_be_away(error, retry_after):
    with pytest.raises(Unavailable) as told:
        await found_in(Stored(error))(KEY)
    assert (told.value.reason, told.value.retry_after) == (Reason.STATE_STORE_AWAY, retry_after)


async def test_the_store_is_believed():
    found = stored(KEY, pb.Generation.STATE_SUCCEEDED, Life("router-b", 1))
    assert await found_in(Stored(found))(KEY) is found
    assert await found_in(Stored(UnknownRequest(KEY)))(KEY) is None


@pytest.mark.parametrize("method", ["ResumeStream", "GetGeneration"])
async def test_what_this_build_lacks_is_refused_by_name(method):
    async with scene() as s:
        if method == "GetGeneration":
            error = await refused(s.stub.GetGeneration(pb.GetGenerationRequest(request_id="r")))
        else:
            error = await refused(all_of(s.stub.ResumeStream(pb.ResumeStreamRequest(request_id="r"))))
        assert isinstance(error, Unimplemented)
        assert error.field == f"InferenceService.{method}"


# ----------------------------------------------------------------------------------------- words, models


async def test_tokens_go_there_and_back():
    async with scene() as s:
        made = await s.stub.Tokenize(pb.TokenizeRequest(text="x = 😀", return_tokens=True))
        assert made.count == len(made.token_ids) == len(made.tokens)
        assert (made.token_ids[0], made.tokens[0]) == (0, "<|begin|>")
        plain = await s.stub.Tokenize(pb.TokenizeRequest(text="x = 😀", add_special_tokens=False))
        assert list(plain.token_ids) == list(made.token_ids)[1:]
        assert not plain.tokens
        text = await s.stub.Detokenize(pb.DetokenizeRequest(token_ids=made.token_ids))
        assert text.text == "x = 😀"
        request = pb.DetokenizeRequest(token_ids=made.token_ids, skip_special_tokens=False)
        assert (await s.stub.Detokenize(request)).text == "<|begin|>x = 😀"


async def test_what_can_not_be_tokenized_is_refused():
    chat = model(id="chat", has_chat_template=True)
    async with scene(Models([tiny(), chat])) as s:
        messages = pb.Messages(messages=[pb.Message(role="user", content="x")])
        assert isinstance(await refused(s.stub.Tokenize(pb.TokenizeRequest())), InvalidArgument)
        error = await refused(s.stub.Tokenize(pb.TokenizeRequest(messages=messages)))
        assert isinstance(error, InvalidArgument)
        assert error.field == "messages"
        error = await refused(s.stub.Tokenize(pb.TokenizeRequest(model="chat", messages=messages)))
        assert isinstance(error, Unimplemented)
        assert error.field in UNIMPLEMENTED_FIELDS
        assert isinstance(await refused(s.stub.Tokenize(pb.TokenizeRequest(model="no", text="x"))), NotFound)
        assert isinstance(await refused(s.stub.Detokenize(pb.DetokenizeRequest(token_ids=[4096]))), InvalidArgument)


async def test_models_are_told_as_they_are_served():
    async with scene(Models([tiny(), model(id="open", window=None)])) as s:
        listed = (await s.stub.ListModels(pb.ListModelsRequest())).models
        assert [found.id for found in listed] == ["tiny-python", "open"]
        assert listed[0] == await s.stub.GetModel(pb.GetModelRequest())
        assert (listed[0].max_context_length, listed[0].max_output_tokens) == (2048, 2047)
        assert (listed[0].vocab_size, list(listed[0].eos_token_ids)) == (4096, [1])
        assert (listed[1].max_context_length, listed[1].max_output_tokens) == (0, 0)
        s.dispatcher.window = 512
        assert (await s.stub.GetModel(pb.GetModelRequest(model="open"))).max_context_length == 512
        assert (await s.stub.GetModel(pb.GetModelRequest(model="tiny-python"))).max_context_length == 512
        assert isinstance(await refused(s.stub.GetModel(pb.GetModelRequest(model="no"))), NotFound)


async def test_a_server_tells_what_it_is_and_what_it_refuses():
    async with scene() as s:
        info = await s.stub.GetServerInfo(pb.GetServerInfoRequest())
        assert (info.version, info.router_id, info.default_model) == ("1.2.3", "router-a", "tiny-python")
        assert tuple(info.unimplemented_fields) == UNIMPLEMENTED_FIELDS
        assert info.limits.max_queued_requests == 8
        assert (info.state_store_available, info.draining) == (True, False)
