"""Messages and tools as requests have them, from dicts of the form that transformers and OpenAI's clients take."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from decant.client.fields import set_field
from decant.protos import inference_pb2 as pb
from decant.runtime.errors import InvalidArgument

_MESSAGE = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "reasoning"})
_MODES: Mapping[str, pb.ToolChoice.Mode] = {
    "auto": pb.ToolChoice.MODE_AUTO,
    "none": pb.ToolChoice.MODE_NONE,
    "required": pb.ToolChoice.MODE_REQUIRED,
}


def add_messages(target: pb.Messages, messages: Sequence[Any]) -> None:
    """Add messages. Raises InvalidArgument."""
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping) or not message.keys() <= _MESSAGE:
            raise InvalidArgument(
                where, "role, content, name, tool_calls, tool_call_id, reasoning, nothing else", repr(message)
            )
        added = target.messages.add()
        for name, value in message.items():
            if value is None:
                continue
            if name == "tool_calls":
                _add_calls(added, value, f"{where}.tool_calls")
            elif name == "content" and not isinstance(value, str | bytes) and isinstance(value, Sequence):
                _add_parts(added, value, f"{where}.content")
            else:
                set_field(added, name, value, f"{where}.{name}")


def add_tools(target: pb.Messages, tools: Any) -> None:
    """Add tools: ``{"type": "function", "function": {...}}``, or the function alone. Raises InvalidArgument."""
    for index, tool in enumerate(_listed("tools", tools)):
        where = f"tools[{index}]"
        function = _function(where, tool, {"name", "description", "parameters", "strict"})
        added = target.tools.add()
        for name, value in function.items():
            if value is not None:
                set_field(added, name, _to_json(value) if name == "parameters" else value, f"{where}.{name}")


def set_tool_choice(target: pb.Messages, choice: Any) -> None:
    """Set "auto", "none", "required" or the name of a tool, also as ``{"function": {"name": ...}}``."""
    if isinstance(choice, Mapping):
        choice = _function("tool_choice", choice, {"name"}).get("name")
    if not isinstance(choice, str):
        raise InvalidArgument("tool_choice", "'auto', 'none', 'required' or the name of a tool", repr(choice))
    if choice in _MODES:
        target.tool_choice.mode = _MODES[choice]
    else:
        set_field(target.tool_choice, "name", choice, "tool_choice")


def _add_parts(message: pb.Message, parts: Sequence[Any], where: str) -> None:
    for index, part in enumerate(parts):
        if not isinstance(part, Mapping) or part.get("type") != "text" or part.keys() != {"type", "text"}:
            raise InvalidArgument(f"{where}[{index}]", '{"type": "text", "text": ...}', repr(part))
        set_field(message.parts.add(), "text", part["text"], f"{where}[{index}].text")


def _add_calls(message: pb.Message, calls: Any, where: str) -> None:
    for index, call in enumerate(_listed(where, calls)):
        place = f"{where}[{index}]"
        if isinstance(call, Mapping):
            values: Mapping[str, Any] = {"id": call.get("id"), **_function(place, call, {"id", "name", "arguments"})}
        else:  # of an answer
            values = {name: getattr(call, name, None) for name in ("id", "name", "arguments")}
        added = message.tool_calls.add()
        for name, value in values.items():
            if value is not None:
                set_field(added, name, _to_json(value) if name == "arguments" else value, f"{place}.{name}")


def _function(where: str, value: Any, names: set[str]) -> Mapping[str, Any]:
    if isinstance(value, Mapping):
        function = value.get("function", {name: inner for name, inner in value.items() if name != "type"})
        if isinstance(function, Mapping) and function.keys() <= names:
            return function
    raise InvalidArgument(where, f"a function with {', '.join(sorted(names))}", repr(value))


def _listed(where: str, values: Any) -> Sequence[Any]:
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Sequence):
        raise InvalidArgument(where, "a list", repr(values))
    return values


def _to_json(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, Mapping) else value
