"""Guides as routers check them: compiled once before admission, in a process that a hostile grammar ends alone."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from decant.engine.guides.compiler import GrammarCompiler
from decant.engine.guides.guide import Guide, GuideKind
from decant.engine.logits_processors import Allow
from decant.protos import inference_pb2 as pb
from decant.protos import worker_pb2 as wire
from decant.router.request.finish import finish_from_tokens
from decant.router.text import guide_check
from decant.router.text.guide_check import GuideCheck
from decant.runtime.errors import InvalidArgument
from tests.router.factories import model, valid
from tests.router.tokenizer_factories import MADE, folder

Guided, Stopping = pb.GuidedDecoding, pb.StoppingParams

SCHEMA = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})


def nested_rules(count: int) -> str:
    rules = "".join(f'r{index}: "a" r{index + 1} | "b"\n' for index in range(count))
    return f'start: r0\n{rules}r{count}: "x"\n'


@pytest.mark.parametrize(
    "guided",
    [
        Guided(json_schema=SCHEMA),
        Guided(regex="[a-z]+/\\d{2}"),
        Guided(ebnf_grammar='start: "a" | "b"'),
        Guided(choice=pb.Choices(choices=["yes", "no"])),
        Guided(json_object=True),
    ],
    ids=lambda guided: guided.WhichOneof("guide"),
)
async def test_a_guide_that_compiles_goes_to_the_workers_as_it_is(guided: pb.GuidedDecoding) -> None:
    guide = (await valid(guided=guided)).engine_request.guide
    kind = guided.WhichOneof("guide")
    assert kind is not None
    assert guide.WhichOneof("kind") == kind
    assert Guide.of(kind, getattr(guide, kind)) == Guide.of(kind, getattr(guided, kind))


async def test_a_request_without_a_guide_has_none_and_starts_no_process() -> None:
    served = model(guides=GuideCheck(Path("no such file"), 8, [1]))
    assert not (await valid(served=served)).engine_request.HasField("guide")


@pytest.mark.parametrize(
    ("guided", "field", "reason"),
    [
        (Guided(json_schema='{"type": "objekt"}'), "json_schema", "objekt"),
        (Guided(json_schema='{"oneOf": [{"type": "object"}, {}]}'), "json_schema", "oneOf"),
        (Guided(json_schema='{"type": "integer", "enum": ["a"]}'), "json_schema", ""),
        (Guided(json_schema='{"propertiez": {}}'), "json_schema", "propertiez"),
        (Guided(regex="a(b"), "regex", "unclosed group"),
        (Guided(regex="(?=a)b"), "regex", ""),
        (Guided(ebnf_grammar="start: nothing"), "ebnf_grammar", "nothing"),
        (Guided(choice=pb.Choices()), "choice", "0"),
        (Guided(json_object=False), "json_object", "False"),
        (Guided(ebnf_grammar='start: "a" <|end|> "b"'), "ebnf_grammar", "without end tokens"),
        (Guided(ebnf_grammar='start: "a" <[^5]> "b"'), "ebnf_grammar", "<[^5]>"),
    ],
    ids=str,
)
async def test_a_guide_that_does_not_compile_is_refused_by_its_field_with_the_reason(
    guided: pb.GuidedDecoding, field: str, reason: str
) -> None:
    for _ in range(2):  # the second from memory
        with pytest.raises(InvalidArgument) as refused:
            await valid(guided=guided)
        detail = refused.value.detail
        assert detail.violation is not None
        assert detail.violation.field == f"guided.{field}"
        assert reason in detail.message


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"guided": Guided()}, "guided"),
        ({"guided": Guided(regex="a"), "stopping": Stopping(min_tokens=1)}, "stopping.min_tokens"),
        ({"guided": Guided(regex="a"), "stopping": Stopping(ignore_eos=True)}, "stopping.ignore_eos"),
    ],
    ids=str,
)
async def test_what_contradicts_a_guide_is_refused_by_its_field(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        await valid(**fields)
    assert refused.value.detail.violation is not None
    assert refused.value.detail.violation.field == field


@pytest.mark.slow
@pytest.mark.parametrize(
    "guided",
    [
        Guided(json_schema='{"type": "integer", "multipleOf": 1000003}'),
        Guided(ebnf_grammar=nested_rules(5000)),
        Guided(json_schema=json.dumps({"properties": {f"k{index}": {"type": "string"} for index in range(4000)}})),
    ],
    ids=["time", "stack", "states"],
)
async def test_a_hostile_guide_is_refused_and_the_next_one_is_compiled_by_the_same_process(
    guided: pb.GuidedDecoding, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts, start = itertools.count(), guide_check._start
    monkeypatch.setattr(guide_check, "_start", lambda: (next(starts), start())[1])
    check = GuideCheck(folder(tmp_path, MADE["byte_level"]()) / "tokenizer.json", 500, [1])
    kind = guided.WhichOneof("guide")
    assert kind is not None
    with pytest.raises(InvalidArgument, match=r"^guided\.") as refused:
        await check.check(Guide.of(kind, getattr(guided, kind)))
    assert "CPU time" in str(refused.value) or "compiles" in str(refused.value)
    await check.check(Guide(GuideKind.REGEX, "[a-z]{3}"))
    assert next(starts) == 1


async def test_a_check_that_waits_does_not_stop_the_event_loop(tmp_path: Path) -> None:
    check = GuideCheck(folder(tmp_path, MADE["byte_level"]()) / "tokenizer.json", 500, [1])
    task = asyncio.create_task(check.check(Guide(GuideKind.REGEX, "[a-z]{3}")))
    turns = 0
    while not task.done():
        await asyncio.sleep(0.001)
        turns += 1
    await task
    assert turns > 1, "a process was started meanwhile"


@pytest.mark.parametrize("kind", ["metaspace", "word_piece", "words"])
async def test_a_model_whose_tokens_have_no_bytes_of_their_own_is_refused_by_the_field(
    kind: str, tmp_path: Path
) -> None:
    check = GuideCheck(folder(tmp_path, MADE[kind]()) / "tokenizer.json", 500, [1])
    for _ in range(2):
        with pytest.raises(InvalidArgument, match=r"guided\.regex: a model with another tokenizer"):
            await check.check(Guide(GuideKind.REGEX, "a"))


async def test_a_model_without_an_end_token_is_refused_by_the_field(tmp_path: Path) -> None:
    check = GuideCheck(folder(tmp_path, MADE["byte_level"]()) / "tokenizer.json", 500, [])
    with pytest.raises(InvalidArgument, match=r"guided\.regex: a model with an end token"):
        await check.check(Guide(GuideKind.REGEX, "a"))


@pytest.mark.parametrize(
    "guide",
    [
        Guide(GuideKind.CHOICE, choices=("<think>", "<|im_start|>")),
        Guide(GuideKind.REGEX, r"<think>|<\|im_start\|>"),
        Guide(GuideKind.GRAMMAR, 'start: "<think>" | "<|im_start|>"'),
    ],
    ids=lambda guide: guide.kind,
)
def test_a_literal_that_spells_an_added_token_is_written_in_ordinary_tokens(guide: Guide, tmp_path: Path) -> None:
    made = MADE["byte_level"]()
    made.add_tokens([AddedToken("<think>", special=False)])
    made.add_special_tokens(["<|im_start|>"])
    place = folder(tmp_path, made) / "tokenizer.json"
    grammar = GrammarCompiler(place, made.get_vocab_size(), frozenset({1})).grammar(guide)
    for literal in ("<think>", "<|im_start|>"):
        added, matcher = made.token_to_id(literal), grammar.new_matcher()
        assert added is not None
        for letter in literal:
            assert not Allow(matcher.compute_bitmask()).allows(added)
            assert matcher.consume_tokens(made.encode(letter, add_special_tokens=False).ids)
        assert Allow(matcher.compute_bitmask()).only == 1


async def test_a_guide_is_complete_if_its_output_ended_with_an_end_token() -> None:
    request = await valid(guided=Guided(regex="a+"), stopping=Stopping(stop_token_ids=[7], max_tokens=3))
    (eos,) = request.eos_token_ids
    for tokens, is_complete in (([5, eos], True), ([5, 7], False), ([5, 5, 5], False)):
        finish = finish_from_tokens(request, tokens)
        assert finish is not None
        assert finish.finished().guide_completed is is_complete
    plain = finish_from_tokens(await valid(), [5, eos])
    assert plain is not None
    assert not plain.finished().guide_completed


def test_public_and_internal_guides_have_the_same_fields() -> None:
    """A router copies one to the other as bytes. What a router makes by itself has the last numbers."""
    for public, internal in ((pb.GuidedDecoding, wire.Guide), (pb.Choices, wire.Guide.Choices)):
        described = [
            [
                (field.name, field.number, field.type)
                for field in kind.DESCRIPTOR.fields
                if not field.name.startswith("answer")
            ]
            for kind in (public, internal)
        ]
        assert described[0] == described[1]
