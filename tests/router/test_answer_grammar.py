"""Grammars of whole answers: calls that are required, strict or single, parsed by the format that wrote them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from decant.engine.guides.compiler import Grammar, GrammarCompiler
from decant.engine.guides.guide import Guide, GuideKind
from decant.protos import inference_pb2 as pb
from decant.protos import worker_pb2 as wire
from decant.router.text.served_model import ServedModel, served
from decant.router.text.tools.formats import FORMATS
from decant.router.text.tools.xml_grammar import parameter_rules
from decant.runtime.errors import InvalidArgument
from decant.runtime.model_files import find
from tests.router.factories import valid
from tests.router.test_tool_calls import read, stream_of
from tests.router.tokenizer_factories import byte_level, folder
from tests.router.tool_templates import CONTROL, TOOL_TEMPLATES

END = 2
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "units": {"enum": ['"}', "{", "é"]},
        "days": {"type": "array", "items": {"$ref": "#/$defs/day"}, "maxItems": 2},
    },
    "required": ["city", "units"],
    "additionalProperties": False,
    "$defs": {"day": {"type": "integer", "minimum": 1, "maximum": 9}},
}
STRICT = pb.Tool(name="get_weather", parameters=json.dumps(SCHEMA), strict=True)
OTHER = pb.Tool(name="get", parameters='{"type": "object", "properties": {}}')
NOW = pb.Tool(name="a.b-c_1", strict=True)
REQUIRED = pb.ToolChoice(mode=pb.ToolChoice.MODE_REQUIRED)
TEMPLATES = {
    **{("hermes" if name == "qwen" else name.replace("_", "-")): text for name, text in TOOL_TEMPLATES.items()},
    "deepseek-v3.1": TOOL_TEMPLATES["deepseek"].replace("```json", ""),
    "mistral-args": TOOL_TEMPLATES["mistral"] + "{# [ARGS] #}",
}
THOUGHTS = "{# <think> </think> #}"
BEGINS = {
    "hermes": "<tool_call>",
    "mistral": "[TOOL_CALLS]",
    "mistral-args": "[TOOL_CALLS]",
    "deepseek": "<｜tool▁calls▁begin｜>",
    "deepseek-v3.1": "<｜tool▁calls▁begin｜>",
    "gpt-oss": "<|channel|>commentary to=functions.",
    "llama": "{",
    "qwen3-coder": "<tool_call>",
}
"""What begins the calls of each format."""
CLOSE = "\n</parameter>\n"
"""Ends a text without limits in the format that has them, which random tokens do not find."""
FORMAT_NAMES = sorted(form.name for form in FORMATS)


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    root = tmp_path_factory.mktemp("answers")

    @cache
    def made(name: str, *, tokens: bool = True, thinks: bool = False, opens: str = "") -> ServedModel:
        """``tokens``: the markers of calls are tokens. ``opens``: of the reasoning, at the end of each prompt."""
        family = name.replace("-", "_")
        control = [*CONTROL[family if family in CONTROL else name.partition("-")[0]], "<tool_call>", "</tool_call>"]
        thoughts = ["<think>", "</think>"] if thinks else []
        config = {
            "chat_template": TEMPLATES[name] + (THOUGHTS if thinks else "") + opens,
            "additional_special_tokens": [*(control if tokens else ()), *thoughts],
        }
        place = folder(root / f"{name}{len(list(root.iterdir()))}", byte_level(), config)
        whole = served(find(str(place))).tokenizer  # with the tokens that the configuration adds
        return replace(served(find(str(folder(place, whole, config)))), max_context_length=1 << 20)

    return made


@cache
def compiler(tokenizer: Path, size: int) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, size, frozenset({END}))


def messages(tools: Sequence[pb.Tool], **fields: Any) -> pb.Messages:
    return pb.Messages(messages=[pb.Message(role="user", content="x")], tools=tools, **fields)


async def grammar_of(model: ServedModel, tools: Sequence[pb.Tool], **fields: Any) -> wire.Guide:
    request = await valid(served=model, messages=messages(tools, **fields), workers_context_length=4096)
    return request.engine_request.guide


def matcher_of(model: ServedModel, guide: wire.Guide) -> Any:
    grammar = Grammar(
        Guide(GuideKind.ANSWER, guide.answer), compiler(model.folder / "tokenizer.json", model.vocab_size)
    )
    return grammar.new_matcher()


def allowed(matcher: Any, size: int) -> list[int]:
    mask = matcher.compute_bitmask()
    assert not matcher.is_error(), matcher.get_error()
    return [token for token in range(size) if mask[token // 8] >> token % 8 & 1]


def walk(model: ServedModel, guide: wire.Guide, seed: int, begin: str = "", most: int = 4000) -> list[int]:
    """Random tokens of an answer that begins with a text, among which an end is likely."""
    draw, matcher = random.Random(seed), matcher_of(model, guide)
    output = model.tokenizer.encode(begin, add_special_tokens=False).ids
    for token in output:
        assert token in allowed(matcher, model.vocab_size), (begin, model.tokenizer.id_to_token(token))
        matcher.consume_token(token)
    pieces = [model.token_table.bytes_of(token) for token in range(model.vocab_size)]
    close = model.tokenizer.encode(CLOSE, add_special_tokens=False).ids
    while len(output) < most:
        if matcher.validate_tokens(close) == len(close) and draw.random() < 0.7:
            output += close
            matcher.consume_tokens(close)
        tokens = allowed(matcher, model.vocab_size)
        if END in tokens and (len(tokens) == 1 or draw.random() < 0.4):
            return [*output, END]
        tokens = [token for token in tokens if token != END]
        if model.reasoning is not None and model.reasoning.markers.end in tokens and draw.random() < 0.3:
            tokens = [model.reasoning.markers.end]
        closing = [token for token in tokens if any(sign in pieces[token] for sign in (b'"', b"}", b"]"))]
        output.append(draw.choice(closing if closing and draw.random() < 0.6 else tokens))
        matcher.consume_token(output[-1])
    raise AssertionError(f"no end after {most} tokens: {model.tokenizer.decode(output, skip_special_tokens=False)!r}")


async def parsed(model: ServedModel, output: Sequence[int], tools: Sequence[pb.Tool]) -> tuple[str, list[Any]]:
    stream, _ = await stream_of(model, "", messages=messages(tools))
    stream.outputs[0].tokens += output
    text, pieces = read(stream, model)
    calls: list[list[str]] = []
    for piece in pieces:
        if piece.index == len(calls):
            calls.append([piece.name, ""])
        calls[piece.index][1] += piece.arguments
    return text, calls


def check(calls: Sequence[Sequence[str]]) -> None:
    """Arguments fit their schema, where the tool is strict."""
    for name, arguments in calls:
        value = json.loads(arguments)
        assert isinstance(value, dict)
        if name == STRICT.name:
            jsonschema.validate(value, SCHEMA)
        elif name == NOW.name:
            assert value == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize("tokens", [True, False], ids=["tokens", "texts"])
async def test_answers_of_required_tools_are_calls_with_arguments_that_fit(model_of, name, tokens):
    model, tools = model_of(name, tokens=tokens, thinks=tokens), [STRICT, OTHER, NOW]
    guide = await grammar_of(model, tools, tool_choice=REQUIRED)
    counts = set[int]()
    for seed in range(60):
        if seed >= 12 and (len(counts) > 1 or name == "gpt-oss"):
            break
        text, calls = await parsed(model, walk(model, guide, seed), tools)
        assert calls
        assert text == ""
        check(calls)
        counts.add(len(calls))
    assert len(counts) > 1 or name == "gpt-oss", "calls may be several"


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMAT_NAMES)
async def test_a_strict_tool_has_text_or_text_and_calls_with_arguments_that_fit(model_of, name):
    model, tools = model_of(name), [STRICT, OTHER]
    guide = await grammar_of(model, tools)
    for seed in range(8):
        text, calls = await parsed(model, walk(model, guide, seed), tools)
        check(calls)
        begin = BEGINS[name]
        if name == "gpt-oss":
            begin = "<|channel|>commentary<|message|>Sure.<|end|><|start|>assistant" + begin
        elif name != "llama":
            begin = "Sure.\n" + begin
        text, calls = await parsed(model, walk(model, guide, seed, begin), tools)
        assert calls
        assert "Sure." in text or name == "llama"
        check(calls)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMAT_NAMES)
async def test_one_name_and_no_parallel_calls_hold_for_each_answer(model_of, name):
    model, tools = model_of(name), [STRICT, OTHER, NOW]
    named = await grammar_of(model, tools, tool_choice=pb.ToolChoice(name="a.b-c_1"))
    single = await grammar_of(model, tools, tool_choice=REQUIRED, parallel_tool_calls=False)
    at_most = await grammar_of(model, [OTHER], parallel_tool_calls=False)
    for seed in range(6):
        _, calls = await parsed(model, walk(model, named, seed), tools)
        assert {tool for tool, _ in calls} == {"a.b-c_1"}
        _, calls = await parsed(model, walk(model, single, seed), tools)
        assert len(calls) == 1
        begin = BEGINS[name]
        _, calls = await parsed(model, walk(model, at_most, seed, begin), [OTHER])
        assert len(calls) == 1


ELEMENTS: list[tuple[dict[str, Any], str, str]] = [
    ({"properties": {"x": {"type": "string", "pattern": "a"}}}, "texts with enum", "pattern at #/properties/x"),
    (
        {"properties": {"x": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"type": "string", "format": "date"}}},
        "texts with",
        "format",
    ),
    ({"properties": {"x": {"enum": ["</parameter>"]}}}, "none with </parameter>", "#/properties/x"),
    ({"properties": {"x": {"type": "string", "const": 3}}}, "at least one text", "#/properties/x"),
    ({"properties": {"a>b": {}}}, "names of parameters", "a>b"),
    ({"properties": {"x": False}}, "properties that may be there", "#/properties/x"),
    ({"properties": {"x": {"items": {"$ref": "#"}, "type": "array"}}}, "references to", "# at #/properties/x"),
    ({"properties": {}, "required": ["x"]}, "required names", "x"),
    ({"properties": {}, "minProperties": 1}, "keywords of objects", "minProperties at #"),
    ({"additionalProperties": {"type": "integer"}}, "all texts or nothing", "#/additionalProperties"),
    ({"additionalProperties": {"type": "string", "minLength": 1}}, "all texts or nothing", "#/additionalProperties"),
    ({"properties": {"x": {"minLength": "0}/ | /.{0"}}}, "#/properties/x/minLength: a whole number", "0}/ | /.{0"),
    ({"properties": {"x": {"maxLength": -1}}}, "#/properties/x/maxLength: a whole number", "-1"),
    ({"properties": {"x": {"enum": "ab"}}}, "#/properties/x/enum: a list", "ab"),
    ({"properties": {"x": {"type": 5}}}, "#/properties/x/type: the name of a type", "5"),
    ({"properties": {"x": {}}, "required": "x"}, "#/required: a list of names", "x"),
    ({"required": 5}, "#/required: a list of names", "5"),
    (
        {"$defs": {"d": {"title": "d" * 9999}}, "properties": {name: {"type": "integer"} for name in "abcdefghijklmn"}},
        "131072 bytes of definitions",
        "140",
    ),
]


@pytest.mark.parametrize(("schema", "limit", "value"), ELEMENTS, ids=[each[2] for each in ELEMENTS])
async def test_a_strict_schema_that_elements_do_not_hold_is_refused_by_its_place(model_of, schema, limit, value):
    with pytest.raises(InvalidArgument) as refused:
        await grammar_of(model_of("qwen3-coder"), [pb.Tool(name="a", strict=True, parameters=json.dumps(schema))])
    assert refused.value.field == "messages.tools[0].parameters"
    assert limit in refused.value.limit
    assert value in str(refused.value.value)


def test_a_reference_of_a_parameter_is_to_the_definitions_of_the_whole_schema():
    inner = {"type": "array", "items": {"$ref": "#/$defs/x"}, "$defs": {"x": {"type": "string"}}}
    schema = {"properties": {"a": inner}, "$defs": {"x": {"type": "integer"}}}
    (line,) = [line for line in parameter_rules("r", schema).lines if "%json" in line]
    assert '"$defs": {"x": {"type": "integer"}}' in line


async def test_arguments_without_properties_may_be_texts(model_of):
    for part in ({}, True, {"type": "string", "title": "any"}):
        tool = pb.Tool(name="a", strict=True, parameters=json.dumps({"additionalProperties": part}))
        assert (await grammar_of(model_of("qwen3-coder"), [tool])).answer


async def test_reasoning_may_come_first_and_holds_no_calls(model_of):
    model = model_of("hermes", thinks=True)
    guide = await grammar_of(model, [STRICT], tool_choice=REQUIRED)
    size, ids = (
        model.vocab_size,
        {text: model.tokenizer.token_to_id(text) for text in ("<think>", "</think>", "<tool_call>")},
    )
    matcher = matcher_of(model, guide)
    assert set(allowed(matcher, size)) == {ids["<think>"], ids["<tool_call>"]}
    matcher.consume_token(ids["<think>"])
    for byte in model.tokenizer.encode("<tool_call>", add_special_tokens=False).ids:
        tokens = allowed(matcher, size)
        assert END not in tokens
        assert ids["</think>"] in tokens
        matcher.consume_token(byte)
    matcher.consume_token(ids["</think>"])
    assert allowed(matcher, size) == [ids["<tool_call>"]]


@pytest.mark.parametrize(("opens", "first"), [("<think>\n", "any"), ("<think>\n\n</think>\n\n", "<tool_call>")])
async def test_a_prompt_that_begins_or_ends_the_reasoning_decides(model_of, opens, first):
    model = model_of("hermes", thinks=True, opens=opens)
    guide = await grammar_of(model, [STRICT], tool_choice=REQUIRED)
    tokens = allowed(matcher_of(model, guide), model.vocab_size)
    if first == "any":
        assert len(tokens) > 100
        assert model.tokenizer.token_to_id("</think>") in tokens
        assert model.tokenizer.token_to_id("<think>") not in tokens
    else:
        assert tokens == [model.tokenizer.token_to_id("<tool_call>")]


async def test_without_rules_an_answer_has_no_grammar(model_of):
    model = model_of("hermes")
    for fields in ({}, {"parallel_tool_calls": True}, {"tool_choice": pb.ToolChoice(mode=pb.ToolChoice.MODE_AUTO)}):
        assert await grammar_of(model, [OTHER], **fields) == wire.Guide()
    none = pb.ToolChoice(mode=pb.ToolChoice.MODE_NONE)
    assert await grammar_of(model, [STRICT], tool_choice=none) == wire.Guide()


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    ({"tools": [STRICT]}, {"guided": pb.GuidedDecoding(regex="a")}, "guided", "unset where"),
    (
        {"tools": [STRICT]},
        {"stopping": pb.StoppingParams(min_tokens=2)},
        "stopping.min_tokens",
        "0 with messages.tools",
    ),
    ({"tools": [STRICT]}, {"stopping": pb.StoppingParams(ignore_eos=True)}, "stopping.ignore_eos", "messages.tools"),
    ({"tools": [OTHER], "tool_choice": pb.ToolChoice(name="got")}, {}, "messages.tool_choice.name", "the name of one"),
    ({"tools": [OTHER], "tool_choice": pb.ToolChoice(name="")}, {}, "messages.tool_choice.name", "the name of one"),
    ({"parallel_tool_calls": False}, {}, "messages.parallel_tool_calls", "unset without tools"),
    (
        {"tools": [OTHER, pb.Tool(name="a", strict=True, parameters='{"uniqueItems": true}')]},
        {},
        "messages.tools[1].parameters",
        "keywords that are supported",
    ),
    (
        {"tools": [pb.Tool(name="a", strict=True, parameters='{"type": "array"}')]},
        {},
        "messages.tools[0].parameters",
        'of type "object"',
    ),
    (
        {"tools": [pb.Tool(name="a", strict=True, parameters='{"properties": {"x": false}, "required": ["x"]}')]},
        {},
        "messages.tools",
        "a grammar that compiles",
    ),
]


@pytest.mark.parametrize(("fields", "more", "field", "limit"), REFUSED, ids=[each[2] for each in REFUSED])
async def test_what_a_grammar_of_calls_does_not_take_is_refused_by_its_field(model_of, fields, more, field, limit):
    with pytest.raises(InvalidArgument) as refused:
        await valid(
            served=model_of("hermes"),
            messages=pb.Messages(messages=[pb.Message(role="user", content="x")], **fields),
            workers_context_length=4096,
            **more,
        )
    assert refused.value.field == field
    assert limit in refused.value.limit


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tools": [STRICT]}, "messages.tools[0].strict"),
        ({"tools": [OTHER], "tool_choice": REQUIRED}, "messages.tool_choice"),
        ({"tools": [OTHER], "parallel_tool_calls": False}, "messages.parallel_tool_calls"),
    ],
)
async def test_a_model_without_a_format_of_calls_refuses_rules(model_of, fields, field):
    with pytest.raises(InvalidArgument) as refused:
        await grammar_of(replace(model_of("hermes"), call_format=None), **fields)
    assert refused.value.field == field
    assert "declares a format of calls" in refused.value.limit
