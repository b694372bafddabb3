"""Calls in an output's text, in each format that templates declare."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decant.protos import inference_pb2 as pb
from decant.router.api.response_writer import OutputReader
from decant.router.request.output import Finish
from decant.router.request.token_stream import TokenStream
from decant.router.text.chat_template import ChatTemplate
from decant.router.text.served_model import ServedModel, served
from decant.router.text.tools.call_format import CallFormat
from decant.router.text.tools.call_parser import CallParser, Parsed, call_id, whole_calls
from decant.router.text.tools.formats import FORMATS, format_of
from decant.router.text.tools.xml_parameters import XmlParameters
from decant.runtime.errors import InvalidArgument
from decant.runtime.model_files import find
from tests.router.chat_templates import CHATML
from tests.router.factories import valid
from tests.router.tokenizer_factories import byte_level, folder
from tests.router.tool_templates import TOOL_TEMPLATES

BY_NAME = {form.name: form for form in FORMATS}
PARAMETERS = {
    "city": {"type": "string"},
    "deep": {"$ref": "#/$defs/deep"},
    "count": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "mixed": {"type": ["string", "number"]},
    "any": {},
}
SCHEMA = json.dumps({"properties": PARAMETERS, "$defs": {"deep": {"type": "object"}}})
TOOLS = {"now": "", "get_weather": SCHEMA, "a.b-c_1": "{"}
ARGUMENTS = '{"city": "Zü\\"rich}", "deep": {"list": [1, {"x": "\\\\"}]}}'
Calls = list[tuple[str, str]]

_BLOCK = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
_SHORT = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
_LISTS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
ONE, NOW = [("get_weather", ARGUMENTS)], ("now", "{}")
OBJECT = '{"name": "get_weather", "arguments": ' + ARGUMENTS + "}"

DEEP = '{"list": [1, {"x": "\\\\"}]}'


def xml(tool: str, **parameters: str) -> str:
    elements = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in parameters.items())
    return f"<tool_call>\n<function={tool}>\n{elements}</function>\n</tool_call>"


OUTPUTS: list[tuple[str, str, str, Calls]] = [
    ("qwen3-coder", "Sure.\n" + xml("get_weather", city='Zü"rich}', deep=DEEP), "Sure.\n", ONE),
    (
        "qwen3-coder",
        xml("now") + "\n" + xml("get_weather", count="3", mixed="1.5") + " Done <tool>.",
        "Done <tool>.",
        [NOW, ("get_weather", '{"count": 3, "mixed": 1.5}')],
    ),
    (
        "qwen3-coder",
        xml("get_weather", city="null", count="None", mixed="null", any="5"),
        "",
        [("get_weather", '{"city": "null", "count": null, "mixed": "null", "any": "5"}')],
    ),
    (
        "qwen3-coder",
        xml("get_weather", city="\n a\n<b>\n</param>\n", mixed='"5"', deep="[1]", count="three"),
        "",
        [("get_weather", '{"city": "\\n a\\n<b>\\n</param>\\n", "mixed": "5", "deep": "[1]", "count": "three"}')],
    ),
    (
        "qwen3-coder",
        "<tool_call><function=a.b-c_1><parameter=x>1</parameter><parameter=y></parameter></function></tool_call>",
        "",
        [("a.b-c_1", '{"x": "1", "y": ""}')],
    ),
    ("qwen3-coder", "<tool_call><function=now>\n<parameter=x>\nab</par", "", [("now", '{"x": "ab</par')]),
    ("qwen3-coder", "<tool_call><function=get_weather><parameter=count>\n1", "", [("get_weather", '{"count": 1')]),
    ("qwen3-coder", "<tool_call><function=now>()</function>", "()</function>", [NOW]),
    ("hermes", f"Sure.\n<tool_call>\n{OBJECT}\n</tool_call>", "Sure.\n", ONE),
    (
        "hermes",
        f'<tool_call>{OBJECT}</tool_call>\n<tool_call>\n{{"name":"now","arguments":{{}}}}\n</tool_call>',
        "",
        [*ONE, NOW],
    ),
    ("hermes", f"<tool_call>{OBJECT}</tool_call> Done <tool>.", "Done <tool>.", ONE),
    ("hermes", f"<tool_call>{OBJECT}", "", ONE),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "now"}</tool_call>', "", [("now", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "now", "arguments": "{}"}</tool_call>', "", [NOW]),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": tru', "", [("now", '{"a": tru')]),
    ("llama", '{"name": "get_weather", "parameters": ' + ARGUMENTS + "}", "", ONE),
    ("llama", '<|python_tag|>{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}', "", [NOW, NOW]),
    ("mistral", f"[TOOL_CALLS] [{OBJECT}]", "", ONE),
    (
        "mistral",
        f'Hm.[TOOL_CALLS][{OBJECT}, {{"name": "now", "arguments": {{}}, "id": "abcdefghi"}}]',
        "Hm.",
        [*ONE, NOW],
    ),
    ("mistral-args", f"[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}[TOOL_CALLS]now[CALL_ID]abc[ARGS]{{}}", "", [*ONE, NOW]),
    ("deepseek", _LISTS[0] + _BLOCK.format("get_weather", ARGUMENTS) + _LISTS[1], "", ONE),
    ("deepseek", "a" + _LISTS[0] + _BLOCK.format(*ONE[0]) + "\n" + _BLOCK.format(*NOW) + _LISTS[1], "a", [*ONE, NOW]),
    ("deepseek", _LISTS[0] + _SHORT.format(*ONE[0]) + _SHORT.format(*NOW) + _LISTS[1], "", [*ONE, NOW]),
    (
        "gpt-oss",
        f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>",
        "",
        ONE,
    ),
    ("gpt-oss", " to=functions.now<|channel|>commentary json<|message|>{}<|call|>", "", [NOW]),
    (
        "gpt-oss",
        "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant<|channel|>commentary to=functions.now "
        "<|constrain|>json<|message|>{}<|call|>",
        "<|channel|>analysis<|message|>Look.<|end|>",
        [NOW],
    ),
]
NO_CALLS: list[tuple[str, str]] = [
    ("qwen3-coder", "<tool_call>\n" + OBJECT + "\n</tool_call>"),
    ("qwen3-coder", "<tool_call>\n<function=unknown>\n</function>\n</tool_call> and <tool_call>"),
    ("qwen3-coder", "<tool_call>\n<function=now"),
    ("hermes", "<tool_call>\nnow()\n</tool_call>"),
    ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call> and <tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "arguments": 3}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {}, "name": "n'),
    ("hermes", '<tool_call>{"name": 3}</tool_call><tool_c'),
    ("hermes", "<tool_call>{bad}</tool_call>"),
    ("llama", '{"name": "Ada", "parameters": {}}'),
    ("llama", 'I call {"name": "now", "parameters": {}}'),
    ("llama", '{"name": "now", "age": 3}'),
    ("mistral", "[TOOL_CALLS] now()"),
    ("mistral", "[TOOL_CALLS] [1, 2] [TOOL"),
    ("mistral-args", "[TOOL_CALLS]now[ARGS]3"),
    ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```py\n1```"),
    ("gpt-oss", "<|channel|>commentary to=functions.now<|message|>now()<|call|>"),
    ("gpt-oss", "<|channel|>final<|message|>to=functions.now"),
]


def parse(form: CallFormat, pieces: Sequence[str], tools: Mapping[str, str] = TOOLS) -> tuple[str, Calls]:
    parser, parsed = CallParser(form, tools, "r/0"), Parsed()
    for piece in pieces:
        parsed.extend(parser.add(piece))
    parsed.extend(parser.finish())
    calls = whole_calls(parsed.calls)
    assert [call.id for call in calls] == [call_id("r/0", index) for index in range(len(calls))]
    return parsed.text, [(call.name, call.arguments) for call in calls]


@pytest.mark.parametrize(("name", "output", "text", "calls"), OUTPUTS)
def test_calls_and_text_are_divided_however_they_arrive(name, output, text, calls):
    form = BY_NAME[name]
    assert parse(form, [output]) == (text, calls)
    assert parse(form, list(output)) == (text, calls)
    for cut in range(len(output)):
        assert parse(form, [output[:cut], output[cut:]]) == (text, calls)


@pytest.mark.parametrize(("name", "output"), NO_CALLS)
def test_what_is_no_call_stays_text_in_full(name, output):
    form = BY_NAME[name]
    for cut in range(len(output) + 1):
        assert parse(form, [output[:cut], output[cut:]]) == (output, [])
    assert parse(form, list(output)) == (output, [])


@pytest.mark.slow
@given(st.data())
@settings(max_examples=200, deadline=None)
def test_no_text_is_lost_or_depends_on_its_pieces(data):
    form = data.draw(st.sampled_from(FORMATS))
    words = [*form.literals, *TOOLS, "<parameter=count>", "{", "}", '"', "\\", " ", "\n", "x", '"name"', ":", ","]
    pieces = data.draw(st.lists(st.sampled_from(words) | st.text(max_size=3), max_size=14))
    text, calls = parse(form, pieces)
    assert (text, calls) == parse(form, ["".join(pieces)])
    if not calls:
        assert text == "".join(pieces)
    assert parse(form, pieces, {}) == ("".join(pieces), [])


def test_arguments_are_streamed_as_they_arrive():
    parser = CallParser(BY_NAME["hermes"], TOOLS, "r/0")
    parts = ['<tool_call>{"name": "now", "argu', 'ments": {"zone": ', '"CET', '"}', "}</tool_call>"]
    made = [[(call.name, call.arguments) for call in parser.add(part).calls] for part in parts]
    assert made == [[], [("now", '{"zone": ')], [("", '"CET')], [("", '"}')], []]


def test_texts_are_streamed_as_they_arrive_and_other_values_when_they_end():
    parser = CallParser(BY_NAME["qwen3-coder"], TOOLS, "r/0")
    parts = [
        "<tool_call><function=get_weather>",
        "\n<parameter=city>\nZü",
        '"\n',
        "rich\n</para",
        "meter>\n<parameter=count>",
    ]
    parts += ["\n1", "2\n</parameter>\n</function>"]
    made = ["".join(call.arguments for call in parser.add(part).calls) for part in parts]
    assert made == ["{", '"city": "Zü', '\\"', "\\nrich", '", "count": ', "", "12}"]


@pytest.mark.parametrize(
    ("name", "begin", "piece"),
    [
        ("hermes", "<tool_call>", " " * 64),
        ("qwen3-coder", "<tool_call><function=", "a" * 64),
        ("qwen3-coder", "<tool_call><function=now>", " " * 64),
        ("qwen3-coder", "<tool_call><function=now><parameter=", "a" * 64),
    ],
)
def test_what_might_still_become_a_call_is_not_held_without_end(name, begin, piece):
    parser = CallParser(BY_NAME[name], TOOLS, "r/0")
    text = parser.add(begin).text + "".join(parser.add(piece).text for _ in range(100))
    assert len(text) > 64 * 100 - 2048


@pytest.mark.parametrize("keyword", ["anyOf", "oneOf", "allOf"])
def test_alternatives_that_refer_to_one_another_are_looked_at_once(keyword):
    loop = {keyword: [{"$ref": f"#/$defs/{name}"} for name in "ab" for _ in range(100)]}
    known = {"anyOf": [{"const": number} for number in range(1000)]}
    schema = {
        "properties": {"loop": {"$ref": "#/$defs/a"}, "known": {"$ref": "#/$defs/c"}},
        "$defs": {"a": loop, "b": loop, "c": known},
    }
    text = xml("f", loop="1", known="2").removeprefix("<tool_call>\n<function=f>\n")
    read = XmlParameters(json.dumps(schema)).read(text, is_over=True)  # without end, were each path looked at
    assert read.piece == '{"loop": "1", "known": 2}'


@pytest.mark.parametrize("name", TOOL_TEMPLATES)
def test_a_template_declares_its_format(name):
    expected = {"qwen": "hermes"}.get(name, name.replace("_", "-"))
    form = format_of(TOOL_TEMPLATES[name])
    assert form is not None
    assert form.name == expected
    unknown = format_of(TOOL_TEMPLATES[name] + "<function=f>")
    assert unknown is (form if "<function=" in form.declared_by else None)


def test_a_template_without_tools_declares_none():
    assert format_of(CHATML) is None


def test_ids_of_calls_have_nine_letters_and_digits():
    ids = {call_id(f"{request}/0", index) for request in range(50) for index in range(4)}
    assert len(ids) == 200
    assert all(len(id) == 9 and id.isalnum() and id.isascii() for id in ids)


# ------------------------------------------------------------------------------------- in a response

TOOL = pb.Tool(name="now", parameters='{"type": "object"}')


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    root = tmp_path_factory.mktemp("calls")

    @cache
    def made(kind: str, *special: str) -> ServedModel:
        config = {"chat_template": TOOL_TEMPLATES[kind], "additional_special_tokens": list(special)}
        model = served(find(str(folder(root / kind, byte_level(), config))))
        return replace(model, vocab_size=1 << 20, max_context_length=1 << 20)

    return made


async def stream_of(model: ServedModel, text: str, **fields: Any) -> tuple[TokenStream, ServedModel]:
    messages = pb.Messages(messages=[pb.Message(role="user", content="x")], tools=[TOOL])
    fields = {"messages": messages, "request_id": "r", "workers_context_length": 4096, **fields}
    stream = TokenStream(await valid(served=model, **fields))
    stream.outputs[0].tokens += await model.encode(text, special=False)
    stream.outputs[0].finish = Finish(pb.FINISH_REASON_LENGTH)
    return stream, model


def read(stream: TokenStream, model: ServedModel, after: int = 0) -> tuple[str, list[pb.ToolCallDelta]]:
    reader, text, pieces = OutputReader(stream, stream.outputs[0], model, after), "", []
    delta = pb.Delta()
    while reader.fill_delta(delta):
        text += delta.text
        pieces += [pb.ToolCallDelta.FromString(piece.SerializeToString()) for piece in delta.tool_calls]
    rest = reader.flush_text()
    return text + rest.text, [*pieces, *rest.calls]


CALLING = {
    "qwen": (("</s>",), 'Sure.</s><tool_call>\n{"name": "now", "arguments": {"a": "é😀"}}\n</tool_call>'),
    "mistral": (("[TOOL_CALLS]",), 'Sure.</s>[TOOL_CALLS] [{"name": "now", "arguments": {"a": "é😀"}}]'),
}


@pytest.mark.parametrize("kind", CALLING)
async def test_a_response_has_calls_and_text_of_special_tokens_only_if_requested(model_of, kind):
    special, output = CALLING[kind]
    model = model_of(kind, *special)
    for skip, text in ((True, "Sure."), (False, "Sure.</s>")):
        stream, _ = await stream_of(model, output, response=pb.ResponseOptions(skip_special_tokens=skip))
        made, pieces = read(stream, model)
        whole = OutputReader(stream, stream.outputs[0], model).all_so_far(0)
        assert (made, whole.text) == (text, text)
        assert list(whole.tool_calls) == whole_calls(pieces)
        assert [(call.name, call.arguments) for call in whole.tool_calls] == [("now", '{"a": "é😀"}')]


@pytest.mark.parametrize("stop", ["] [", "CALLS]"])
async def test_an_output_ends_at_a_stop_string_that_its_client_would_see_in_a_marker(model_of, stop):
    model = model_of("mistral", "[TOOL_CALLS]")
    stream, _ = await stream_of(model, "", stopping=pb.StoppingParams(stop=[stop], max_tokens=1000))
    output = TokenStream(stream.request).outputs[0]
    output.begin_writing()
    for token in await model.encode('[TOOL_CALLS] [{"name": "now", "arguments": {}}] and more', special=False):
        output.write(output.position, token)
    assert output.finish is not None
    assert output.finish.stop_string == stop


@pytest.mark.parametrize("kind", CALLING)
async def test_a_resumed_stream_continues_its_calls(model_of, kind):
    special, output = CALLING[kind]
    model = model_of(kind, *special)
    stream, _ = await stream_of(model, output)
    text, pieces = read(stream, model)
    tokens = stream.outputs[0].tokens
    for after in range(1, len(tokens)):
        first = OutputReader(stream, stream.outputs[0], model)
        stream.outputs[0].tokens, rest = tokens[:after], tokens[after:]
        delta = pb.Delta()
        first.fill_delta(delta)
        before = pb.Delta.FromString(delta.SerializeToString())
        stream.outputs[0].tokens = [*tokens[:after], *rest]
        more, later = read(stream, model, after)
        assert before.text + more == text
        assert whole_calls([*before.tool_calls, *later]) == whole_calls(pieces)


async def test_calls_stay_text_without_a_choice_and_where_the_template_declares_none(model_of):
    model = model_of("qwen", "</s>")
    output = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    messages = pb.Messages(
        messages=[pb.Message(role="user", content="x")],
        tools=[TOOL],
        tool_choice=pb.ToolChoice(mode=pb.ToolChoice.MODE_NONE),
    )
    stream, _ = await stream_of(model, output, messages=messages)
    assert read(stream, model) == (output, [])
    undeclared = replace(model, chat=ChatTemplate("{{ tools }}", {}), call_format=None)
    stream, _ = await stream_of(undeclared, output)
    assert read(stream, undeclared) == (output, [])


async def test_stop_strings_end_an_output_before_its_calls(model_of):
    model = model_of("qwen", "</s>")
    output = 'Sure. Stop.<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    stream, _ = await stream_of(model, output, stopping=pb.StoppingParams(stop=["Stop"]))
    assert read(stream, model) == ("Sure. ", [])


async def test_calls_need_text(model_of):
    with pytest.raises(InvalidArgument, match=r"response.text: true where messages.tools may be called"):
        await stream_of(model_of("qwen", "</s>"), "x", response=pb.ResponseOptions(text=False))
