"""Assignment to a field of a message, with an error that names option, expected type and value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from decant.runtime.errors import InvalidArgument


def set_field(message: Message, name: str, value: Any, option: str, original: object = None) -> None:
    field = message.DESCRIPTOR.fields_by_name[name]
    try:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            getattr(message, name).update(value)
        elif field.is_repeated and isinstance(value, str | bytes | bytearray | Mapping):
            raise TypeError("neither a text nor a mapping is a list of values")
        elif field.is_repeated:
            getattr(message, name).extend(value)
        elif isinstance(value, bool) and field.cpp_type == FieldDescriptor.CPPTYPE_FLOAT:
            raise TypeError("neither True nor False is a number")
        else:
            setattr(message, name, value)
    except (TypeError, ValueError):
        shown = value if original is None else original
        raise InvalidArgument(option, _expected(field, shown), repr(shown)) from None


def to_json(value: Any, option: str) -> Any:
    """Write a mapping as JSON; any other value is returned as it is. Raises InvalidArgument."""
    if not isinstance(value, Mapping):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise InvalidArgument(option, "values that JSON has, whose numbers are finite", repr(value)) from None


def _expected(field: Any, value: object) -> str:
    if field.name == "token_ids" and not field.is_repeated:
        return "True or False; as input, token ids are the prompt: generate([1, 2])"
    if field.name == "on_disconnect":
        return "'cancel' or 'detach'"
    if field.name == "logit_bias":
        return "a dict of token ids and numbers"
    one = _ONE[field.cpp_type]
    if field.is_repeated:
        return f"a list of {one[1]}" if field.name != "stop" else "a text or a list of texts"
    if isinstance(value, str) and field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return "a text that UTF-8 can encode"
    if isinstance(value, int) and field.cpp_type in _BOUNDS:
        low, high = _BOUNDS[field.cpp_type]
        return f"an int from {low} to {high}"
    return one[0]


_ONE = {
    FieldDescriptor.CPPTYPE_STRING: ("a text", "texts"),
    FieldDescriptor.CPPTYPE_BOOL: ("True or False", "bools"),
    FieldDescriptor.CPPTYPE_FLOAT: ("a number", "numbers"),
    FieldDescriptor.CPPTYPE_INT32: ("an int", "ints"),
    FieldDescriptor.CPPTYPE_UINT32: ("an int", "ints from 0"),
    FieldDescriptor.CPPTYPE_UINT64: ("an int", "ints from 0"),
}
_BOUNDS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
