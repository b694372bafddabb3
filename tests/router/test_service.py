"""The service over real connections, before a dispatcher that does what a test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

import grpc
import pytest
from structlog.testing import capture_logs

from decant.protos import inference_pb2 as pb
from decant.protos import inference_pb2_grpc
from decant.router.api.auth import Authenticator, NoAuthentication
from decant.router.api.service import InferenceService, ServerInfoSource
from decant.router.api.validation import UNIMPLEMENTED_FIELDS
from decant.router.limits import limits
from decant.router.request.reader_lease import ReaderLease
from decant.router.request.token_stream import TokenStream
from decant.router.text.chat_template import ChatTemplate
from decant.router.text.served_model import Models, ServedModel
from decant.router.timings import RouterTimings
from decant.runtime.channel import open_channel
from decant.runtime.error_details import Reason, ResumePoint
from decant.runtime.errors import (
    Aborted,
    Cancelled,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    OutOfRange,
    QueueFull,
    ServiceError,
    Unimplemented,
    from_call,
)
from decant.runtime.health import Readiness
from decant.runtime.interceptor import ClientDisconnected
from decant.runtime.metrics import Registry, RequestMetrics
from decant.runtime.server import Server
from decant.runtime.server_settings import ServerSettings
from decant.runtime.tls import PeerTls
from decant.state.ids import Incarnation
from tests.router.factories import AT_LENGTH, STOPPED, ScriptedRegistry, model, tiny, write
from tests.router.harness import make_request, until

PATIENCE = 60.0
HERE = Incarnation("router-a", 1)
CANCEL = pb.CancelGenerationResponse


UNREAD_S = RouterTimings().unread_s


@dataclass
class Scene:
    stub: Any
    dispatcher: ScriptedRegistry
    server: Server
    registry: Registry

    async def stream(self) -> TokenStream:
        async with asyncio.timeout(PATIENCE):
            return await self.dispatcher.streams.get()

    async def lost(self) -> TokenStream:
        async with asyncio.timeout(PATIENCE):
            return await self.dispatcher.lost.get()

    def count(self, name: str) -> float | None:
        return self.registry.collectors.get_sample_value(f"decant_{name}", {"model": "tiny-python"})


def made(
    dispatcher: ScriptedRegistry,
    registry: Registry,
    served: Models | None = None,
    callers: Authenticator | None = None,
    unread_s: float = UNREAD_S,
) -> InferenceService:
    served = served or Models([tiny()])
    reported = limits(max_queued_requests=8, resume_grace_ms=0, result_ttl_ms=0)
    about = ServerInfoSource(HERE, "1.2.3", reported, lambda: True, lambda: False)
    authenticator = callers or NoAuthentication(served)
    return InferenceService(served, cast(Any, dispatcher), about, RequestMetrics(registry), authenticator, unread_s)


@asynccontextmanager
async def scene(
    served: Models | None = None, callers: Authenticator | None = None, unread_s: float = UNREAD_S
) -> AsyncIterator[Scene]:
    """Anybody may call, unless it is said who."""
    dispatcher, registry = ScriptedRegistry(), Registry(process=False)
    served = served or Models([tiny()])
    service = made(dispatcher, registry, served, callers, unread_s).service()
    server = Server([service], ServerSettings(port=0, drain_seconds=1.0), Readiness(), registry)
    await server.start()
    running = asyncio.create_task(server.run())
    channel = open_channel(server.address, PeerTls())
    try:
        yield Scene(inference_pb2_grpc.InferenceServiceStub(channel), dispatcher, server, registry)
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
    """What is left of a stream."""
    messages = []
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)
    if await call.code() is not grpc.StatusCode.OK:
        await call.wait_for_connection()  # raises what it ended with
    return messages


def writes(*tokens: int, end: Any = STOPPED) -> Callable[[TokenStream], None]:
    return lambda stream: write(stream, *tokens, end=end)


# ------------------------------------------------------------------------------------------- generating


async def test_a_stream_arrives_as_it_is_written():
    async with scene() as s:
        call = s.stub.GenerateStream(asked(request_id="r"))
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
        assert s.dispatcher.lost.empty()


async def test_nothing_is_sent_before_the_first_token():
    """Metadata alone would commit the call: a client's gRPC could not try again elsewhere."""
    async with scene() as s:
        call = s.stub.GenerateStream(asked())
        stream = await s.stream()
        metadata = asyncio.ensure_future(call.initial_metadata())
        done, _ = await asyncio.wait([metadata], timeout=0.3)
        assert not done
        write(stream, 5)
        async with asyncio.timeout(PATIENCE):
            await metadata
        write(stream, end=AT_LENGTH)
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
        stream = await s.stream()
        write(stream, *[5] * tokens)
        with capture_logs() as lines:
            call.cancel()
            assert await s.lost() is stream
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

        def invocation_metadata(self) -> tuple[()]:
            return ()

        async def write(self, message: Any) -> None:
            raise error

    dispatcher = ScriptedRegistry()
    dispatcher.plan = lambda stream: write(stream, 5)
    service = made(dispatcher, Registry(process=False))
    with pytest.raises(ClientDisconnected):
        await service.GenerateStream(asked(), Context())
    assert dispatcher.lost.get_nowait() is dispatcher.streams.get_nowait()


