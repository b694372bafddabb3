from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from decant.protos import inference_pb2 as pb
from decant.router.request.reader_lease import ReaderLease
from decant.router.request.token_stream import TokenStream
from decant.runtime.error_details import Reason, ResumePoint
from decant.runtime.errors import (
    Aborted,
    Cancelled,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    OutOfRange,
)
from tests.router.factories import AT_LENGTH, STOPPED, write
from tests.router.harness import make_request, until
from tests.router.service_harness import (
    CANCEL,
    PATIENCE,
    UNREAD_S,
    Harness,
    all_of,
    error_of_call,
    generate_request,
    harness,
    writes,
)


def resumed(s: Harness, after_seq: int = 0, id: str = "r") -> Any:
    return s.stub.ResumeStream(pb.ResumeStreamRequest(request_id=id, after_seq=after_seq))


async def test_the_newest_stream_of_a_request_owns_it():
    async with harness() as s:
        first = s.stub.GenerateStream(generate_request(request_id="r"))
        stream = await s.stream()
        write(stream, 5, 6)
        await first.read()
        second = resumed(s)
        assert (await second.read()).HasField("started")
        older = await error_of_call(all_of(first))
        assert (type(older), older.reason) == (Aborted, Reason.SUPERSEDED)
        third = resumed(s, after_seq=1)
        assert (await third.read()).HasField("started")
        assert (await error_of_call(all_of(second))).reason is Reason.SUPERSEDED
        write(stream, 1, end=STOPPED)
        rest = await all_of(third)
        assert [message.seq for message in rest if message.HasField("delta")][-1] == 3
        assert rest[-1].usage.completion_tokens == 3
        assert s.requests.lost.empty(), "a stream that another took over is not lost"


@pytest.mark.rule(
    "newer-stream-supersedes",
    "router/request/reader_lease.py:ReaderLease.supersede",
    "router/request/reader_lease.py:ReaderLease.__enter__",
)
async def test_a_stream_whose_client_takes_nothing_is_superseded_too():
    async with harness() as s:
        first = s.stub.GenerateStream(generate_request(request_id="r"))
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


@pytest.mark.slow
async def test_a_finished_request_whose_client_reads_nothing_is_let_go_and_can_be_resumed():
    async with harness(unread_s=0.2) as s, asyncio.timeout(PATIENCE):
        first = s.stub.GenerateStream(generate_request(request_id="r", response=pb.ResponseOptions(token_ids=True)))
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
        error = await error_of_call(all_of(first))
        assert (type(error), error.reason) == (Aborted, Reason.SLOW_READER)
        assert error.resumable
        count = len(stream.outputs[0].tokens)
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


async def test_an_uncertain_tail_is_refused_and_resumes_from_the_certain_tokens():
    async with harness() as s:
        first = s.stub.GenerateStream(generate_request(request_id="r"))
        stream = await s.stream()
        write(stream, 70, 71)
        await first.read()
        stream.tail.may_lag_client = True
        behind = resumed(s, after_seq=4)
        assert stream.mark_tail_uncertain() == [2]
        error = await error_of_call(all_of(behind))
        assert (type(error), error.reason) == (Aborted, Reason.TAIL_UNCERTAIN)
        assert error.detail.resume == ResumePoint(0, 2)
        write(stream, 72, 73, 1, end=STOPPED)
        assert (await all_of(resumed(s, after_seq=2)))[-1].usage.completion_tokens == 5
        assert (await all_of(resumed(s, after_seq=4)))[-1].HasField("finished"), "these are the new ones"


async def test_the_last_of_several_readers_loses_the_stream():
    async with harness() as s:
        s.stub.GenerateStream(generate_request(request_id="r"))
        stream = await s.stream()
        write(stream, 5)
        second = resumed(s)
        await second.read()
        second.cancel()
        assert await s.lost() is stream
        assert s.requests.lost.empty()


