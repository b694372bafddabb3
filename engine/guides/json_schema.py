"""JSON schemas that guide an output: which keywords are supported.

``llguidance`` ignores keywords that it does not know, and obeys options inside a schema: both are refused here, by the
path of the keyword.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from decant.engine.errors import InvalidRequest

MAX_DEPTH = 64

FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
ANNOTATIONS = frozenset(
    {
        *("$schema", "$id", "id", "$comment", "title", "description", "default", "examples", "deprecated"),
        *("readOnly", "writeOnly", "contentEncoding", "contentMediaType", "contentSchema", "$anchor"),
    }
)
"""Keywords that restrict nothing."""
_ONE_SCHEMA = frozenset({"items", "additionalProperties"})
_SCHEMAS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_VALUES = frozenset(
    {
        *("type", "enum", "const", "$ref", "required", "minItems", "maxItems", "minProperties", "maxProperties"),
        *("minLength", "maxLength", "pattern", "format", "multipleOf"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    }
)
_TEXTS = frozenset({"const", "enum", "required", "properties"})
"""Keywords with texts that the output repeats."""
_UNWRITABLE = re.compile("[\x00-\x07\x0b\x0e-\x1f]")
"""Characters that JSON writes with ``\\u`` alone."""

KEYWORDS = ANNOTATIONS | _ONE_SCHEMA | _SCHEMAS | _NAMED_SCHEMAS | _VALUES
"""Keywords that are supported, each in the meaning of draft 2020-12."""


def check_schema(field: str, text: str) -> dict[str, Any]:
    """Parse a schema. Raises InvalidRequest for a text that is none, and for a keyword that is not supported."""
    try:
        schema = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise InvalidRequest(field, f"at most {MAX_DEPTH} levels", "more") from None
    except ValueError as error:
        raise InvalidRequest(field, "a JSON schema", f"{error}") from None
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise InvalidRequest(field, "an object with keywords", schema)
    _Checker(field).check(schema)
    return schema


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


class _Checker:
    def __init__(self, field: str) -> None:
        self._field = field

    def check(self, schema: Any, path: str = "#", depth: int = 0) -> None:
        if isinstance(schema, bool):
            return
        if not isinstance(schema, dict):
            self._refuse(path, "a schema, which is an object or a boolean", schema)
        if depth > MAX_DEPTH:
            self._refuse(path, f"at most {MAX_DEPTH} levels of schemas", depth)
        for keyword, value in schema.items():
            place = f"{path}/{keyword}"
            if keyword not in KEYWORDS:
                raise InvalidRequest(self._field, "keywords that are supported", f"{keyword} at {path}")
            self._check_value(keyword, value, place)
            for inner, inner_path in _schemas_in(keyword, value, place):
                self.check(inner, inner_path, depth + 1)

    def _check_value(self, keyword: str, value: Any, path: str) -> None:
        if keyword in _TEXTS and (text := _unwritable(value)) is not None:
            self._refuse(path, "texts without control characters", text)
        match keyword:
            case "format" if value not in FORMATS:
                self._refuse(path, f"one of {', '.join(sorted(FORMATS))}", value)
            case "minProperties" if not _is_number(value) or value > 1:
                self._refuse(path, "0 or 1, for names of further properties may repeat", value)
            case "$ref" if not isinstance(value, str) or not value.startswith("#"):
                self._refuse(path, "a reference within the schema, which begins with #", value)
            case "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum" if not _is_number(value):
                self._refuse(path, "a number", value)
            case "required" if not _is_texts(value):
                self._refuse(path, "a list of names", value)
            case "enum" if not isinstance(value, list):
                self._refuse(path, "a list of values", value)
            case "type" if not isinstance(value, str) and not _is_texts(value):
                self._refuse(path, "the name of a type, or a list of such names", value)
            case "minLength" | "maxLength" if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                self._refuse(path, "a whole number of at least 0", value)
            case name if name in _SCHEMAS and not isinstance(value, list):
                self._refuse(path, "a list of schemas", value)
            case name if name in _NAMED_SCHEMAS and not isinstance(value, Mapping):
                self._refuse(path, "an object of schemas", value)

    def _refuse(self, path: str, limit: str, value: object) -> NoReturn:
        raise InvalidRequest(self._field, f"at {path}: {limit}", value)


def _schemas_in(keyword: str, value: Any, path: str) -> Iterator[tuple[Any, str]]:
    if keyword in _ONE_SCHEMA:
        yield value, path
    elif keyword in _SCHEMAS:
        for index, inner in enumerate(value):
            yield inner, f"{path}/{index}"
    elif keyword in _NAMED_SCHEMAS:
        for name, inner in value.items():
            yield inner, f"{path}/{name}"


def _unwritable(value: Any) -> str | None:
    """A text within ``value`` that an output can't repeat; of an object with schemas, among its names."""
    left = [value]
    while left:
        match left.pop():
            case str(text):
                if _UNWRITABLE.search(text):
                    return text
            case list(entries):
                left += entries
            case dict(entries):
                left += [*entries, *entries.values()]
    return None


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
