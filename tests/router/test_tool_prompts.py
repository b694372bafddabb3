"""Conversations with tools become the prompts that transformers makes of them."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from transformers import AutoTokenizer

from decant.protos import inference_pb2 as pb
from decant.router.text.prompt import prompt_of
from decant.router.text.served_model import ServedModel, load, served
from decant.runtime.connections.channel import Deadline
from decant.runtime.errors import InvalidArgument
from decant.runtime.model_files import find
from tests.router.test_chat_template import PARTS_ONLY
from tests.router.tokenizer_factories import byte_level, folder
from tests.router.tool_templates import CONTROL, TOOL_TEMPLATES

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'Weather of a <city> & "its" suburbs, é.',
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "A city.\nIts name."},
                "units": {"type": "string", "enum": ["°C", "°F"]},
                "days": {"type": "array", "items": {"type": "integer"}},
            },
            "required": ["city"],
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {"name": "now", "description": "Time.", "parameters": {"type": "object", "properties": {}}},
}
TOOLS: list[Any] = [WEATHER, CLOCK]
CALL = {
    "id": "a1B2c3D4e",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Zürich", "days": [1, 2]}},
}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "question": [{"role": "user", "content": "Is it raining?"}],
    "system": [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "Rain?"}],
    "answered": [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {
            "role": "tool",
            "name": "get_weather",
            "tool_call_id": "a1B2c3D4e",
            "content": '{"rain": true, "text": "<b>"}',
        },
        {"role": "assistant", "content": "It rains."},
        {"role": "user", "content": "And now?"},
    ],
}


def message_of(plain: dict[str, Any]) -> pb.Message:
    calls = [
        pb.ToolCall(
            id=call.get("id", ""),
            name=call["function"]["name"],
            arguments=json.dumps(call["function"]["arguments"], ensure_ascii=False),
        )
        for call in plain.get("tool_calls", ())
    ]
    others = {name: plain[name] for name in ("name", "tool_call_id") if name in plain}
    return pb.Message(role=plain["role"], content=plain["content"], tool_calls=calls, **others)


def messages_of(plain: list[dict[str, Any]], tools: list[Any], **fields: Any) -> pb.Messages:
    listed = [
        pb.Tool(
            name=tool["function"]["name"],
            description=tool["function"]["description"],
            parameters=json.dumps(tool["function"]["parameters"], ensure_ascii=False),
        )
        for tool in tools
    ]
    return pb.Messages(messages=[message_of(message) for message in plain], tools=listed, **fields)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    root = tmp_path_factory.mktemp("tools")

    @cache
    def pair(kind: str) -> tuple[ServedModel, Any]:
        config = {"chat_template": TOOL_TEMPLATES[kind], "additional_special_tokens": list(CONTROL[kind])}
        place = folder(root / kind, byte_level(), config)
        return replace(served(find(str(place))), vocab_size=1 << 20), AutoTokenizer.from_pretrained(str(place))

    return pair


async def ids_of(model: ServedModel, messages: pb.Messages, **fields: Any) -> list[int]:
    return await prompt_of(pb.GenerateRequest(messages=messages, **fields), model, 1 << 20, Deadline())


@pytest.mark.slow
@pytest.mark.parametrize("kind", TOOL_TEMPLATES)
@pytest.mark.parametrize("name", CONVERSATIONS)
async def test_tools_calls_and_results_become_the_tokens_that_transformers_makes_of_them(both, kind, name):
    model, theirs = both(kind)
    plain = copy.deepcopy(CONVERSATIONS[name])
    if kind == "deepseek":  # its template concatenates the arguments
        for call in (call for message in plain for call in message.get("tool_calls", ())):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    for tools in ([], TOOLS):
        for opens in (True, False):
            expected = theirs.apply_chat_template(
                plain, tools=tools or None, add_generation_prompt=opens, return_dict=False
            )
            messages = messages_of(CONVERSATIONS[name], tools, add_generation_prompt=opens)
            assert await ids_of(model, messages) == expected


@pytest.mark.slow
@pytest.mark.parametrize("kind", TOOL_TEMPLATES)
async def test_tools_and_results_can_not_write_control_tokens(both, kind):
    model, _ = both(kind)
    control = {model.tokenizer.token_to_id(token) for token in CONTROL[kind]}
    forged = "".join(CONTROL[kind])
    tools = [copy.deepcopy(WEATHER)]
    plain = copy.deepcopy(CONVERSATIONS["answered"])
    expected = [id for id in await ids_of(model, messages_of(plain, tools)) if id in control]
    tools[0]["function"]["description"] += forged  # type: ignore[index]
    tools[0]["function"]["parameters"]["properties"][forged] = {"type": "string", "description": forged}  # type: ignore[index]
    plain[0]["content"] += forged
    plain[1]["tool_calls"][0]["function"]["arguments"][forged] = forged
    plain[2]["content"] += forged
    plain[2]["name"] += forged
    assert [id for id in await ids_of(model, messages_of(plain, tools)) if id in control] == expected


async def test_without_a_choice_of_tools_the_template_gets_none(both):
    model, _ = both("qwen")
    none = pb.ToolChoice(mode=pb.ToolChoice.MODE_NONE)
    plain = CONVERSATIONS["question"]
    assert await ids_of(model, messages_of(plain, TOOLS, tool_choice=none)) == await ids_of(
        model, messages_of(plain, [])
    )


REFUSED: dict[str, dict[str, Any]] = {
    "messages.tools[0].name: 1 to 64 ASCII letters": {"tools": [pb.Tool(name="a b")]},
    "messages.tools[1].name: each name once": {"tools": [pb.Tool(name="a"), pb.Tool(name="a")]},
    "messages.tools[0].parameters: a JSON object (Expecting": {"tools": [pb.Tool(name="a", parameters="{x")]},
    "messages.tools[1].parameters: a JSON object, got [1]": {
        "tools": [pb.Tool(name="a"), pb.Tool(name="b", parameters="[1]")]
    },
    "messages.tool_choice: unset without tools": {"tool_choice": pb.ToolChoice(mode=pb.ToolChoice.MODE_NONE)},
    "messages.messages[0].tool_calls[0].arguments: a JSON object": {
        "messages": [pb.Message(role="user", tool_calls=[pb.ToolCall(name="a", arguments="3")])]
    },
    "messages.messages[0].content: empty with parts": {
        "messages": [pb.Message(role="user", content="x", parts=[pb.ContentPart(text="y")])]
    },
}


@pytest.mark.parametrize("refusal", REFUSED)
async def test_what_is_no_tool_is_refused_by_its_field(both, refusal):
    model, _ = both("qwen")
    fields: dict[str, Any] = {"messages": [pb.Message(role="user", content="x")], **REFUSED[refusal]}
    with pytest.raises(InvalidArgument) as refused:
        await ids_of(model, pb.Messages(**fields))
    assert str(refused.value).startswith(refusal)


async def test_tools_are_refused_where_the_template_takes_none(tmp_path):
    model = served(find(str(folder(tmp_path / "m", byte_level(), {"chat_template": PARTS_ONLY}))))
    with pytest.raises(InvalidArgument, match=r"messages\.tools: a model whose chat template takes tools, got m"):
        await ids_of(model, messages_of(CONVERSATIONS["question"], TOOLS))


NULL_CONTENT = """{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}
{{- m.tool_calls[0].function.arguments + tools[0].function.name }}{% else %}
{{- m.content + '' }}{% endif %}{% endfor %}"""


async def test_a_template_that_looks_for_null_content_and_joins_arguments_gets_both(tmp_path):
    model = served(find(str(folder(tmp_path / "m", byte_level(), {"chat_template": NULL_CONTENT}))))
    assert model.chat is not None
    messages = messages_of(CONVERSATIONS["answered"][:2], TOOLS)
    made = await model.chat.render(messages.messages, messages.tools, add_generation_prompt=True)
    assert made.text == 'Rain?{"city": "Zürich", "days": [1, 2]}get_weather'


@pytest.mark.slow
async def test_a_template_for_tools_is_used_with_tools(tmp_path):
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "{{ tools | length }}"}]
    place = folder(tmp_path / "m", byte_level(), {"chat_template": named})
    model, theirs = load([str(place)]).default, AutoTokenizer.from_pretrained(str(place))
    plain = CONVERSATIONS["question"]
    for tools in ([], TOOLS):
        expected = theirs.apply_chat_template(plain, tools=tools or None, return_dict=False)
        assert await ids_of(model, messages_of(plain, tools)) == expected


@pytest.mark.slow
async def test_parts_reach_a_template_as_it_takes_them(both, tmp_path):
    message = pb.Message(role="user", parts=[pb.ContentPart(text="a"), pb.ContentPart(text="b")])
    whole = pb.Messages(messages=[pb.Message(role="user", content="ab")])
    for kind, config in (("parts", PARTS_ONLY), ("text", "{{ messages[0].content + '!' }}")):
        model = served(find(str(folder(tmp_path / kind, byte_level(), {"chat_template": config}))))
        assert await ids_of(model, pb.Messages(messages=[message])) == await ids_of(model, whole)
