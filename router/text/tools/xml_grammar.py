"""Rules of a grammar for arguments that are elements, and the schemas for which every such call has arguments that fit.

A text in its element has the limits of `enum`, `const`, `minLength` and `maxLength`; what is JSON there has all that a
guide supports. Parameters come in the order of ``properties``, and there are no others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from decant.engine.errors import InvalidRequest
from decant.engine.guides.guide import JSON_OPTIONS, MAX_GUIDE_BYTES, lark_literal
from decant.engine.guides.json_schema import ANNOTATIONS
from decant.router.text.tools.xml_parameters import (
    BEGIN,
    END,
    MAX_DEPTH,
    NAME,
    Schema,
    Types,
    is_text,
    target_of,
    types_of,
)

_DEFINITIONS = ("$defs", "definitions")
_OF_OBJECTS = ANNOTATIONS | {"type", "properties", "required", "additionalProperties", *_DEFINITIONS}
_OF_TEXTS = ANNOTATIONS | {"type", "enum", "const", "minLength", "maxLength"}
_CLOSE = f"\n{END}\n"
_WITHOUT_END = f"~(/(?s:.*)/ {lark_literal(END)} /(?s:.*)/)"


class Rules(NamedTuple):
    """``term`` stands for the parameters in a rule, and may be empty."""

    term: str
    lines: Sequence[str] = ()


def parameter_rules(rule: str, schema: Schema) -> Rules:
    """Rules, named after ``rule``, for a schema that ``check_parameters`` permits, or for ``{"type": "object"}``."""
    properties = schema.get("properties")
    if properties is None and schema.get("additionalProperties", True) is not False:
        name = f"{lark_literal(BEGIN)} /{NAME}/ {lark_literal('>' + chr(10))}"
        return Rules(f"{rule}_any*", [f"{rule}_any: {name} {rule}_text", *_text(f"{rule}_text", {})])
    terms, lines = [], []
    types, required = types_of(schema), frozenset(schema.get("required", ()))
    for place, (name, part) in enumerate((properties or {}).items()):
        element = f"{rule}_{place}"
        lines += [f"{element}: {lark_literal(f'{BEGIN}{name}>{chr(10)}')} {element}_value"]
        if is_text(types[name]):
            lines += _text(f"{element}_value", _resolved(part, schema))
        else:
            lines.append(_json(f"{element}_value", part, schema))
        terms.append(element + "?" * (name not in required))
    return Rules(" ".join(terms), lines)


def check_parameters(field: str, schema: Schema) -> None:
    """Refuse a schema whose keywords the rules do not hold, by its place. Raises InvalidRequest."""

    def refuse(limit: str, value: object) -> NoReturn:
        raise InvalidRequest(field, f"{limit}, in this model's format of calls", value)

    types = types_of(schema)
    _check_whole(schema, types, refuse)
    for name, part in schema.get("properties", {}).items():
        place = f"#/properties/{name}"
        if not re.fullmatch(NAME, name):
            refuse("names of parameters of 1 to 64 characters without <, > and line breaks", name)
        if part is False:
            refuse("properties that may be there", place)
        if is_text(types[name]):
            limits = _resolved(part, schema)
            for keyword in limits.keys() - _OF_TEXTS:
                refuse("texts with enum, const, minLength and maxLength alone", f"{keyword} at {place}")
            texts = _only_texts(limits)
            if texts is not None and (not texts or any(END in text for text in texts)):
                refuse(f"at least one text, and none with {END}", f"the texts at {place}")
        elif other := next((path for path in _references(part) if not _is_definition(path)), None):
            refuse("references to $defs or definitions", f"{other} at {place}")


def _check_whole(schema: Schema, types: Types, refuse: Callable[[str, object], NoReturn]) -> None:
    for keyword in schema.keys() - _OF_OBJECTS:
        refuse("keywords of objects with properties", f"{keyword} at #")
    for name in schema.get("required", ()):
        if name not in schema.get("properties", {}):
            refuse("required names that are among the properties", name)
    if "properties" not in schema and not _permits_texts(schema.get("additionalProperties", True)):
        refuse("all texts or nothing where there are no properties", "the schema at #/additionalProperties")
    # In the grammar, each parameter that is JSON has its own copy of the definitions.
    shared = sum(len(json.dumps(schema[name])) for name in _DEFINITIONS if name in schema)
    size = shared * sum(not is_text(each) for each in types.values())
    if size > MAX_GUIDE_BYTES:
        refuse(f"at most {MAX_GUIDE_BYTES} bytes of definitions, times the parameters that are JSON", size)


def _permits_texts(part: Any) -> bool:
    """Whether a schema permits any text, or nothing."""
    return isinstance(part, bool) or (part.keys() - ANNOTATIONS <= {"type"} and part.get("type", "string") == "string")


def _resolved(part: Any, schema: Schema) -> Mapping[str, Any]:
    """Schema of a text: what its references are of. One that permits anything is empty."""
    for _ in range(MAX_DEPTH):
        if not isinstance(part, dict) or part.keys() - ANNOTATIONS != {"$ref"}:
            break
        part = target_of(schema, part["$ref"])
    return part if isinstance(part, dict) else {}


def _only_texts(limits: Mapping[str, Any]) -> list[str] | None:
    """The texts that may be there alone; None: there are others."""
    if not limits.keys() & {"enum", "const"}:
        return None
    texts = [limits["const"]] if "const" in limits else limits["enum"]
    least, most = limits.get("minLength", 0), limits.get("maxLength")
    return [
        text for text in texts if isinstance(text, str) and least <= len(text) and (most is None or len(text) <= most)
    ]


def _text(rule: str, limits: Mapping[str, Any]) -> Iterator[str]:
    """A text up to the end of its element, which it does not contain."""
    texts = _only_texts(limits)
    if texts is not None:
        yield f"{rule}: ({' | '.join(map(lark_literal, texts))}) {lark_literal(_CLOSE)}"
        return
    terminal = rule.upper()
    count = f"{{{limits.get('minLength', 0)},{limits.get('maxLength', '')}}}"
    yield f"{rule}[lazy]: {terminal} {lark_literal(_CLOSE)}"
    yield f"{terminal}: /(?s:.){count}/ & {_WITHOUT_END}"


def _json(rule: str, part: Mapping[str, Any], schema: Schema) -> str:
    shared = {name: schema[name] for name in _DEFINITIONS if name in schema}
    written = json.dumps({**part, **shared, "x-guidance": JSON_OPTIONS}, ensure_ascii=False)
    return f"{rule}: %json {written} {lark_literal(_CLOSE)}"


def _references(part: Any) -> Iterator[str]:
    left = [part]
    while left:
        match left.pop():
            case dict(entries):
                if isinstance(path := entries.get("$ref"), str):
                    yield path
                left += entries.values()
            case list(entries):
                left += entries


def _is_definition(path: str) -> bool:
    return path.startswith(tuple(f"#/{name}/" for name in _DEFINITIONS))
