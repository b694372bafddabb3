from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decant.protos import inference_pb2 as pb
from decant.protos.kserve import grpc_service_pb2 as kserve
from decant.protos.vllm import vllm_engine_pb2 as vllm
from decant.router.api.auth import DEFAULT_TENANT, AuthenticatedCall, Tenant
from decant.router.api.keepalive import LOOKS, StreamKeepalive
from decant.router.kserve.tensors import STREAM, TEXT_INPUT
from decant.router.request.token_stream import TokenStream
from decant.router.settings import RouterSettings
from decant.runtime.settings import InvalidSettings
from decant.runtime.settings_sources import load
from decant.state.ids import RequestKey
from tests.router import virtual_time
from tests.router.factories import AT_LENGTH, valid, write
from tests.router.service_harness import PATIENCE, Harness, all_of, generate_request, harness

SILENT_S = 2.0
LONGEST_S = SILENT_S * (1 + 1 / LOOKS)
"""Longest silence of a stream whose client reads at once."""


class Context:
    """A client's call: what it received, with the times. A message takes ``busy_s`` to be read."""

    def __init__(self) -> None:
        self.received: list[tuple[float, pb.GenerateStreamResponse]] = []
        self.accepted_at: float | None = None
        self.busy_s = 0.0

    async def send_initial_metadata(self, _: Any) -> None:
        self.accepted_at = now()

    async def write(self, message: pb.GenerateStreamResponse) -> None:
        sent = pb.GenerateStreamResponse.FromString(message.SerializeToString())
        await asyncio.sleep(self.busy_s)
        self.received.append((now(), sent))


def now() -> float:
    return asyncio.get_running_loop().time()


def progress(key: RequestKey) -> pb.Waiting:
    return pb.Waiting(state=pb.Generation.STATE_QUEUED, attempt=1, requests_ahead=len(key.id))


def call_of(context: Context) -> AuthenticatedCall:
    return AuthenticatedCall(Tenant("t", cast(Any, None)), cast(Any, context))


def delta(seq: int) -> pb.GenerateStreamResponse:
    return pb.GenerateStreamResponse(request_id="r", seq=seq, delta=pb.Delta(num_tokens=1))


def last(seq: int) -> pb.GenerateStreamResponse:
    return pb.GenerateStreamResponse(request_id="r", seq=seq, finished=pb.Finished(), usage=pb.Usage())


PAUSES = st.lists(st.floats(0, 10), max_size=6)


@given(PAUSES, st.floats(0, 5), st.integers(0, 9), st.floats(0, 5))
@settings(max_examples=100, deadline=None)
def test_an_accepted_stream_is_never_silent_for_long_and_its_messages_are_otherwise_the_same(
    pauses: list[float], accepted_after: float, seq: int, left_open: float
) -> None:
    context = Context()

    async def answer() -> None:
        keepalive, call = StreamKeepalive(SILENT_S, progress), call_of(context)
        with keepalive.keep(call, "r", call.write, seq) as kept:
            await asyncio.sleep(accepted_after)
            assert not context.received, "nothing before the acceptance: a refusal is trailers alone"
            await call.send_acceptance()
            for count, pause in enumerate(pauses, 1):
                await asyncio.sleep(pause)
                await kept.write(delta(seq + count))
            await kept.write(last(seq + len(pauses)))
            await asyncio.sleep(left_open)
        await asyncio.sleep(10 * SILENT_S)

    virtual_time.run(answer())
    assert context.accepted_at is not None
    times = [context.accepted_at, *(at for at, _ in context.received)]
    assert all(after - before <= LONGEST_S + 1e-6 for before, after in pairwise(times))
    messages = [message for _, message in context.received]
    assert [message.seq for message in messages] == sorted(message.seq for message in messages)
    answered = [message for message in messages if not message.HasField("waiting")]
    assert answered == [*(delta(seq + count) for count in range(1, len(pauses) + 1)), last(seq + len(pauses))]
    assert messages[-1].HasField("usage"), "nothing follows the last message"
    for before, message in zip([None, *messages], messages, strict=False):
        if message.HasField("waiting"):
            assert (message.request_id, message.seq) == ("r", seq if before is None else before.seq)
            assert message.waiting.silent_ms >= 1000 * SILENT_S - 1e-6
    assert len(messages) - len(answered) <= (accepted_after + sum(pauses)) / SILENT_S + 1e-6


def test_a_stream_that_sends_often_gets_no_message_more() -> None:
    context = Context()

    async def answer() -> None:
        keepalive, call = StreamKeepalive(SILENT_S, progress), call_of(context)
        with keepalive.keep(call, "r", call.write) as kept:
            await call.send_acceptance()
            for count in range(1, 30):
                await asyncio.sleep(0.9 * SILENT_S)
                await kept.write(delta(count))
        assert not keepalive.streams

    virtual_time.run(answer())
    assert [message for _, message in context.received] == [delta(count) for count in range(1, 30)]


def test_a_client_that_reads_late_gets_no_pile_of_messages_and_the_answer_in_order() -> None:
    context = Context()
    context.busy_s = 100 * SILENT_S

    async def answer() -> None:
        keepalive, call = StreamKeepalive(SILENT_S, progress), call_of(context)
        with keepalive.keep(call, "r", call.write) as kept:
            await call.send_acceptance()
            await asyncio.sleep(50 * SILENT_S)  # one `waiting` is on its way all the time
            await kept.write(delta(1))
            await kept.write(last(1))

    virtual_time.run(answer())
    kinds = [message.WhichOneof("event") for _, message in context.received]
    assert kinds == ["waiting", "delta", "finished"]


