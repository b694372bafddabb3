from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decant.protos import inference_pb2 as pb
from decant.router.api.response_writer import ResponseWriter
from decant.router.execution.journal_writer import append_new
from decant.router.request.output import Finish
from decant.router.request.reader_lease import wait_for_resume_point
from decant.router.request.stored import new_record, stream_from_store
from decant.router.request.token_stream import TokenStream
from decant.runtime.error_details import ResumePoint
from decant.runtime.errors import OutOfRange, ServiceError, from_call
from decant.state.ids import Incarnation
from decant.state.logprobs import Logprobs
from decant.state.owned import OwnedRequest, StoredRequest
from tests.router.factories import logprobs, tiny, valid
from tests.router.response_reader import Reader, settle
from tests.router.service_harness import generate_request, harness

LENGTH = Finish(pb.FINISH_REASON_LENGTH)
TOKENS = st.lists(st.integers(2, 4095), min_size=1, max_size=8)


async def stream_of(outputs: int, **fields: Any) -> TokenStream:
    fields["sampling"] = pb.SamplingParams(n=outputs, seed=1)
    fields.setdefault("response", pb.ResponseOptions(token_ids=True))
    return TokenStream(await valid(request_id="r", stopping=pb.StoppingParams(max_tokens=20), **fields))


def write_in_turn(stream: TokenStream, answers: list[list[int]], order: list[int]) -> None:
    """Write the next token of the outputs in ``order``, then all that is left."""
    for index in [*order, *(index for index, answer in enumerate(answers) for _ in answer)]:
        output, answer = stream.outputs[index], answers[index]
        if len(output.tokens) < len(answer):
            token = answer[len(output.tokens)]
            assert output.write(output.position, token, logprobs(1, token)) is None
            if len(output.tokens) == len(answer):
                output.finish = LENGTH


@pytest.mark.slow
@given(st.data())
@settings(max_examples=60, deadline=None)
async def test_each_output_is_whole_however_they_are_mixed_and_wherever_the_stream_resumes(data: st.DataObject) -> None:
    answers = data.draw(st.lists(TOKENS, min_size=2, max_size=4))
    first = Reader(await stream_of(len(answers)))
    first.stream.begin_writing()
    first.answer = ResponseWriter(first.stream, tiny())
    task = asyncio.create_task(first.read())
    order = data.draw(st.lists(st.integers(0, len(answers) - 1), max_size=40))
    for index in order:
        write_one(first.stream, answers, index)
        await settle()
    write_in_turn(first.stream, answers, [])
    first.stream.end = first.stream.finish
    first.stream.notify()
    await task
    check_messages(first.messages, answers)
    seen = first.messages[: data.draw(st.integers(0, len(first.messages)))]
    sent = [sum(each.num_tokens for each in deltas(seen) if each.index == index) for index in range(len(answers))]
    later = Reader(first.stream)
    later.answer = ResponseWriter(first.stream, tiny(), sent)
    await later.read()
    both = [message for message in [*seen, *later.messages] if message.HasField("delta")]
    check_messages([later.messages[0], *both, *ends(later.messages)], answers)


@pytest.mark.parametrize("short", [0, 1, 2])
async def test_the_end_of_an_output_does_not_wait_for_the_others(short: int) -> None:
    answers = [[5, 6] if index == short else [5, 6, 7, 8] for index in range(3)]
    reader = Reader(await stream_of(3))
    reader.stream.begin_writing()
    task = asyncio.create_task(reader.read())
    for index in (0, 1, 2) * 2:
        write_one(reader.stream, answers, index)
    reader.stream.notify()
    await settle()
    assert [message.finished.index for message in ends(reader.messages)] == [short]
    write_in_turn(reader.stream, answers, [])
    reader.stream.end = reader.stream.finish
    reader.stream.notify()
    await task
    check_messages(reader.messages, answers)


def write_one(stream: TokenStream, answers: list[list[int]], index: int) -> None:
    output, answer = stream.outputs[index], answers[index]
    if len(output.tokens) < len(answer):
        output.write(output.position, answer[len(output.tokens)])
        if len(output.tokens) == len(answer):
            output.finish = LENGTH


def deltas(messages: list[pb.GenerateStreamResponse]) -> list[pb.Delta]:
    return [message.delta for message in messages if message.HasField("delta")]


def ends(messages: list[pb.GenerateStreamResponse]) -> list[pb.GenerateStreamResponse]:
    return [message for message in messages if message.HasField("finished")]


def check_messages(messages: list[pb.GenerateStreamResponse], answers: list[list[int]]) -> None:
    assert messages[0].HasField("started")
    for index, answer in enumerate(answers):
        own = [delta for delta in deltas(messages) if delta.index == index]
        assert [id for delta in own for id in delta.token_ids] == answer
        assert own[-1].output_seq == len(answer)
    assert sorted(message.finished.index for message in ends(messages)) == list(range(len(answers)))
    assert [message.HasField("usage") for message in messages] == [False] * (len(messages) - 1) + [True]
    assert messages[-1].seq == messages[-1].usage.completion_tokens == sum(map(len, answers))


