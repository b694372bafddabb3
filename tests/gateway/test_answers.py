"""Answers of a scripted router -> OpenAI's objects and events."""

from __future__ import annotations

import asyncio
import base64
import json
from array import array
from collections.abc import AsyncIterator
from typing import Any

import pytest
from openai.types import Completion, CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

import decant
from decant import AsyncClient
from decant.gateway.app import Gateway
from decant.gateway.logprobs import TextOffsets
from decant.gateway.responses import EventStream
from decant.protos import inference_pb2 as pb
from tests.decant.scripted import Break, Script, endless_answer, finished, never, started
from tests.gateway.asgi import PATIENCE_S, HttpCall, call

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO: Any = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
STREAM: Any = {"stream": True, "stream_options": {"include_usage": True}}


def token(text: str, logprob: float = -0.5) -> pb.TokenLogprob:
    top = [pb.TopLogprob(token_id=5, token="z", logprob=-0.25, raw_bytes=b"z")]
    return pb.TokenLogprob(token_id=7, token=text, logprob=logprob, top=top, raw_bytes=text.encode())


async def rich_answer(request: pb.GenerateRequest, _: Any) -> AsyncIterator[pb.GenerateStreamResponse]:
    """Two outputs: reasoning, a text and a call with logprobs; and a text."""
    first = started(request)
    first.started.prompt_logprobs.add(token_id=1, token="p", raw_bytes=b"p")
    yield first
    deltas = [
        pb.Delta(num_tokens=1, reasoning="so"),
        pb.Delta(num_tokens=1, text="pab" if request.response.echo else "ab", logprobs=[token("ab")]),
        pb.Delta(num_tokens=1, index=1, text="x", logprobs=[token("x")]),
        pb.Delta(num_tokens=1, tool_calls=[pb.ToolCallDelta(id="c", name="f", arguments='{"a"')]),
        pb.Delta(num_tokens=1, tool_calls=[pb.ToolCallDelta(arguments=": 1}")]),
        pb.Delta(num_tokens=1),
    ]
    for seq, delta in enumerate(deltas, 1):
        yield pb.GenerateStreamResponse(request_id=request.request_id, seq=seq, delta=delta)
    end = finished(request, len(deltas))
    yield pb.GenerateStreamResponse(request_id=request.request_id, seq=end.seq, finished=end.finished)
    end.finished.index, end.finished.finish_reason = 1, pb.FINISH_REASON_CONTEXT_LENGTH
    end.usage.cached_prompt_tokens, end.usage.reasoning_tokens = 2, 1
    yield end


async def test_an_answer_in_a_chat_has_openais_form(gateway: Gateway, script: Script) -> None:
    reply = await call(gateway, CHAT, HELLO)
    made = ChatCompletion.model_validate(reply.json)
    (choice,) = made.choices
    assert (reply.status, choice.message.content, choice.finish_reason, made.model) == (200, "abc", "stop", "m")
    assert made.usage is not None
    assert (made.usage.prompt_tokens, made.usage.completion_tokens, made.usage.total_tokens) == (3, 3, 6)
    assert made.id == f"chatcmpl-{script.requests[0].request_id}"
    assert reply.headers["x-request-id"] == script.requests[0].request_id


async def test_chunks_of_a_chat_have_text_reasoning_calls_logprobs_and_usage(gateway: Gateway, script: Script) -> None:
    script.answering = rich_answer
    reply = await call(gateway, CHAT, {**HELLO, **STREAM, "n": 2, "logprobs": True, "top_logprobs": 1})
    assert reply.headers["content-type"].startswith("text/event-stream")
    chunks = [ChatCompletionChunk.model_validate(chunk) for chunk in reply.chunks]
    *parts, last = chunks
    deltas = [(chunk.choices[0].index, chunk.choices[0].delta) for chunk in parts]
    first = [delta for index, delta in deltas if index == 0]
    assert [delta.role for delta in first] == ["assistant", None, None, None, None]
    assert "".join(delta.content or "" for delta in first) == "ab"
    assert first[0].model_extra == {"reasoning_content": "so"}
    pieces = [call for delta in first for call in delta.tool_calls or ()]
    assert [(piece.index, piece.id, piece.type) for piece in pieces] == [(0, "c", "function"), (0, None, None)]
    assert "".join(piece.function.arguments or "" for piece in pieces if piece.function) == '{"a": 1}'
    tokens = [entry for chunk in parts if (made := chunk.choices[0].logprobs) for entry in made.content or ()]
    assert [(entry.token, entry.logprob, entry.bytes) for entry in tokens[:1]] == [("ab", -0.5, [97, 98])]
    assert [top.token for top in tokens[0].top_logprobs] == ["z"]
    ends = {chunk.choices[0].index: chunk.choices[0].finish_reason for chunk in parts if chunk.choices[0].finish_reason}
    assert ends == {0: "tool_calls", 1: "length"}
    assert last.choices == []
    assert last.usage is not None
    assert (last.usage.completion_tokens, last.usage.prompt_tokens_details.cached_tokens) == (6, 2)  # type: ignore[union-attr]
    assert last.usage.completion_tokens_details.reasoning_tokens == 1  # type: ignore[union-attr]
    assert all(chunk["usage"] is None for chunk in reply.chunks[:-1])