async def test_a_client_that_leaves_while_it_is_being_written_to_has_lost_its_stream():
    async with scene() as s:
        call = s.stub.GenerateStream(asked())
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
                await s.server._interceptor.idle()
        writing.cancel()
        assert not [line for line in lines if line["log_level"] in ("warning", "error")]


async def test_a_call_that_ends_after_its_deadline_is_no_lost_stream(monkeypatch):
    async with scene() as s:
        call = s.stub.GenerateStream(asked(), timeout=PATIENCE)
        stream = await s.stream()
        monkeypatch.setattr(type(stream.request.deadline), "is_over", True)
        call.cancel()
        async with asyncio.timeout(PATIENCE):
            await s.server._interceptor.idle()
        assert s.dispatcher.lost.empty()


async def test_the_calls_deadline_is_the_requests_own():
    async with scene() as s:
        call = s.stub.GenerateStream(asked(), timeout=30)
        left = (await s.stream()).request.deadline.remaining()
        assert left is not None
        assert 0 < left < 33
        call.cancel()
        s.dispatcher.plan = writes(1)
        await s.stub.Generate(asked())
        assert (await s.stream()).request.deadline.remaining() is None


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


# ------------------------------------------------------------------------------------------- coming back


def resumed(s: Scene, after_seq: int = 0, id: str = "r") -> Any:
    return s.stub.ResumeStream(pb.ResumeStreamRequest(request_id=id, after_seq=after_seq))


async def test_the_newest_stream_of_a_request_owns_it():
    async with scene() as s:
        first = s.stub.GenerateStream(asked(request_id="r"))
        stream = await s.stream()
        write(stream, 5, 6)
        await first.read()
        second = resumed(s)
        assert (await second.read()).HasField("started")
        older = await refused(all_of(first))
        assert (type(older), older.reason) == (Aborted, Reason.SUPERSEDED)
        third = resumed(s, after_seq=1)
        assert (await third.read()).HasField("started")
        assert (await refused(all_of(second))).reason is Reason.SUPERSEDED
        write(stream, 1, end=STOPPED)
        rest = await all_of(third)
        assert [message.seq for message in rest if message.HasField("delta")][-1] == 3
        assert rest[-1].usage.completion_tokens == 3
        assert s.dispatcher.lost.empty(), "a stream that another took over is not lost"


async def test_a_stream_whose_client_takes_nothing_is_superseded_too():
    async with scene() as s:
        first = s.stub.GenerateStream(asked(request_id="r"))
        stream = await s.stream()
        write(stream, 5)
        await first.read()
        write(stream, *[5] * 100_000)
        stuck = stream.reader
        second = resumed(s, after_seq=100_000)
        await second.read()
        assert stream.reader not in (None, stuck)
        write(stream, end=AT_LENGTH)
        assert (await all_of(second))[-1].HasField("finished")
        first.cancel()


