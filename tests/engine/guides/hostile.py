"""Random guides, many of them hostile: deep, huge, ambiguous, with catastrophic repetition, or malformed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from decant.engine.errors import InvalidRequest
from decant.engine.guides.guide import Guide, GuideKind

_WORDS = ["a", "b", "name", "x-guidance", "\u65e5", "", "$ref", "0", "q" * 200]


def guide(seed: int) -> Guide | InvalidRequest:
    """A guide, or the refusal of one by its size."""
    draw = random.Random(seed)
    kind = draw.choice([GuideKind.JSON_SCHEMA, GuideKind.REGEX, GuideKind.GRAMMAR])
    text = {
        GuideKind.JSON_SCHEMA: lambda: json.dumps(_schema(draw, draw.randrange(6))),
        GuideKind.REGEX: lambda: _regex(draw, draw.randrange(6)),
        GuideKind.GRAMMAR: lambda: _lark(draw),
    }[kind]()
    if draw.random() < 0.15:  # malformed
        place = draw.randrange(len(text) + 1)
        text = text[:place] + draw.choice(["", "(", '"', "\\", "{", "\0", "]]"]) + text[place + draw.randrange(3) :]
    try:
        return Guide(kind, text)
    except InvalidRequest as error:
        return error


def _schema(draw: random.Random, depth: int) -> Any:
    number = draw.choice([0, 1, 2, 7, 1000, 10**6, 10**12, 0.1, 1e-9, -5, 997, 10007])
    leaves: list[Any] = [
        {"type": draw.choice(["string", "integer", "number", "boolean", "null", "array", "object", "nothing"])},
        {"type": "integer", "multipleOf": number},
        {"allOf": [{"type": "integer", "multipleOf": draw.randrange(2, 120)} for _ in range(draw.randrange(1, 6))]},
        {"anyOf": [{"type": "integer", "multipleOf": draw.randrange(2, 999)} for _ in range(draw.randrange(1, 9))]},
        {"type": draw.choice(["integer", "number"]), "minimum": -number, "maximum": number},
        {"enum": [f"value {index * 7919}" for index in range(draw.choice([1, 100, 5000]))]},
        {"type": "string", "minLength": abs(int(number)), "maxLength": abs(int(number)) + 5},
        {"type": "string", "pattern": _regex(draw, 4)},
        {"type": "string", "format": draw.choice(["uri", "email", "date-time", "hostname", "regex"])},
        {"$ref": draw.choice(["#", "#/$defs/a", "#/properties/a"])},
        {draw.choice(["not", "if", "uniqueItems", "x-guidance", "typ"]): {}},
        True,
    ]
    if depth == 0:
        return draw.choice(leaves)

    def inner() -> Any:
        return _schema(draw, draw.randrange(depth))

    many = draw.choice([1, 2, 3, 30, 600])
    kinds: list[Callable[[], Any]] = [
        lambda: {"type": "object", "properties": {draw.choice(_WORDS) + str(i): inner() for i in range(many % 40)}},
        lambda: {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(many)}},
        lambda: {"properties": {"a": inner()}, "required": ["a", "b"], "additionalProperties": inner()},
        lambda: {"patternProperties": {_regex(draw, 2): inner(), _regex(draw, 2): inner()}},
        lambda: {"type": "array", "items": inner(), "minItems": many, "maxItems": many * 2},
        lambda: {"prefixItems": [inner() for _ in range(3)]},
        lambda: {draw.choice(["anyOf", "oneOf", "allOf"]): [inner() for _ in range(draw.randrange(1, 5))]},
        lambda: {"allOf": [{"anyOf": [inner(), inner()]} for _ in range(draw.randrange(1, 8))]},
        lambda: {"$defs": {"a": inner()}, "$ref": "#/$defs/a"},
        lambda: _nested(draw.choice([10, 60, 100, 3000])),
    ]
    return draw.choice(kinds)()


def _nested(depth: int) -> Any:
    schema: Any = {}
    for _ in range(min(depth, 300)):
        schema = {"type": "array", "items": schema}
    return schema


def _regex(draw: random.Random, depth: int) -> str:
    if depth <= 0:
        return draw.choice(
            ["a", "b", ".", "\\w", "[^x]", "(a|aa)", "\\d", "\\p{L}", "(?=a)", "\\1", "/", "\u65e5", "\n", "$"]
        )

    def inner() -> str:
        return _regex(draw, draw.randrange(depth))

    kinds: list[Callable[[], str]] = [
        lambda: inner() + inner(),
        lambda: f"({inner()}|{inner()})",
        lambda: f"({inner()})*",
        lambda: f"(({inner()})+)+{inner()}",
        lambda: f"({inner()}){{{draw.choice([2, 50, 1000, 100000])}}}",
        lambda: f"(({inner()}){{0,{draw.choice([3, 300])}}}){{1,{draw.choice([3, 300])}}}",
        lambda: f"(a|b)*a(a|b){{{draw.choice([3, 20, 200])}}}",
        lambda: f".*{inner()}.*{inner()}.*",
        lambda: "(" * 300 + "a" + ")" * 300,
        lambda: "|".join(f"v{index * 7919}" for index in range(draw.choice([3, 3000]))),
    ]
    return draw.choice(kinds)()


def _lark(draw: random.Random) -> str:
    count = draw.choice([1, 3, 6, 6, 6, 400, 3000])
    if count > 6:
        rules = "".join(f'r{index}: "a" r{index + 1} | "b"\n' for index in range(count))
        return f'start: r0\n{rules}r{count}: "x"\n'
    names = ["start", *(f"r{index}" for index in range(1, count))]
    terms = [*names, '"a"', '"b"', "/[a-z]+/", "/(a|b)*a(a|b){20}/", "T", "<|end|>", "<[3]>", "nothing", '"a"{1,90000}']
    lines = []
    for name in names:
        options = [
            " ".join(draw.choice(terms) for _ in range(draw.randrange(1, 4))) for _ in range(draw.randrange(1, 4))
        ]
        lines.append(f"{name}: {' | '.join(options)}{draw.choice(['', '', '?', '*', '{100}'])}")
    lines.append(
        draw.choice(["T: /x{1,50}/ & /.{3,}/", "T: ~/(ab)*/", 'T: "t"+', "%ignore / /\nT: /t/", 'T: %json {"a": 1}'])
    )
    return "\n".join(lines) + "\n"