async def test_chunks_of_a_completion_have_logprobs_of_an_echoed_prompt_too(gateway: Gateway, script: Script) -> None:
    script.answering = rich_answer
    body = {"prompt": "p", **STREAM, "n": 2, "logprobs": 1, "echo": True}
    chunks = (await call(gateway, COMPLETIONS, body)).chunks  # with null where OpenAI's API has it, unlike its types
    parts = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == 0]
    made = [part["logprobs"] for part in parts if part["logprobs"]]
    assert [(one["tokens"], one["token_logprobs"], one["text_offset"]) for one in made] == [
        (["p"], [None], [0]),
        (["ab"], [-0.5], [1]),
    ]
    assert [one["top_logprobs"] for one in made] == [[None], [{"z": -0.25, "ab": -0.5}]]
    assert "".join(part["text"] for part in parts) == "pab"
    assert [part["finish_reason"] for part in parts] == [None, None, "stop"]
    assert chunks[-1]["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize(
    ("parts", "pieces", "expected"),
    [
        (["def é("], ["<|begin|>", "def", " ", b"\xc3", b"\xa9", "("], [0, 0, 3, 4, 4, 5]),
        (["def a", "", "b"], ["<s>", " def", " a", "b"], [0, 0, 3, 5]),  # the first word's space is not in the text
        (["", "", "abc", "d"], ["a", "b", "c", "d"], [0, 1, 2, 3]),  # tokens are ahead
        (["ab<|end|>c"], ["ab", "<|end|>", "c"], [0, 2, 9]),
        (["abc"], ["ab", "<|end|>", "c"], [0, 2, 2]),
    ],
)
def test_offsets_count_what_the_text_contains(parts: Any, pieces: Any, expected: Any) -> None:
    offsets, found = TextOffsets(), []
    for index, piece in enumerate(pieces):
        offsets.add(parts[index] if index < len(parts) else "")
        found.append(offsets.take(piece if isinstance(piece, bytes) else piece.encode()))
    assert found == expected


async def test_each_prompt_of_a_completion_is_a_request(gateway: Gateway, script: Script) -> None:
    body = {"prompt": ["one", [5, 6], "two"], "n": 2}
    made = Completion.model_validate((await call(gateway, COMPLETIONS, body)).json)
    assert [(choice.index, choice.text) for choice in made.choices] == [(0, "abc"), (2, "abc"), (4, "abc")]
    assert made.usage is not None
    assert (made.usage.prompt_tokens, made.usage.total_tokens) == (9, 18)
    assert {tuple(sent.token_ids.ids) or sent.prompt for sent in script.requests} == {"one", "two", (5, 6)}
    texts = dict.fromkeys((0, 1, 2), "")
    chunks = (await call(gateway, COMPLETIONS, {"prompt": ["one", "two", "three"], **STREAM})).chunks
    for chunk in chunks[:-1]:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == dict.fromkeys((0, 1, 2), "abc")
    assert chunks[-1]["usage"]["completion_tokens"] == 9
    ids = [sent.request_id for sent in script.requests[3:]]
    assert len({id.rpartition(" ")[0] for id in ids}) == 1 < len({*ids})


@pytest.mark.parametrize("stream", [False, True])
async def test_the_first_error_of_several_prompts_ends_all(gateway: Gateway, script: Script, stream: bool) -> None:
    script.answering = endless_answer
    script.breaks.append(Break(1, decant.InvalidArgument("sampling.n", "less", 5)))
    reply = await call(gateway, COMPLETIONS, {"prompt": ["one", "two"], "stream": stream})
    if reply.status == 200:
        assert json.loads(reply.events[-1].removeprefix("data: "))["error"]["param"] == "n"
    else:
        assert (reply.status, reply.error["param"]) == (400, "n")
    assert await asyncio.to_thread(script.was_cancelled.wait, PATIENCE_S)