def test_a_message_that_is_on_its_way_when_its_stream_ends_keeps_its_turn() -> None:
    context = Context()
    context.busy_s = 10 * SILENT_S

    async def answer() -> None:
        keepalive, call = StreamKeepalive(SILENT_S, progress), call_of(context)
        with keepalive.keep(call, "r", call.write):
            await call.send_acceptance()
            await asyncio.sleep(2 * SILENT_S)
            assert call.is_sending
        await call.write(delta(1))  # of another request of the call
        assert len(asyncio.all_tasks()) == 1

    virtual_time.run(answer())
    (first, waiting), (then, other) = context.received
    assert (waiting.HasField("waiting"), other) == (True, delta(1))
    assert then >= first + context.busy_s, "gRPC takes one message at a time: it loses the other, and the call hangs"


def test_a_message_that_is_not_on_its_way_when_its_stream_ends_is_not_sent() -> None:
    context = Context()

    async def answer() -> None:
        keepalive, call = StreamKeepalive(SILENT_S, progress), call_of(context)
        with keepalive.keep(call, "r", call.write) as kept:
            await call.send_acceptance()
            kept.send_waiting()
        await virtual_time.settle()
        assert len(asyncio.all_tasks()) == 1

    virtual_time.run(answer())
    assert not context.received


async def silence(s: Harness, call: Any) -> None:
    """Let the call, once it is accepted, be silent for long."""
    async with asyncio.timeout(PATIENCE):
        await call.initial_metadata()
        (kept,) = s.keepalive.streams
        while kept._call.is_sending:  # noqa: ASYNC110 - the client read it before the server noticed
            await asyncio.sleep(0)
    kept.send_waiting()


async def test_a_silent_stream_says_what_its_request_waits_for() -> None:
    async with harness() as s:
        call = s.stub.GenerateStream(generate_request())
        stream = await s.stream()
        await silence(s, call)
        waiting = await call.read()
        assert (waiting.request_id, waiting.seq) == (stream.request.key.id, 0)
        assert (waiting.waiting.state, waiting.waiting.attempt) == (pb.Generation.STATE_QUEUED, 1)
        write(stream, 5, 6)
        assert [(await call.read()).WhichOneof("event") for _ in range(2)] == ["started", "delta"]
        await silence(s, call)
        assert (await call.read()).seq == 2
        resumed = s.stub.ResumeStream(pb.ResumeStreamRequest(request_id=stream.request.key.id, after_seq=1))
        write(stream, end=AT_LENGTH)
        await all_of(resumed)
    assert not s.keepalive.streams


async def test_a_resumed_stream_is_at_the_seq_that_its_client_has() -> None:
    async with harness() as s:
        stream = TokenStream(await valid(request_id="r"))
        stream.tail.may_lag_client = True  # the stream waits for the token that its client has
        s.requests.known[RequestKey(DEFAULT_TENANT, "r")] = stream
        call = s.stub.ResumeStream(pb.ResumeStreamRequest(request_id="r", after_seq=1))
        await silence(s, call)
        message = await call.read()
        assert (message.HasField("waiting"), message.request_id, message.seq) == (True, "r", 1)
        write(stream, 5, end=AT_LENGTH)
        assert [message.WhichOneof("event") for message in await all_of(call)] == ["started", "finished"]


async def test_a_vllm_stream_gets_a_response_that_is_neither_chunk_nor_end() -> None:
    async with harness() as s:
        tokenized = vllm.TokenizedInput(input_ids=[5, 6, 7])
        call = s.vllm.Generate(vllm.GenerateRequest(tokenized=tokenized, stream=True))
        stream = await s.stream()
        await silence(s, call)
        assert await call.read() == vllm.GenerateResponse()
        write(stream, 5, end=AT_LENGTH)
        assert [message.WhichOneof("response") for message in await all_of(call)] == ["chunk", "complete"]


async def test_a_kserve_stream_gets_an_empty_piece_of_text() -> None:
    async with harness() as s:
        request = kserve.ModelInferRequest(model_name="tiny-python")
        text = request.inputs.add(name=TEXT_INPUT, datatype="BYTES", shape=[1])
        text.contents.bytes_contents.append(b"def f(x):")
        request.inputs.add(name=STREAM, datatype="BOOL", shape=[1]).contents.bool_contents.append(True)
        call = s.kserve.ModelStreamInfer(iter([request]))
        stream = await s.stream()
        await silence(s, call)
        (piece,) = (await call.read()).infer_response.raw_output_contents
        assert piece == b"\0\0\0\0"
        write(stream, 5, end=AT_LENGTH)
        assert await all_of(call)


@pytest.mark.parametrize("seconds", ["-1", "0.009", "1e-9", "nan", "3601"])
def test_a_time_that_would_keep_the_timer_busy_is_refused(seconds: str) -> None:
    with pytest.raises(InvalidSettings, match=r"--stream-keepalive-seconds.+, got"):
        load(RouterSettings, ["--models", "m", "--stream-keepalive-seconds", seconds], {})
    for allowed in ("0", "0.01"):
        load(RouterSettings, ["--models", "m", "--stream-keepalive-seconds", allowed], {})