async def test_a_finished_request_whose_client_reads_nothing_is_let_go_and_can_be_resumed():
    async with scene(unread_s=0.2) as s, asyncio.timeout(PATIENCE):
        first = s.stub.GenerateStream(asked(request_id="r", response=pb.ResponseOptions(token_ids=True)))
        stream = await s.stream()
        write(stream, 5)
        await first.read()
        reader: Any = stream.reader
        now = asyncio.get_running_loop().time
        while reader._sending_since is None or now() - reader._sending_since < 0.5:  # until the connection is full
            write(stream, *[4000] * 100_000)
            await asyncio.sleep(0.05)
        assert stream.reader is reader, "the request still runs"
        write(stream, end=AT_LENGTH)
        await until(lambda: stream.reader is None)
        error = await refused(all_of(first))
        assert (type(error), error.reason) == (Aborted, Reason.SLOW_READER)
        assert error.resumable
        count = len(stream.tokens)
        assert (await all_of(resumed(s, after_seq=count - 1)))[-1].usage.completion_tokens == count


async def test_a_client_that_reads_slowly_keeps_its_stream():
    stream = TokenStream(make_request())
    stream.end = AT_LENGTH
    now = 1.0

    async def slow(_: pb.GenerateStreamResponse) -> None:
        nonlocal now
        now += 0.9 * UNREAD_S
        reader._check()

    reader = ReaderLease(stream)
    reader._now = lambda: now
    with reader:
        send = reader.watched(slow)
        for _ in range(5):
            await send(pb.GenerateStreamResponse())
        await asyncio.sleep(0)
        assert stream.reader is reader


async def test_a_tail_that_is_uncertain_is_refused_and_gone_on_with_from_what_is_certain():
    async with scene() as s:
        s.stub.GenerateStream(asked(request_id="r"))
        stream = await s.stream()
        write(stream, 70, 71)
        stream.may_lag_client = True
        behind = resumed(s, after_seq=4)
        assert stream.mark_tail_uncertain() == 2
        error = await refused(all_of(behind))
        assert (type(error), error.reason) == (Aborted, Reason.TAIL_UNCERTAIN)
        assert error.fault.resume == ResumePoint(0, 2)
        write(stream, 72, 73, 1, end=STOPPED)
        assert (await all_of(resumed(s, after_seq=2)))[-1].usage.completion_tokens == 5
        assert (await all_of(resumed(s, after_seq=4)))[-1].HasField("finished"), "these are the new ones"


async def test_the_last_of_several_readers_loses_the_stream():
    async with scene() as s:
        s.stub.GenerateStream(asked(request_id="r"))
        stream = await s.stream()
        write(stream, 5)
        second = resumed(s)
        await second.read()
        second.cancel()
        assert await s.lost() is stream
        assert s.dispatcher.lost.empty()


async def test_resumed_streams_join_to_the_same_text():
    async with scene() as s:
        s.dispatcher.plan = writes(70, 71, 72, 1)
        whole = await all_of(s.stub.GenerateStream(asked(request_id="r")))
        text = "".join(message.delta.text for message in whole)
        for after_seq in range(5):
            rest = await all_of(resumed(s, after_seq))
            assert rest[0].HasField("started")
            assert rest[-1].HasField("finished")
            assert text.endswith("".join(message.delta.text for message in rest))
            assert sum(message.delta.num_tokens for message in rest) == 4 - after_seq
        assert s.count("generation_tokens_total") == 4, "a token is counted once, however often it is shown"
        assert s.count("time_to_first_token_seconds_count") == 1


async def test_a_seq_that_was_never_sent_is_out_of_range():
    async with scene() as s:
        s.dispatcher.plan = writes(5, 6, 1)
        await all_of(s.stub.GenerateStream(asked(request_id="r")))
        error = await refused(all_of(resumed(s, after_seq=4)))
        assert isinstance(error, OutOfRange)
        assert error.resume == ResumePoint(0, 3)


