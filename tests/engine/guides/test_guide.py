"""Guides that are refused before any tokenizer is needed, by field, and the grammars of the others."""

from __future__ import annotations

import json
from typing import Any

import pytest

from decant.engine.errors import InvalidRequest
from decant.engine.guides.guide import MAX_CHOICES, MAX_GUIDE_BYTES, Guide, GuideKind
from decant.engine.guides.json_schema import KEYWORDS, MAX_DEPTH
from decant.protos import inference_pb2 as pb
from decant.protos import worker_pb2 as wire
from tests.engine.guides.tiny_tokenizer import compiler


def refusal(schema: Any) -> InvalidRequest:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    with pytest.raises(InvalidRequest) as refused:
        Guide(GuideKind.JSON_SCHEMA, text).grammar()
    assert refused.value.field == "guided.json_schema"
    return refused.value


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"properties": {"a": {"propertiez": {}}}}, "propertiez at #/properties/a"),
        ({"x-guidance": {"lenient": True}}, "x-guidance at #"),
        ({"anyOf": [{}, {"items": {"x-guidance": {}}}]}, "x-guidance at #/anyOf/1/items"),
        ({"$defs": {"a": {"not": {}}}}, "not at #/$defs/a"),
        ({"patternProperties": {"a": {"if": {}}}}, "if at #/patternProperties/a"),
        ({"prefixItems": [{"uniqueItems": True}]}, "uniqueItems at #/prefixItems/0"),
    ],
)
def test_a_keyword_that_is_not_supported_is_refused_by_name_and_place(schema: Any, place: str) -> None:
    assert refusal(schema).value == place


@pytest.mark.parametrize(
    ("schema", "limit"),
    [
        ('{"type": ', "a JSON schema"),
        ('{"minimum": NaN}', "a JSON schema"),
        ("[" * 100_000, "levels"),
        (nested(MAX_DEPTH + 1), "levels"),
        ([], "an object"),
        (False, "an object"),
        ({"items": 1}, "#/items"),
        ({"properties": []}, "#/properties"),
        ({"anyOf": {}}, "#/anyOf"),
        ({"minimum": "1"}, "#/minimum"),
        ({"format": "regex"}, "#/format"),
        ({"minProperties": 2}, "#/minProperties"),
        ({"const": {"a": ["\0"]}}, "#/const"),
        ({"properties": {"a\x1f": {}}}, "#/properties"),
        ({"$ref": "https://example.com/schema"}, "#/$ref"),
    ],
    ids=str,
)
def test_a_schema_that_is_none_or_not_followed_is_refused_with_its_reason(schema: Any, limit: str) -> None:
    assert limit in refusal(schema).limit


def test_a_property_may_have_any_name() -> None:
    named = {name: {"type": "integer"} for name in ("not", "x-guidance", "uniqueItems", "$ref", "if")}
    compiler().compile(Guide(GuideKind.JSON_SCHEMA, json.dumps({"properties": named})))


def test_every_supported_keyword_is_known_to_the_library() -> None:
    """In a schema that no value contradicts; the library refuses by name what it knows and has not."""
    values: dict[str, Any] = {
        "type": "object", "enum": [{}], "const": {}, "required": ["a"], "pattern": "a", "format": "uuid",
        "$ref": "#/$defs/a", "multipleOf": 2, "title": "a", "description": "a", "$comment": "a", "default": {},
        "examples": [], "$schema": "https://json-schema.org/draft/2020-12/schema", "deprecated": True,
        "readOnly": True, "writeOnly": True, "$id": "a", "id": "a", "$defs": {"a": {}}, "definitions": {},
        "items": {}, "additionalProperties": True, "properties": {}, "patternProperties": {}, "minProperties": 1,
    }  # fmt: skip
    for keyword in sorted(KEYWORDS):
        value = values.get(keyword, [{}] if keyword.endswith("Of") or keyword == "prefixItems" else 1)
        schema = {"$defs": {"a": {}}, keyword: value}
        compiler().compile(Guide(GuideKind.JSON_SCHEMA, json.dumps(schema)))


@pytest.mark.parametrize(
    ("kind", "fields", "limit"),
    [
        (GuideKind.REGEX, {"text": "a" * (MAX_GUIDE_BYTES + 1)}, "bytes"),
        (GuideKind.CHOICE, {"choices": ()}, "texts"),
        (GuideKind.CHOICE, {"choices": ("a", "")}, "character"),
        (GuideKind.CHOICE, {"choices": ("a",) * (MAX_CHOICES + 1)}, "texts"),
        (GuideKind.CHOICE, {"choices": ("a" * MAX_GUIDE_BYTES, "b")}, "bytes"),
    ],
)
def test_a_guide_beyond_a_limit_is_refused_by_its_field(kind: GuideKind, fields: dict[str, Any], limit: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Guide(kind, **fields)
    assert refused.value.field == f"guided.{kind}"
    assert limit in refused.value.limit


@pytest.mark.parametrize(
    ("grammar", "name"),
    [
        ('start: %json {"x-guidance": {}}', "%json"),
        ('%llguidance {"no_forcing": true}\nstart: "a"', "%llguidance"),
        ("start: a\na[temperature=2.0]: /a/", "temperature"),
        ('start: /a\n"/ <[5]> /"/', "<[5]>"),  # the expression has a line break and a quote
    ],
)
def test_what_a_grammar_would_hide_from_the_checks_is_refused_by_name(grammar: str, name: str) -> None:
    with pytest.raises(InvalidRequest, match=r"guided\.ebnf_grammar") as refused:
        Guide(GuideKind.GRAMMAR, grammar).grammar()
    assert name in refused.value.limit


def test_such_a_name_within_a_literal_or_a_comment_is_text() -> None:
    grammar = 'start: "%json temperature = 1" /%llguidance/ # %json\n// %json\n'
    Guide(GuideKind.GRAMMAR, grammar).grammar()


@pytest.mark.parametrize(
    "text", ["a", "line\nbreak", 'q"uote', "back\\slash", "/x/", "\u65e5\u672c", "\x01\x7f\x9f", "%json"]
)
def test_a_choice_may_have_any_characters(text: str) -> None:
    Guide(GuideKind.CHOICE, choices=(text, "other")).grammar()
    if text.isascii() and text.isalpha():
        compiler().compile(Guide(GuideKind.CHOICE, choices=(text, "other")))


def test_guides_have_the_names_of_their_fields() -> None:
    names = {field.name for field in pb.GuidedDecoding.DESCRIPTOR.fields}
    assert {str(kind) for kind in GuideKind} == names | {"answer"}
    assert {str(kind) for kind in GuideKind} == {
        field.name for field in wire.Guide.DESCRIPTOR.oneofs_by_name["kind"].fields
    }
