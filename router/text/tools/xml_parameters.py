"""Arguments of a call that are elements, one for each parameter, and the JSON object that they stand for.

    <parameter=city>
    Zürich
    </parameter>
    <parameter=days>
    [1, 2]
    </parameter>
    </function>

A text stands there as it is, and any other value as JSON: the tool's schema decides which of them it is. One line break
at each end of a value is not part of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from decant.router.text.tools.json_arguments import Reading

BEGIN, END, LAST = "<parameter=", "</parameter>", "</function>"
NAME = r"[^<>\n]{1,64}"
"""Of a parameter, in a grammar."""
MAX_DEPTH = 16
"""Of references and alternatives, in the search for the types of a parameter."""
MAX_HELD = 1024
"""Of white space and of a name that a model writes, which are held until what follows them is known."""
_SPACE = rf"\s{{0,{MAX_HELD}}}"
_BEGIN = re.compile(rf"{_SPACE}{BEGIN}([^<>\n]{{1,{MAX_HELD}}})>")
_PARTIAL_BEGIN = re.compile(rf"{BEGIN}[^<>\n]{{0,{MAX_HELD}}}")
_LAST = re.compile(_SPACE + LAST)
_VALUE_END = "\n" + END
_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}
"""JSON of words that models also write with a capital letter."""
_JSON_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}

Schema = Mapping[str, Any]
Types = Mapping[str, frozenset[str]]


class XmlParameters:
    """Reader of the arguments for a tool with this schema: texts as they arrive, other values when they end."""

    __slots__ = ("_comma", "_searched", "_step", "_types", "_types_of")

    def __init__(self, parameters: str) -> None:
        self._types_of = types_of(_object_in(parameters))
        self._types: frozenset[str] = frozenset()
        self._comma = ""
        self._searched = 0
        self._step: Callable[[str, bool], Reading | None] = self._begin
        """Reads more of the arguments; None: it needs more text."""

    def read(self, text: str, *, is_over: bool) -> Reading:
        """Read what follows the text that was read before; ``is_over``: no more arrives."""
        piece, place = "", 0
        while (step := self._step(text[place:], is_over)) is not None:
            piece, place = piece + step.piece, place + step.length
            if step.is_ended:
                return Reading(piece, place, True)
        return Reading(piece, place, False)

    def _begin(self, _: str, __: bool) -> Reading:
        self._step = self._between
        return Reading("{", 0, False)

    def _between(self, text: str, _: bool) -> Reading | None:
        """Read the begin of a parameter, or the end of all. Anything else ends the arguments, and is not read."""
        if (found := _BEGIN.match(text)) is not None:
            name = found[1]
            piece = f"{self._comma}{_quoted(name)}: "
            self._types, self._comma = self._types_of.get(name, frozenset()), ", "
            self._step, self._searched = (self._break, 0) if is_text(self._types) else (self._json, 0)
            return Reading(piece, found.end(), False)
        if (found := _LAST.match(text)) is not None:
            return Reading("}", found.end(), True)
        rest = text.lstrip()
        may_come = LAST.startswith(rest) or BEGIN.startswith(rest) or _PARTIAL_BEGIN.fullmatch(rest) is not None
        return None if may_come and len(text) - len(rest) <= MAX_HELD else Reading("}", 0, True)

    def _break(self, text: str, _: bool) -> Reading | None:
        if not text:
            return None
        self._step = self._text
        return Reading('"', text[0] == "\n", False)

    def _text(self, text: str, is_over: bool) -> Reading | None:
        end = text.find(END)
        if end >= 0:
            self._step = self._between
            return Reading(_escaped(text[:end].removesuffix("\n")) + '"', end + len(END), False)
        length = len(text) - (0 if is_over else _held_length(text))
        return Reading(_escaped(text[:length]), length, False) if length else None

    def _json(self, text: str, is_over: bool) -> Reading | None:
        end = text.find(END, self._searched)
        if end >= 0:
            self._step = self._between
            value = text[:end].removeprefix("\n").removesuffix("\n")
            return Reading(_as_json(value, self._types), end + len(END), False)
        self._searched = max(0, len(text) - len(END) + 1)
        return Reading(text.strip("\n"), len(text), False) if is_over and text else None


def types_of(schema: Schema) -> Types:
    """JSON types of each parameter, in time by the size of the schema; none: its schema does not say."""
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return {}
    search = _Search(schema)
    return {name: search.types(part, 0) for name, part in properties.items()}


def is_text(types: frozenset[str]) -> bool:
    """Whether a parameter of these types stands in its element as it is; else it is JSON, texts in quotes included."""
    return types <= {"string"}


class _Search:
    """Search for types in a schema, of which each part is looked at once: alternatives may refer to one another."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._found: dict[int, frozenset[str]] = {}
        """By the id of a part; of one whose search has not ended, none."""

    def types(self, part: Any, depth: int) -> frozenset[str]:
        if not isinstance(part, dict) or depth > MAX_DEPTH:
            return frozenset()
        if id(part) not in self._found:
            self._found[id(part)] = frozenset()
            self._found[id(part)] = self._types(part, depth)
        return self._found[id(part)]

    def _types(self, part: Schema, depth: int) -> frozenset[str]:
        match part:
            case {"$ref": str() as path}:
                return self.types(target_of(self._root, path), depth + 1)
            case {"type": str() as name}:
                return frozenset({name})
            case {"type": list() as names}:
                return frozenset(name for name in names if isinstance(name, str))
            case {"const": value}:
                return frozenset({_type(value)})
            case {"enum": list() as values}:
                return frozenset(map(_type, values))
            case {"anyOf": list() as parts} | {"oneOf": list() as parts}:
                found = [self.types(each, depth + 1) for each in parts]
                return frozenset().union(*found) if all(found) else frozenset()
            case {"allOf": list() as parts}:
                return next(filter(None, (self.types(each, depth + 1) for each in parts)), frozenset())
        return frozenset()


def target_of(root: Schema, path: str) -> Any:
    """The part of a schema that a reference is of; None: there is none."""
    found: Any = root
    for part in path.removeprefix("#").split("/")[1:]:
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found


def _type(value: Any) -> str:
    return _JSON_TYPES.get(type(value), "null")


def _as_json(text: str, types: frozenset[str]) -> str:
    """JSON of a value if it has one of the types, else of the text."""
    written = _WORDS.get(text.strip().lower(), text.strip())
    try:
        value = json.loads(written, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return _quoted(text)
    found = {_type(value)}
    if isinstance(value, int) and not isinstance(value, bool):
        found.add("number")
    elif isinstance(value, float) and value.is_integer():
        found.add("integer")
    return written if found & types else _quoted(text)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)


def _object_in(parameters: str) -> Schema:
    try:
        schema = json.loads(parameters)
    except (ValueError, RecursionError):
        return {}
    return schema if isinstance(schema, dict) else {}


def _held_length(text: str) -> int:
    """Length of the end of a text that may begin the end of a value."""
    for length in range(min(len(text), len(_VALUE_END) - 1), 0, -1):
        if _VALUE_END.startswith(end := text[-length:]) or END.startswith(end):
            return length
    return 0


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    return _quoted(text)[1:-1]