@pytest.mark.parametrize("call", ["ResumeStream", "GetGeneration"])
async def test_what_nobody_knows_can_not_be_come_back_to(call):
    async with scene() as s:

        def asks(id: str) -> Any:
            if call == "ResumeStream":
                return all_of(resumed(s, id=id))
            return s.stub.GetGeneration(pb.GetGenerationRequest(request_id=id))

        error = await refused(asks("nobody's"))
        assert (type(error), error.reason) == (NotFound, Reason.REQUEST_NOT_FOUND)
        assert isinstance(await refused(asks("")), InvalidArgument)


async def test_a_generation_tells_what_is_written_so_far():
    async with scene() as s:
        options = pb.ResponseOptions(token_ids=True, logprobs=1)
        call = s.stub.GenerateStream(asked(request_id="r", response=options))
        stream = await s.stream()
        write(stream, 70, 71)
        told = await s.stub.GetGeneration(pb.GetGenerationRequest(request_id="r"))
        assert (told.last_seq, list(told.result.outputs[0].token_ids)) == (2, [70, 71])
        assert not told.HasField("expire_time")
        assert not told.result.outputs[0].HasField("finished")
        write(stream, 1, end=STOPPED)
        text = "".join([message.delta.text async for message in call])
        told = await s.stub.GetGeneration(pb.GetGenerationRequest(request_id="r"))
        assert told.result.outputs[0].text == text
        assert told.result.outputs[0].finished.eos_token_id == 1
        assert told.result.usage.completion_tokens == 3
        assert told.HasField("expire_time")
        assert not told.HasField("error")


async def test_a_generation_that_failed_tells_its_error_and_what_was_written():
    async with scene() as s:
        s.dispatcher.plan = writes(70, 71, end=DeadlineExceeded())
        await refused(all_of(s.stub.GenerateStream(asked(request_id="r"))))
        told = await s.stub.GetGeneration(pb.GetGenerationRequest(request_id="r"))
        assert told.error.code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
        assert told.result.outputs[0].finished.finish_reason == pb.FINISH_REASON_TIME_LIMIT
        assert told.result.outputs[0].text


# ------------------------------------------------------------------------------------------- cancelling


async def cancelled(s: Scene, id: str = "r") -> Any:
    return (await s.stub.CancelGeneration(pb.CancelGenerationRequest(request_id=id))).status


async def test_a_cancel_may_be_repeated():
    async with scene() as s:
        call = s.stub.GenerateStream(asked(request_id="r"))
        await s.stream()
        for _ in range(2):
            assert await cancelled(s) == CANCEL.STATUS_CANCELLED
        assert isinstance(await refused(all_of(call)), Cancelled)


async def test_what_has_ended_by_itself_is_not_cancelled():
    async with scene() as s:
        s.dispatcher.plan = writes(5, 1)
        await all_of(s.stub.GenerateStream(asked(request_id="r")))
        assert await cancelled(s) == CANCEL.STATUS_ALREADY_FINISHED


async def test_what_nobody_knows_is_unknown():
    async with scene() as s:
        assert await cancelled(s) == CANCEL.STATUS_UNKNOWN_REQUEST
        assert isinstance(await refused(cancelled(s, "")), InvalidArgument)


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


