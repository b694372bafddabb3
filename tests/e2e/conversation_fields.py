"""Checks of the fields of conversations."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer

from decant.protos import inference_pb2 as pb
from tests.e2e.client_checks import TOKENIZER, ask, generate_request
from tests.e2e.deployment import PATIENCE_S
from tests.e2e.field_checks import CHAT, WRITTEN, Stub, field, request

PLAIN = Tokenizer.from_str(TOKENIZER.to_str())
PLAIN.encode_special_tokens = True


@field("Message.role", "Message.content", "Messages.add_generation_prompt")
async def _messages(stub: Stub) -> None:
    messages = [pb.Message(role="system", content="be brief"), pb.Message(role="user", content="add two numbers")]
    lines = "# system: be brief\n# user: add two numbers\n"
    for opens, text in ((None, lines + "def "), (True, lines + "def "), (False, lines)):
        chat = request(model=CHAT)
        chat.messages.CopyFrom(pb.Messages(messages=messages, add_generation_prompt=opens))
        ids = TOKENIZER.encode(text, add_special_tokens=False).ids
        written = generate_request(ids, max_tokens=WRITTEN)
        written.model = CHAT
        answer, expected = await ask(stub, chat), await ask(stub, written)
        assert answer.started.prompt_tokens == len(ids)
        assert answer.ids == expected.ids


@field(
    *("ContentPart.text", "Message.name", "Message.tool_call_id", "ToolCall.id", "ToolCall.name", "ToolCall.arguments"),
    *("Tool.name", "Tool.description", "Tool.parameters"),
)
async def _tools(stub: Stub) -> None:
    calls = [pb.ToolCall(id="c1", name="now", arguments='{"a": 1}')]
    messages = [
        pb.Message(role="user", parts=[pb.ContentPart(text="what "), pb.ContentPart(text="time")]),
        pb.Message(role="assistant", content="look", tool_calls=calls),
        pb.Message(role="tool", content="noon", name="now", tool_call_id="c1"),
    ]
    tools = [pb.Tool(name="now", description="Time.", parameters='{"type": "object"}')]
    text = (
        '[{"type": "function", "function": {"name": "now", "description": "Time.", "parameters": {"type": "object"}}}]'
        "# user: what time\n# assistant: look"
        '[{"id": "c1", "type": "function", "function": {"name": "now", "arguments": {"a": 1}}}]\n'
        "# tool: noonnowc1\ndef "
    )
    chat = request(model=CHAT)
    chat.messages.CopyFrom(pb.Messages(messages=messages, tools=tools))
    assert (await ask(stub, chat)).started.prompt_tokens == len(TOKENIZER.encode(text, add_special_tokens=False).ids)


@field("Tool.strict", "ToolChoice.mode", "ToolChoice.name", "Messages.parallel_tool_calls")
async def _calls(stub: Stub) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [17]}}, "required": ["n"], "additionalProperties": False}
    tools = [pb.Tool(name="f", parameters=json.dumps(schema), strict=True), pb.Tool(name="g", strict=True)]
    required = pb.ToolChoice(mode=pb.ToolChoice.MODE_REQUIRED)
    for choice, parallel, names in ((required, False, {"f", "g"}), (pb.ToolChoice(name="f"), None, {"f"})):
        chat = request(model=CHAT, stopping=pb.StoppingParams(max_tokens=1000))
        fields: dict[str, Any] = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": parallel}
        chat.messages.CopyFrom(pb.Messages(messages=[pb.Message(role="user", content="f")], **fields))
        (output,) = (await stub.Generate(chat, timeout=PATIENCE_S)).outputs
        assert not output.text or not output.finished.guide_completed
        assert {call.name for call in output.tool_calls} <= names
        assert len(output.tool_calls) == 1 or parallel is None
        *whole, last = output.tool_calls
        for call in [*whole, last] if output.finished.guide_completed else whole:
            assert json.loads(call.arguments) == ({"n": 17} if call.name == "f" else {})


@field("Message.reasoning", "Messages.reasoning", "StoppingParams.max_reasoning_tokens")
async def _reasoning(stub: Stub) -> None:
    listed = [pb.Message(role="user", content="add two numbers")]
    chat = request(model=CHAT)
    chat.messages.CopyFrom(pb.Messages(messages=listed, reasoning=True))
    assert (await whole(stub, chat)).usage.reasoning_tokens == WRITTEN, "it does not end by itself"
    chat.stopping.max_reasoning_tokens = 5
    response = await whole(stub, chat)
    (output,) = response.outputs
    assert response.usage.reasoning_tokens == 5
    assert output.token_ids[5] == TOKENIZER.get_vocab_size() - 1
    assert output.reasoning == TOKENIZER.decode(output.token_ids[:5], skip_special_tokens=False)
    assert output.text == TOKENIZER.decode(output.token_ids[6:])
    chat.messages.reasoning = False
    assert not (await whole(stub, chat)).usage.reasoning_tokens
    chat.messages.messages.append(pb.Message(role="assistant", content="x", reasoning="a thought"))
    before = (await whole(stub, chat)).usage.prompt_tokens
    chat.messages.messages[-1].ClearField("reasoning")
    assert (await whole(stub, chat)).usage.prompt_tokens < before


@field("Messages.continue_final_message")
async def _continue_final_message(stub: Stub) -> None:
    messages = [pb.Message(role="user", content="x"), pb.Message(role="assistant", content="def total(")]
    chat = request(model=CHAT)
    chat.messages.CopyFrom(pb.Messages(messages=messages, continue_final_message=True))
    answer = await ask(stub, chat)
    ids = TOKENIZER.encode("# user: x\n# assistant: def total(", add_special_tokens=False).ids
    written = generate_request(ids, max_tokens=WRITTEN)
    written.model = CHAT
    expected = await ask(stub, written)
    assert (answer.ids, answer.text) == (expected.ids, expected.text)


async def whole(stub: Stub, chat: pb.GenerateRequest) -> pb.GenerateResponse:
    made: pb.GenerateResponse = await stub.Generate(chat, timeout=PATIENCE_S)
    return made


@field("GenerateRequest.parse_special_tokens")
async def _parse_special_tokens(stub: Stub) -> None:
    whole = "# user: <|end|>\ndef "
    parsed, plain = (len(tokenizer.encode(whole, add_special_tokens=False).ids) for tokenizer in (TOKENIZER, PLAIN))
    assert parsed < plain
    for parse, count in ((None, plain), (False, plain), (True, parsed)):
        chat = request(model=CHAT, parse_special_tokens=parse)
        chat.messages.CopyFrom(pb.Messages(messages=[pb.Message(role="user", content="<|end|>")]))
        assert (await ask(stub, chat)).started.prompt_tokens == count
    for parse, count in ((None, parsed), (True, parsed), (False, plain)):
        text = generate_request(whole, max_tokens=WRITTEN)
        text.MergeFrom(pb.GenerateRequest(model=CHAT, parse_special_tokens=parse))
        assert (await ask(stub, text)).started.prompt_tokens == 1 + count
