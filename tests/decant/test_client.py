from __future__ import annotations

import inspect
from collections.abc import AsyncIterator
from typing import Any

import pytest

import decant
from decant import AsyncClient, CancelStatus, Client, FinishReason, GenerationState
from decant.protos import inference_pb2 as pb
from tests.decant.scripted import Script, short_answer


def test_a_stream_has_deltas_then_usage_and_receipt(client: Client) -> None:
    with client.stream("x", token_ids=True) as stream:
        assert [delta.text for delta in stream] == ["a", "b", "c"]
    assert (stream.text, stream.seq, stream.is_complete) == ("abc", 3, True)
    assert stream.resumed_at == []
    assert stream.started is not None
    assert stream.started.seed == 7
    assert stream.finished == decant.Finished(FinishReason.STOP, 2)
    assert stream.usage == decant.Usage(3, 3, 6)
    assert stream.receipt is not None
    assert (stream.receipt.ttft_ms, stream.receipt.handoff_ms) == (5.0, None)
    (output,) = stream.outputs
    assert output.token_ids == (97, 98, 99)


def test_generate_returns_the_complete_answer(client: Client) -> None:
    answer = client.generate("x")
    assert (answer.text, answer.model, answer.seed) == ("abc", "m", 7)
    assert answer.finished == decant.Finished(FinishReason.STOP, 2)
    assert answer.usage.total_tokens == 6
    assert answer.receipt.decode_worker == "d"


def test_a_complete_stream_cancels_nothing(client: Client, script: Script) -> None:
    with client.stream("x", request_id="r") as stream:
        list(stream)
    client.generate("x", request_id="s")
    client.server_info()
    assert script.cancelled == []


async def calling_answer(request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateStreamResponse]:
    pieces = [
        pb.ToolCallDelta(index=0, id="c0", name="now", arguments='{"a"'),
        pb.ToolCallDelta(index=0, arguments=": 1}"),
        pb.ToolCallDelta(index=1, id="c1", name="now", arguments="{}"),
    ]
    seq = 0
    async for message in short_answer(request, context):
        if message.HasField("delta"):
            message.delta.tool_calls.append(pieces[seq])
            seq += 1
        yield message


def test_pieces_of_calls_are_joined(client: Client, script: Script) -> None:
    script.answering = calling_answer
    with client.stream([{"role": "user", "content": "x"}], tools=[{"name": "now"}]) as stream:
        pieces = [piece for delta in stream for piece in delta.tool_calls]
    assert pieces[1] == decant.ToolCallDelta(0, "", "", ": 1}")
    assert stream.tool_calls == (decant.ToolCall("c0", "now", '{"a": 1}'), decant.ToolCall("c1", "now", "{}"))
    assert stream.outputs[0].tool_calls == stream.tool_calls


async def test_messages_may_be_a_keyword_argument(address: str, script: Script) -> None:
    messages = [{"role": "user", "content": "hi"}]
    with Client(address) as client:
        client.generate(messages=messages)
        list(client.stream(messages=messages, max_tokens=3))
    async with AsyncClient(address) as awaiting:
        await awaiting.generate(messages=messages)
        assert [delta.text async for delta in awaiting.stream(messages=messages)] == ["a", "b", "c"]
    assert [asked.messages.messages[0].content for asked in script.requests] == ["hi"] * 4


def test_calls_without_a_stream_return_their_results(client: Client) -> None:
    assert list(client.tokenize("ab").token_ids) == [97, 98]
    assert list(client.tokenize([{"role": "user", "content": "hi"}]).tokens) == ["h", "i"]
    assert client.detokenize([97, 98]) == "ab"
    assert [model.id for model in client.models()] == ["m"]
    assert client.model("other").id == "other"
    assert client.server_info().router_id == "r"
    assert client.cancel("r") is CancelStatus.CANCELLED


def test_generation_returns_state_output_and_error(client: Client) -> None:
    client.generate("x", request_id="r")
    found = client.generation("r")
    assert (found.state, found.state.is_end, found.last_seq) == (GenerationState.FAILED, True, 2)
    assert (found.text, found.answer.token_ids) == ("ab", (97, 98))
    assert isinstance(found.error, decant.DeadlineExceeded)
    assert found.expire_time is not None
    assert (found.expire_time - found.create_time).total_seconds() == 4_000
    assert [(one.state.value, one.attempt) for one in found.transitions] == [("queued", 1), ("failed", 1)]
    with pytest.raises(decant.NotFound):
        client.generation("unknown")


def test_resume_continues_a_request_behind_a_seq(client: Client, script: Script) -> None:
    client.generate("x", request_id="r")
    with client.resume("r", after_seq=1) as stream:
        assert [delta.text for delta in stream] == ["b", "c"]
    assert (stream.seq, stream.is_complete, stream.resumed_at) == (3, True, [])
    with client.resume("r") as stream:
        next(iter(stream))
    with pytest.raises(decant.NotFound):
        list(client.resume("unknown"))
    assert script.cancelled == []


async def test_the_async_client_returns_the_same_results(address: str) -> None:
    async with AsyncClient(address) as client:
        async with client.stream("x") as stream:
            assert [delta.text async for delta in stream] == ["a", "b", "c"]
        assert stream.finished == decant.Finished(FinishReason.STOP, 2)
        assert (await client.generate("x")).text == "abc"
        assert list((await client.tokenize("ab")).token_ids) == [97, 98]
        assert await client.detokenize([97, 98]) == "ab"
        assert [model.id for model in await client.models()] == ["m"]
        assert (await client.model("other")).id == "other"
        assert (await client.server_info()).router_id == "r"
        assert await client.cancel("r") is CancelStatus.CANCELLED
        await client.generate("x", request_id="r")
        assert (await client.generation("r")).state is GenerationState.FAILED
        assert [delta.text async for delta in client.resume("r", after_seq=1)] == ["b", "c"]


def test_both_clients_have_the_same_methods() -> None:
    def methods(kind: type) -> dict[str, list[str]]:
        functions = inspect.getmembers(kind, inspect.isfunction)
        return {name: list(inspect.signature(f).parameters) for name, f in functions if not name.startswith("__")}

    assert methods(Client) == methods(AsyncClient)