@given(st.lists(TOKENS, min_size=2, max_size=4), st.data())
@settings(max_examples=60, deadline=None)
async def test_the_journal_gives_each_output_its_tokens_and_logprobs_back(
    answers: list[list[int]], data: st.DataObject
) -> None:
    stream = await stream_of(len(answers), response=pb.ResponseOptions(logprobs=1))
    stream.begin_writing()
    owned = new_record(stream.request, Incarnation("r", 1), 1)
    for index in data.draw(st.lists(st.integers(0, len(answers) - 1), max_size=20)):
        output = stream.outputs[index]
        if len(output.tokens) < len(answers[index]):
            token = answers[index][len(output.tokens)]
            output.write(output.position, token, logprobs(1, token))
        if data.draw(st.booleans()):
            append_new(owned, stream)
    append_new(owned, stream)
    restored = stream_from_store(stored(owned), stream.request)
    assert [output.tokens for output in restored.outputs] == [output.tokens for output in stream.outputs]
    assert [output.logprobs for output in restored.outputs] == [output.logprobs for output in stream.outputs]
    again = OwnedRequest.from_stored(stored(owned))
    append_new(again, stream)
    assert again.length == owned.length, "nothing is written twice"


async def test_outputs_restored_before_their_first_token_have_logprobs_of_their_own() -> None:
    stream = await stream_of(2, response=pb.ResponseOptions(logprobs=1))
    owned = new_record(stream.request, Incarnation("r", 1), 1)
    restored = stream_from_store(stored(owned), stream.request)
    restored.begin_writing()
    for output in restored.outputs:
        output.write(output.position, 5 + output.index, logprobs(1, 5 + output.index))
    again = OwnedRequest.from_stored(stored(owned))
    append_new(again, restored)
    assert [len(output.logprobs) for output in restored.outputs] == [1, 1]
    assert again.length == 2


async def test_a_resume_beyond_one_output_names_the_last_tokens_of_each() -> None:
    stream = await stream_of(2)
    write_in_turn(stream, [[5], [5, 6, 7]], [])
    with pytest.raises(OutOfRange, match=r"after_output_seqs: at most \[1, 3\], got \[2, 0\]") as raised:
        await wait_for_resume_point(stream, [2, 0])
    assert raised.value.detail.resume == ResumePoint(0, 4, (1, 3))


def stored(owned: OwnedRequest) -> StoredRequest:
    return StoredRequest(
        key=owned.key,
        epoch=1,
        attempt=owned.attempt,
        state=owned.state,
        owner=owned.owner,
        stream_epoch=0,
        record=owned.record,
        payload=pb.GenerateRequest.FromString(owned.payload),
        entries=owned.entries(),
        length=owned.length,
        expires_in_s=60.0,
        logprobs=Logprobs(1, owned.packed_logprobs(0)),
    )


@pytest.mark.parametrize(
    ("after_seq", "output_seqs", "field"),
    [
        (2, [], "after_output_seqs"),
        (2, [1, 1, 0, 0], "after_output_seqs"),
        (2, [1, 2, 0], "after_output_seqs"),
    ],
)
async def test_a_stream_does_not_resume_where_it_is_not_said_for_each_output(
    after_seq: int, output_seqs: list[int], field: str
) -> None:
    async with harness() as s:
        first = s.stub.GenerateStream(generate_request(request_id="r", sampling=pb.SamplingParams(n=3)))
        stream = await s.stream()
        write_in_turn(stream, [[5, 6], [7], [8]], [])
        stream.end = stream.finish
        stream.notify()
        assert [message async for message in first][-1].seq == 4
        resume = pb.ResumeStreamRequest(request_id="r", after_seq=after_seq, after_output_seqs=output_seqs)
        error = await error_of(s.stub.ResumeStream(resume))
        assert error.detail.violation is not None
        assert error.detail.violation.field == field
        rest = s.stub.ResumeStream(pb.ResumeStreamRequest(request_id="r", after_seq=2, after_output_seqs=[1, 1]))
        assert [(each.index, each.num_tokens) for each in deltas([message async for message in rest])] == [
            (0, 1),
            (2, 1),
        ]


async def test_the_likeliest_outputs_come_first_and_only_from_generate() -> None:
    async with harness() as s:
        request = generate_request(sampling=pb.SamplingParams(n=2, best_of=4))
        assert (await error_of(s.stub.GenerateStream(request))).detail.violation.field == "sampling.best_of"  # type: ignore[union-attr]

        def answered(stream: TokenStream) -> None:
            for index, score in enumerate((-3.0, -1.0, -4.0, -2.0)):
                chosen = logprobs(0, 5)
                chosen.logprob = score
                output = stream.outputs[index]
                assert output.write(output.position, 10 + index, chosen) is None
                output.finish = LENGTH
            stream.end = stream.finish
            stream.notify()

        s.requests.plan = answered
        response = await s.stub.Generate(request)
        assert [(output.index, output.finished.index) for output in response.outputs] == [(0, 0), (1, 1)]
        table = tiny().token_table
        assert [output.text for output in response.outputs] == [table.bytes_of(id).decode() for id in (11, 13)]
        assert response.usage.completion_tokens == 4
        assert not response.outputs[0].logprobs


async def error_of(call: Any) -> ServiceError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    return from_call(caught.value)
