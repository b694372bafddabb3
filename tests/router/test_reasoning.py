"""Reasoning in deltas and outputs, its limit and switch, and conversations whose last message is continued."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from decant.engine.guides.guide import Guide
from decant.engine.reasoning import ReasoningCount, ReasoningMarkers
from decant.protos import inference_pb2 as pb
from decant.protos import worker_pb2 as wire
from decant.router.api.response_writer import OutputReader
from decant.router.request.output import Finish
from decant.router.request.token_stream import TokenStream
from decant.router.request.usage import usage_of
from decant.router.text.reasoning.divider import Part, ReasoningDivider
from decant.router.text.reasoning.formats import FORMATS, Reasoning
from decant.router.text.served_model import ServedModel, served
from decant.runtime.errors import InvalidArgument
from decant.runtime.model_files import find
from decant.runtime.packed import unpack
from tests.router.chat_templates import CHATML
from tests.router.factories import valid
from tests.router.tokenizer_factories import byte_level, folder
from tests.router.tool_templates import CONTROL, TOOL_TEMPLATES

SWITCH = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
TEMPLATES = {
    "think": CHATML + SWITCH,
    "open": CHATML + "<think>\n{# </think> #}",
    "mistral": CHATML + "{# [THINK] [/THINK] #}",
    "gpt-oss": TOOL_TEMPLATES["gpt_oss"] + "{# analysis #}",
}
SPECIAL = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "[THINK]", "[/THINK]", *CONTROL["gpt_oss"]]
HARMONY = (
    "<|channel|>analysis<|message|>Look é😀.<|end|><|start|>assistant<|channel|>commentary<|message|>First.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>The answer."
)
OUTPUTS = {
    "think": ("<think>\nLook é😀.\n</think>\n\nThe answer.", "\nLook é😀.\n", "\n\nThe answer."),
    "open": ("Look <b>é😀.</think>The answer.", "Look <b>é😀.", "The answer."),
    "mistral": ("[THINK]Look.[/THINK]The answer. [THINK]x[/THINK]y", "Look.x", "The answer. y"),
    "gpt-oss": (HARMONY, "Look é😀.", "First.The answer."),
}
"""An output, its reasoning and its text."""


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    root = tmp_path_factory.mktemp("reasoning")

    @cache
    def made(name: str, template: str = "") -> ServedModel:
        config = {"chat_template": template or TEMPLATES[name], "additional_special_tokens": SPECIAL}
        place = folder(root / f"{name}{len(list(root.iterdir()))}", byte_level(), config)
        whole = served(find(str(place))).tokenizer
        return replace(served(find(str(folder(place, whole, config)))), max_context_length=1 << 20)

    return made


def messages(*contents: str, **fields: Any) -> pb.Messages:
    roles = ("user", "assistant")
    listed = [pb.Message(role=roles[place % 2], content=content) for place, content in enumerate(contents or ("x",))]
    return pb.Messages(messages=listed, **fields)


async def stream_of(model: ServedModel, text: str, **fields: Any) -> TokenStream:
    stream = TokenStream(await request_of(model, **fields))
    stream.outputs[0].tokens += await model.encode(text, special=False)
    stream.outputs[0].finish = Finish(pb.FINISH_REASON_LENGTH)
    return stream


async def request_of(model: ServedModel, **fields: Any) -> Any:
    fields = {"messages": messages(), "request_id": "r", "workers_context_length": 4096, **fields}
    return await valid(served=model, **fields)


def read(stream: TokenStream, model: ServedModel, after: int = 0) -> tuple[str, str]:
    """Reasoning and text of what follows the first tokens."""
    reader, delta, thought, text = OutputReader(stream, stream.outputs[0], model, after), pb.Delta(), "", ""
    while reader.fill_delta(delta):
        thought, text = thought + delta.reasoning, text + delta.text
    rest = reader.flush_text()
    return thought + rest.reasoning, text + rest.text


@pytest.mark.parametrize("name", OUTPUTS)
async def test_deltas_and_outputs_have_reasoning_apart_from_the_text(model_of, name):
    model = model_of(name)
    output, thought, text = OUTPUTS[name]
    for skip in (True, False):
        stream = await stream_of(model, output, response=pb.ResponseOptions(skip_special_tokens=skip))
        assert read(stream, model) == (thought, text)
        whole = OutputReader(stream, stream.outputs[0], model).all_so_far(0)
        assert (whole.reasoning, whole.text) == (thought, text)
    assert model.reasoning is not None


@pytest.mark.parametrize("name", OUTPUTS)
async def test_a_resumed_stream_continues_the_reasoning_wherever_it_was_lost(model_of, name):
    model = model_of(name)
    output, thought, text = OUTPUTS[name]
    stream = await stream_of(model, output)
    tokens = stream.outputs[0].tokens
    for after in range(1, len(tokens)):
        reader, delta = OutputReader(stream, stream.outputs[0], model), pb.Delta()
        stream.outputs[0].tokens = tokens[:after]
        reader.fill_delta(delta)
        stream.outputs[0].tokens = tokens
        later = read(stream, model, after)
        assert (delta.reasoning + later[0], delta.text + later[1]) == (thought, text)


async def test_usage_counts_the_tokens_between_the_markers(model_of):
    model = model_of("think")
    output, thought, _ = OUTPUTS["think"]
    stream = await stream_of(model, output)
    assert usage_of(stream).reasoning_tokens == len(await model.encode(thought, special=False))
    plain = await stream_of(model, "The answer.")
    assert usage_of(plain).HasField("reasoning_tokens")
    assert not usage_of(plain).reasoning_tokens
    off = await stream_of(model, output, messages=messages(reasoning=False))
    assert not usage_of(off).HasField("reasoning_tokens")


async def test_what_follows_a_text_or_token_ids_is_not_marked(model_of):
    model = model_of("think")
    for fields in ({"prompt": "x"}, {"token_ids": pb.TokenIds(ids=[5])}):
        request = await valid(served=model, workers_context_length=4096, **fields)
        assert request.output_options.reasoning is None


async def test_text_that_spells_a_marker_marks_nothing(model_of):
    model = model_of("think")
    stream = await stream_of(model, "")
    spelled = model.plain_tokenizer.encode("<think>x</think>y", (), special=False)
    stream.outputs[0].tokens += spelled
    assert read(stream, model) == ("", "<think>x</think>y")


async def test_reasoning_without_an_end_stays_reasoning(model_of):
    model = model_of("think")
    stream = await stream_of(model, "<think>Look é")
    assert read(stream, model) == ("Look é", "")
    stream = await stream_of(model, "<think>Look</s>")
    assert read(stream, model) == ("Look", "")


async def test_stop_strings_are_searched_in_the_text_alone(model_of):
    model = model_of("think")
    request = await request_of(model, stopping=pb.StoppingParams(stop=["Stop"], max_tokens=1000))
    stream = TokenStream(request)
    stream.begin_writing()
    output = stream.outputs[0]
    for token in await model.encode("<think>Stop it</think>Now Stop it", special=False):
        output.write(output.position, token)
    assert output.finish == Finish(pb.FINISH_REASON_STOP, stop_string="Stop")
    assert read(stream, model) == ("Stop it", "Now ")


async def test_calls_are_searched_in_the_text_alone(model_of):
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    model = model_of("think", TEMPLATES["think"] + "{# tools <tool_call> arguments #}")
    listed = messages(tools=[pb.Tool(name="now")])
    stream = await stream_of(model, f"<think>{call}</think>{call}", messages=listed)
    whole = OutputReader(stream, stream.outputs[0], model).all_so_far(0)
    assert (whole.reasoning, whole.text, len(whole.tool_calls)) == (call, "", 1)


async def test_a_call_keeps_its_header_that_begins_no_part_of_the_answer(model_of):
    model = model_of("gpt-oss")
    call = "<|start|>assistant to=functions.now<|channel|>commentary<|message|>{}<|call|>"
    stream = await stream_of(
        model, f"<|channel|>analysis<|message|>hm<|end|>{call}", messages=messages(tools=[pb.Tool(name="now")])
    )
    whole = OutputReader(stream, stream.outputs[0], model).all_so_far(0)
    assert (whole.reasoning, whole.text) == ("hm", "")
    assert [(each.name, each.arguments) for each in whole.tool_calls] == [("now", "{}")]


MARKERS = ReasoningMarkers((1, 2, 3), 9)
LONG = Reasoning(FORMATS[0], MARKERS, ((1, 4), (7,)), ((1, 2, 5, 6),))


@given(st.lists(st.integers(1, 10), max_size=30), st.data(), st.booleans())
@settings(max_examples=300, deadline=None)
def test_tokens_are_divided_alike_however_they_arrive(tokens, data, is_open):
    reasoning = replace(LONG, markers=replace(MARKERS, is_open=is_open))

    def divided(cuts: Sequence[Sequence[int]]) -> list[tuple[Part, int]]:
        divider = ReasoningDivider(reasoning)
        pieces = [(piece.part, token) for cut in cuts for piece in divider.add(cut) for token in piece.tokens]
        return [*pieces, *((Part.ANSWER, token) for token in divider.finish())]

    whole = divided([tokens])
    assert [token for _, token in whole] == tokens
    assert whole == divided([[token] for token in tokens])
    at = data.draw(st.integers(0, len(tokens)))
    assert whole == divided([tokens[:at], tokens[at:]])
    thought = [token for part, token in whole if part is Part.REASONING]
    assert ReasoningCount(reasoning.markers).add(tokens).count == len(thought)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_declares_its_reasoning(model_of, name):
    reasoning = model_of(name).reasoning
    assert reasoning is not None
    assert reasoning.form.name == ("think" if name == "open" else name)


def test_without_tokens_for_its_markers_a_template_declares_none(tmp_path):
    model = served(find(str(folder(tmp_path, byte_level(), {"chat_template": TEMPLATES["think"]}))))
    assert model.reasoning is None


# ------------------------------------------------------------------------------------ limit and switch


@pytest.mark.parametrize("name", TEMPLATES)
async def test_a_limit_goes_to_the_workers_with_the_markers(model_of, name):
    model = model_of(name)
    request = await request_of(model, stopping=pb.StoppingParams(max_reasoning_tokens=0))
    limit = request.engine_request.reasoning
    assert model.reasoning is not None
    assert (tuple(unpack(limit.begin)), limit.end) == (model.reasoning.markers.begin, model.reasoning.markers.end)
    assert limit.max_tokens == 0
    assert limit.is_open is (name == "open")
    assert not (await request_of(model)).engine_request.HasField("reasoning")


@pytest.mark.parametrize(
    ("name", "fields", "field"),
    [
        ("think", {"prompt": "x", "messages": None}, "stopping.max_reasoning_tokens"),
        ("none", {}, "stopping.max_reasoning_tokens"),
        ("think", {"messages": messages(reasoning=False)}, "stopping.max_reasoning_tokens"),
        ("open", {"messages": messages(reasoning=False)}, "messages.reasoning"),
        ("none", {"messages": messages(reasoning=True)}, "messages.reasoning"),
        ("think", {"messages": messages("x", continue_final_message=True)}, "messages.messages[0].role"),
        ("think", {"messages": messages("x", " ", continue_final_message=True)}, "messages.messages[1].content"),
        (
            "think",
            {"messages": messages("x", "y", continue_final_message=True, add_generation_prompt=True)},
            "messages.add_generation_prompt",
        ),
    ],
    ids=str,
)
async def test_what_a_model_or_request_has_no_use_for_is_refused_by_its_field(model_of, name, fields, field):
    model = model_of("think", CHATML) if name == "none" else model_of(name)
    given_fields = {"messages": messages(), **fields}
    given_fields = {name: value for name, value in given_fields.items() if value is not None}
    with pytest.raises(InvalidArgument) as refused:
        await valid(
            served=model,
            workers_context_length=4096,
            stopping=pb.StoppingParams(max_reasoning_tokens=3),
            **given_fields,
        )
    assert refused.value.field == field


async def test_the_end_of_reasoning_is_no_stop_token_of_a_request_with_a_limit(model_of):
    model = model_of("think")
    end = model.tokenizer.token_to_id("</think>")
    with pytest.raises(InvalidArgument, match=r"stopping.max_reasoning_tokens"):
        await request_of(model, stopping=pb.StoppingParams(max_reasoning_tokens=3, stop_token_ids=[end]))


async def test_a_switch_of_the_template_turns_reasoning_off_and_on(model_of):
    model = model_of("think")
    on, off, unset = [
        (await request_of(model, messages=messages(**fields)))
        for fields in ({"reasoning": True}, {"reasoning": False}, {})
    ]
    assert on.engine_request.prompt == unset.engine_request.prompt
    tail = await model.encode("<think>\n\n</think>\n\n", special=False)
    assert list(unpack(off.engine_request.prompt)) == [*unpack(on.engine_request.prompt), *tail]
    assert on.output_options.reasoning is not None
    assert off.output_options.reasoning is None


async def test_a_guide_holds_for_the_answer_behind_the_reasoning(model_of):
    guided = pb.GuidedDecoding(json_schema=json.dumps({"enum": ["a", "b"]}))
    request = await request_of(model_of("open"), guided=guided)
    assert request.engine_request.guide.WhichOneof("kind") == "answer"
    made = request.engine_request.guide
    guide = Guide.of("answer", made.answer, made.answer_field)
    assert guide.field == "guided.json_schema"
    first, second = json.loads(guide.grammar())["grammars"]
    assert first["lark_grammar"].startswith("start: thought answer\n")
    assert second["json_schema"]["enum"] == ["a", "b"]
    tag = {"begin": "<a>", "schema": {"type": "integer"}, "end": "</a>"}
    for other in (
        {"regex": "[a-c]+"},
        {"ebnf_grammar": 'start: "a" | "b"'},
        {"choice": pb.Choices(choices=["yes", "no"])},
        {"json_object": True},
        {"structural_tag": json.dumps({"structures": [tag], "triggers": ["<a"]})},
    ):
        made = await request_of(model_of("gpt-oss"), guided=pb.GuidedDecoding(**other))
        assert made.engine_request.guide.WhichOneof("kind") == "answer"
        assert made.engine_request.guide.answer_field == f"guided.{next(iter(other))}"
    off = await request_of(model_of("think"), guided=guided, messages=messages(reasoning=False))
    assert off.engine_request.guide == wire.Guide(json_schema=guided.json_schema)


@pytest.mark.parametrize("access", ["m.reasoning_content", "m['thinking']", "m.reasoning"])
async def test_earlier_reasoning_is_what_the_template_takes_as_such(model_of, access):
    model = model_of("think", "{% for m in messages %}{{ " + access + " }}{{ m.content }}{% endfor %}{# </think> #}")
    turn = pb.Message(role="assistant", content="Yes", reasoning="Look</think>")
    request = await request_of(model, messages=pb.Messages(messages=[turn]))
    text = await model.decode(unpack(request.engine_request.prompt), skip_special_tokens=False)
    assert text == "Look</think>Yes"
    assert model.tokenizer.token_to_id("</think>") not in unpack(request.engine_request.prompt)
    with pytest.raises(InvalidArgument, match=r"messages.messages\[0\].reasoning: empty for a model"):
        await request_of(model_of("open", CHATML + "{# </think> #}"), messages=pb.Messages(messages=[turn]))


# ------------------------------------------------------------------------------------ a continued message


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["chatml", *TOOL_TEMPLATES])
@pytest.mark.parametrize("content", ["The answer", "The answer ", " The\n", "x"])
async def test_a_continued_message_becomes_the_tokens_that_transformers_makes_of_it(tmp_path, kind, content):
    template = CHATML if kind == "chatml" else TOOL_TEMPLATES[kind]
    place = folder(tmp_path, byte_level(), {"chat_template": template, "additional_special_tokens": SPECIAL})
    theirs = AutoTokenizer.from_pretrained(str(place))
    plain = [{"role": "user", "content": "Say x."}, {"role": "assistant", "content": content}]
    expected = theirs.apply_chat_template(plain, continue_final_message=True, return_dict=False)
    model = replace(served(find(str(place))), vocab_size=1 << 20)
    made = await request_of(model, messages=messages("Say x.", content, continue_final_message=True))
    assert list(unpack(made.engine_request.prompt)) == expected


async def test_a_continued_message_that_has_begun_to_reason_is_reasoned_on(model_of):
    model = model_of("think")
    for content, is_open in (("<think>Look", True), ("<think>Look</think>Yes", False), ("Yes", False)):
        listed = messages("x", content, continue_final_message=True)
        request = await request_of(model, messages=listed, parse_special_tokens=True)
        assert request.output_options.reasoning.markers.is_open is is_open
