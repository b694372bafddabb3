"""Structural tags: text in which a trigger begins a tag, whose content follows a schema."""

from __future__ import annotations

import json
from typing import Any

import pytest

from decant.engine.errors import InvalidRequest
from decant.engine.guides.guide import Guide, GuideKind, lark_literal
from decant.router.text.structural_tags import structural_tag_grammar
from tests.engine.guides.walk import compiler

ADD: dict[str, Any] = {
    "begin": "<function=add>",
    "schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    "end": "</function>",
}
SUM: dict[str, Any] = {"begin": "<function=sum>", "schema": {"type": "array", "items": {"type": "integer"}}, "end": ")"}
ONE: dict[str, Any] = {"begin": "[[", "schema": {"const": 1}, "end": ""}
TAGS: dict[str, Any] = {"structures": [ADD, SUM, ONE], "triggers": ["<function=", "[["]}


def terms(text: str) -> str:
    """As of a tokenizer in which ``[[`` is a token of its own."""
    return "<[1000]>" if text == "[[" else lark_literal(text) if text else ""


def accepts(output: list[int]) -> bool | None:
    """Whether the output is a match; None: it can't become one."""
    guide = Guide(GuideKind.STRUCTURAL_TAG, structural_tag_grammar(json.dumps(TAGS), terms))
    matcher = compiler().grammar(guide).new_matcher()
    if matcher.try_consume_tokens(output) < len(output):
        return None
    return bool(matcher.is_accepting())


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("", True),
        ("a < b <func x </function>", True),
        ('so <function=add>{"a":1}</function> then', True),
        ('<function=add>{"a":1}</function><function=sum>[1,2])', True),
        ("text <function=", False),
        ('<function=add>{"a":1}', False),
        ("text <function=mul>", None),
        ('text <function=add>{"a":"b"}', None),
    ],
)
def test_text_is_free_until_a_trigger_and_then_a_tag(output: str, expected: bool | None) -> None:
    assert accepts(compiler().tokenize(output)) is expected


def test_a_trigger_that_is_a_token_stands_for_that_token() -> None:
    text, one, two = (compiler().tokenize(text) for text in ("so", "1", "2"))
    assert accepts([*text, 1000, *one, *text]) is True
    assert accepts([*text, 1000, *two]) is None


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ("{", "JSON"),
        ("[]", "#"),
        ({"format": {}}, "#"),
        ({"structures": []}, "#/structures"),
        ({"structures": [ADD] * 129, "triggers": ["<"]}, "#/structures"),
        ({"structures": [{**ADD, "ends": ""}]}, "#/structures/0"),
        ({"structures": [ADD, {**ADD, "begin": "call"}]}, "#/structures/1/begin"),
        ({"structures": [{**ADD, "schema": "x"}]}, "#/structures/0/schema"),
        ({"structures": [{**ADD, "schema": {"not": {}}}]}, "keywords"),
        ({"triggers": ["<function=", "[[", ""]}, "#/triggers/2"),
        ({"triggers": ["<function=", "[[", "<tool"]}, "#/triggers/2"),
        ({"triggers": "<"}, "#/triggers"),
    ],
    ids=str,
)
def test_a_tag_that_is_none_is_refused_by_its_path(change: Any, path: str) -> None:
    text = change if isinstance(change, str) else json.dumps({**TAGS, **change})
    with pytest.raises(InvalidRequest) as refused:
        structural_tag_grammar(text, terms)
    assert refused.value.field == "guided.structural_tag"
    assert path in refused.value.limit