async def test_an_error_in_a_stream_is_its_last_event(gateway: Gateway, script: Script) -> None:
    script.breaks.append(Break(2, decant.DeadlineExceeded()))
    reply = await call(gateway, CHAT, {**HELLO, "stream": True})
    first, last = reply.events
    assert reply.status == 200
    assert '"content":"a"' in first
    error = json.loads(last.removeprefix("data: "))["error"]
    assert (error["type"], error["code"]) == ("server_error", "deadline_exceeded")
    assert reply.has_ended


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_cancels_its_request(gateway: Gateway, script: Script, stream: bool) -> None:
    script.answering = endless_answer
    leaving = HttpCall(gateway, CHAT, {**HELLO, "stream": stream})
    running = asyncio.create_task(leaving())
    if stream:
        await leaving.has_sent.wait()
    assert await asyncio.to_thread(script.was_called.wait, PATIENCE_S)
    leaving.leaves.set()
    await running
    assert await asyncio.to_thread(script.was_cancelled.wait, PATIENCE_S)
    assert script.cancelled == [script.requests[0].request_id]


async def test_a_slow_reader_stops_what_is_read_from_the_router() -> None:
    made = 0

    async def chunks() -> Any:
        nonlocal made
        while made < 100:
            made += 1
            yield {"number": made}

    def app(scope: Any, receive: Any, send: Any) -> Any:
        return EventStream(chunks(), {}, lambda error: pytest.fail(str(error)))(scope, receive, send)

    reader = HttpCall(app, CHAT, {})
    await reader._receive()  # the body, which an endpoint has read
    reader.reads.clear()
    running = asyncio.create_task(reader())
    for _ in range(50):
        await asyncio.sleep(0)
    assert made == 1
    reader.reads.set()
    assert len((await running).chunks) == 100


async def test_silence_is_broken_by_comments(monkeypatch: pytest.MonkeyPatch, gateway: Gateway, script: Script) -> None:
    monkeypatch.setattr("decant.gateway.responses.KEEPALIVE_S", 0.001)
    script.answering = never
    waiting = HttpCall(gateway, CHAT, {**HELLO, "stream": True})
    running = asyncio.create_task(waiting())
    await waiting.has_sent.wait()
    assert waiting.reply.events[0] == ": waiting"
    waiting.leaves.set()
    await running


async def test_the_end_of_a_gateway_is_an_error_of_what_still_runs(gateway: Gateway, script: Script) -> None:
    script.answering = endless_answer
    cut = HttpCall(gateway, CHAT, {**HELLO, "stream": True})
    running = asyncio.create_task(cut())
    await cut.has_sent.wait()
    await gateway.end_calls()
    reply = await running
    assert json.loads(reply.events[-1].removeprefix("data: "))["error"]["code"] == "draining"
    assert (await call(gateway, "/health")).status == 503


async def test_models_are_the_served_ones_and_their_adapters(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    async def models(_: Any) -> Any:
        return (pb.Model(id="org/m", adapters=[pb.Adapter(name="tuned", rank=4)]),)

    monkeypatch.setattr(AsyncClient, "models", models)
    made = [Model.model_validate(one) for one in (await call(gateway, "/v1/models")).json["data"]]
    assert [(one.id, (one.model_extra or {})["parent"]) for one in made] == [("org/m", None), ("tuned", "org/m")]
    assert (await call(gateway, "/v1/models/org/m")).json["id"] == "org/m"
    unknown = await call(gateway, "/v1/models/other")
    assert (unknown.status, unknown.error["code"]) == (404, "model_not_found")
    assert (await call(gateway, "/health")).status == 200


async def test_embeddings_are_numbers_or_their_bytes(gateway: Gateway) -> None:
    body = {"model": "m", "input": ["abc", "de"], "dimensions": 2}
    made = CreateEmbeddingResponse.model_validate((await call(gateway, "/v1/embeddings", body)).json)
    assert [one.embedding[0] for one in made.data] == [3, 2]
    coded = (await call(gateway, "/v1/embeddings", {**body, "encoding_format": "base64"})).json["data"]
    assert [list(array("f", base64.b64decode(one["embedding"]))) for one in coded] == [
        one.embedding for one in made.data
    ]
    for wrong, param in (({"input": []}, "input"), ({"input": "a", "encoding_format": "int8"}, "encoding_format")):
        assert (await call(gateway, "/v1/embeddings", wrong)).error["param"] == param