async def test_what_can_not_fit_the_context_is_refused_before_it_is_tokenized(monkeypatch: pytest.MonkeyPatch):
    async def never(*_: Any, **__: Any) -> list[int]:
        raise AssertionError

    chat = model(id="chat", chat=ChatTemplate("{{ messages[0].content }}", {}))
    async with scene(Models([tiny(), chat])) as s:
        s.dispatcher.context_length = 64
        monkeypatch.setattr(ServedModel, "encode", never)
        monkeypatch.setattr(ServedModel, "decode", never)
        text = "def f(x):\n" * 1000
        said = pb.Messages(messages=[pb.Message(role="user", content=text)])
        calls = {
            "prompt": s.stub.Generate(asked(prompt=text)),
            "messages": s.stub.Generate(pb.GenerateRequest(model="chat", messages=said)),
            "text": s.stub.Tokenize(pb.TokenizeRequest(text=text)),
        }
        for field, sent in calls.items():
            error = await refused(sent)
            assert isinstance(error, InvalidArgument)
            assert (error.field, error.reason) == (field, Reason.PROMPT_TOO_LONG)
            assert "64" in error.limit
            assert error.value.startswith("at least ")
        error = await refused(s.stub.Detokenize(pb.DetokenizeRequest(token_ids=[5] * 65)))
        assert isinstance(error, InvalidArgument)
        assert (error.field, error.value) == ("token_ids", "65")


async def test_work_on_words_is_one_of_its_tenants_calls():
    async with scene() as s:
        await s.stub.Tokenize(pb.TokenizeRequest(text="x"))
        await s.stub.Detokenize(pb.DetokenizeRequest(token_ids=[5]))
        assert s.dispatcher.booked_for == ["default", "default"]


async def test_a_conversation_is_tokenized_as_its_model_writes_it():
    chat = model(id="chat", chat=ChatTemplate("{{ first }}{{ messages[0].content }}", {"first": "x"}))
    async with scene(Models([tiny(), chat])) as s:
        messages = pb.Messages(messages=[pb.Message(role="user", content="x = 1")])
        made = await s.stub.Tokenize(pb.TokenizeRequest(model="chat", messages=messages))
        plain = pb.TokenizeRequest(text="xx = 1", add_special_tokens=False)
        assert made.token_ids == (await s.stub.Tokenize(plain)).token_ids


async def test_what_can_not_be_tokenized_is_refused():
    async with scene() as s:
        messages = pb.Messages(messages=[pb.Message(role="user", content="x")])
        assert isinstance(await refused(s.stub.Tokenize(pb.TokenizeRequest())), InvalidArgument)
        error = await refused(s.stub.Tokenize(pb.TokenizeRequest(messages=messages)))
        assert isinstance(error, InvalidArgument)
        assert error.field == "messages"
        error = await refused(s.stub.Tokenize(pb.TokenizeRequest(messages=messages, add_special_tokens=False)))
        assert isinstance(error, InvalidArgument)
        assert error.field == "add_special_tokens"
        assert isinstance(await refused(s.stub.Tokenize(pb.TokenizeRequest(model="no", text="x"))), NotFound)
        assert isinstance(await refused(s.stub.Detokenize(pb.DetokenizeRequest(token_ids=[4096]))), InvalidArgument)


@pytest.mark.parametrize("method", ["ListModels", "GetModel", "GetServerInfo"])
async def test_what_a_newer_client_asks_is_refused_by_its_number_everywhere(method: str):
    newer: dict[str, Any] = {
        "ListModels": pb.ListModelsRequest,
        "GetModel": pb.GetModelRequest,
        "GetServerInfo": pb.GetServerInfoRequest,
    }
    async with scene() as s:
        request = newer[method].FromString(b"\xc0\x3e\x01")  # field 1000
        error = await refused(getattr(s.stub, method)(request))
        assert isinstance(error, Unimplemented)
        assert error.field.endswith(".1000")


async def test_models_are_told_as_they_are_served():
    async with scene(Models([tiny(), model(id="open", max_context_length=None)])) as s:
        listed = (await s.stub.ListModels(pb.ListModelsRequest())).models
        assert [found.id for found in listed] == ["tiny-python", "open"]
        assert listed[0] == await s.stub.GetModel(pb.GetModelRequest())
        assert (listed[0].max_context_length, listed[0].max_output_tokens) == (2048, 2047)
        assert (listed[0].vocab_size, list(listed[0].eos_token_ids)) == (4096, [1])
        assert (listed[1].max_context_length, listed[1].max_output_tokens) == (0, 0)
        s.dispatcher.context_length = 512
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
