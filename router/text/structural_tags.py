"""Structural tags: free text in which a trigger begins a tag, whose content follows a schema.

    {"structures": [{"begin": "<function=add>", "schema": {...}, "end": "</function>"}], "triggers": ["<function="]}

The text may have any number of tags, between any text without a trigger, which vLLM's field of this name means too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from decant.engine.errors import InvalidRequest
from decant.engine.guides.guide import JSON_OPTIONS
from decant.engine.guides.json_schema import check_schema

FIELD = "guided.structural_tag"
MAX_STRUCTURES = 128
_MEMBERS = {"structures": list, "triggers": list}
_LIMITS: Mapping[type, str] = {list: "a list", str: "a text", dict: "a schema, which is an object"}
_PARTS = {"begin": str, "schema": dict, "end": str}


def structural_tag_grammar(text: str, terms: Callable[[str], str]) -> str:
    """Grammar for ``llguidance``; ``terms`` writes a text as terms, in which a special token is ``<[id]>``.

    Raises InvalidRequest by the path of what is wrong.
    """
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(FIELD, "JSON", f"{error}") from None
    _check_members(given, _MEMBERS, "#")
    structures, triggers = given["structures"], given["triggers"]
    for name, entries in given.items():
        if not 1 <= len(entries) <= MAX_STRUCTURES:
            _refuse(f"#/{name}", f"1 to {MAX_STRUCTURES} entries", len(entries))
    for place, trigger in enumerate(triggers):
        if not isinstance(trigger, str) or not trigger:
            _refuse(f"#/triggers/{place}", "a text of at least 1 character", trigger)
    tags = [_tag(place, each, triggers, terms) for place, each in enumerate(structures)]
    for place, trigger in enumerate(triggers):
        if not any(each["begin"].startswith(trigger) for each in structures):
            _refuse(f"#/triggers/{place}", "the begin of a structure's begin", trigger)
    names = " | ".join(f"tag_{place}" for place in range(len(tags)))
    lines = [f"start: ({names})* text", "text: TEXT", "TEXT: /(?s:.*)/", *tags]
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(lines) + "\n"}]})


def _tag(place: int, structure: Any, triggers: list[str], terms: Callable[[str], str]) -> str:
    """Rules of a tag, with the text before it."""
    path = f"#/structures/{place}"
    _check_members(structure, _PARTS, path)
    begin = structure["begin"]
    trigger = next((each for each in sorted(triggers, key=len) if begin.startswith(each)), None)
    if trigger is None:
        _refuse(f"{path}/begin", "a text that begins with a trigger", begin)
    schema = check_schema(FIELD, json.dumps(structure["schema"]))
    options = json.dumps({**schema, "x-guidance": JSON_OPTIONS}, ensure_ascii=False)
    rest = " ".join(filter(None, [terms(begin[len(trigger) :]), f"%json {options}", terms(structure["end"])]))
    start = terms(trigger)
    if start.startswith("<["):  # tokens of their own, which no text contains
        return f"tag_{place}: TEXT {start} {rest}"
    return f"tag_{place}: begin_{place} {rest}\nbegin_{place}[lazy]: TEXT {start}"


def _check_members(value: Any, kinds: Mapping[str, type], path: str) -> None:
    if not isinstance(value, dict) or set(value) != set(kinds):
        _refuse(path, f"an object with {', '.join(kinds)}", value)
    for name, kind in kinds.items():
        if not isinstance(value[name], kind):
            _refuse(f"{path}/{name}", _LIMITS[kind], value[name])


def _refuse(path: str, limit: str, value: object) -> NoReturn:
    raise InvalidRequest(FIELD, f"at {path}: {limit}", value)