@pytest.mark.rule("started-before-first-delta", "router/api/response_writer.py:ResponseWriter.stream")
async def test_resumed_streams_join_to_the_same_text():
    async with harness() as s:
        s.requests.plan = writes(70, 71, 72, 1)
        whole = await all_of(s.stub.GenerateStream(generate_request(request_id="r")))
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
    async with harness() as s:
        s.requests.plan = writes(5, 6, 1)
        await all_of(s.stub.GenerateStream(generate_request(request_id="r")))
        error = await error_of_call(all_of(resumed(s, after_seq=4)))
        assert isinstance(error, OutOfRange)
        assert error.resume == ResumePoint(0, 3)


@pytest.mark.parametrize("call", ["ResumeStream", "GetGeneration"])
async def test_an_unknown_request_cannot_be_resumed(call):
    async with harness() as s:

        def asks(id: str) -> Any:
            if call == "ResumeStream":
                return all_of(resumed(s, id=id))
            return s.stub.GetGeneration(pb.GetGenerationRequest(request_id=id))

        error = await error_of_call(asks("absent"))
        assert (type(error), error.reason) == (NotFound, Reason.REQUEST_NOT_FOUND)
        assert isinstance(await error_of_call(asks("")), InvalidArgument)


async def test_a_generation_has_the_output_so_far():
    async with harness() as s:
        options = pb.ResponseOptions(token_ids=True, logprobs=1)
        call = s.stub.GenerateStream(generate_request(request_id="r", response=options))
        stream = await s.stream()
        write(stream, 70, 71)
        generation = await s.stub.GetGeneration(pb.GetGenerationRequest(request_id="r"))
        assert (generation.last_seq, list(generation.result.outputs[0].token_ids)) == (2, [70, 71])
        assert not generation.HasField("expire_time")
        assert not generation.result.outputs[0].HasField("finished")
        write(stream, 1, end=STOPPED)
        text = "".join([message.delta.text async for message in call])
        generation = await s.stub.GetGeneration(pb.GetGenerationRequest(request_id="r"))
        assert generation.result.outputs[0].text == text
        assert generation.result.outputs[0].finished.eos_token_id == 1
        assert generation.result.usage.completion_tokens == 3
        assert generation.HasField("expire_time")
        assert not generation.HasField("error")


async def test_a_failed_generation_has_its_error_and_output():
    async with harness() as s:
        s.requests.plan = writes(70, 71, end=DeadlineExceeded())
        await error_of_call(all_of(s.stub.GenerateStream(generate_request(request_id="r"))))
        generation = await s.stub.GetGeneration(pb.GetGenerationRequest(request_id="r"))
        assert generation.error.code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
        assert generation.result.outputs[0].finished.finish_reason == pb.FINISH_REASON_TIME_LIMIT
        assert generation.result.outputs[0].text


async def cancelled(s: Harness, id: str = "r") -> Any:
    return (await s.stub.CancelGeneration(pb.CancelGenerationRequest(request_id=id))).status


async def test_a_cancel_may_be_repeated():
    async with harness() as s:
        call = s.stub.GenerateStream(generate_request(request_id="r"))
        await s.stream()
        for _ in range(2):
            assert await cancelled(s) == CANCEL.STATUS_CANCELLED
        assert isinstance(await error_of_call(all_of(call)), Cancelled)


async def test_a_finished_request_is_not_cancelled_by_a_resume():
    async with harness() as s:
        s.requests.plan = writes(5, 1)
        await all_of(s.stub.GenerateStream(generate_request(request_id="r")))
        assert await cancelled(s) == CANCEL.STATUS_ALREADY_FINISHED


async def test_a_cancel_of_an_unknown_request_returns_unknown():
    async with harness() as s:
        assert await cancelled(s) == CANCEL.STATUS_UNKNOWN_REQUEST
        assert isinstance(await error_of_call(cancelled(s, "")), InvalidArgument)
