"""Messages and tools as requests have them, from dicts of the form that transformers and OpenAI's clients take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from decant.client.fields import set_field, to_json
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
                place = f"{where}.{name}"
                set_field(added, name, to_json(value, place) if name == "parameters" else value, place)


def set_tool_choice(target: pb.Messages, choice: Any) -> None:
    """Set "auto", "none", "required" or the name of a tool.

    As ``{"function": {"name": ...}}`` it is a name, also of a tool that has the name of a mode.
    """
    name = _function("tool_choice", choice, {"name"}).get("name") if isinstance(choice, Mapping) else choice
    if not isinstance(name, str):
        raise InvalidArgument("tool_choice", "'auto', 'none', 'required' or the name of a tool", repr(choice))
    if name in _MODES and name is choice:
        target.tool_choice.mode = _MODES[name]
    else:
        set_field(target.tool_choice, "name", name, "tool_choice")


def _add_parts(message: pb.Message, parts: Sequence[Any], where: str) -> None:
    for index, part in enumerate(parts):
        if not isinstance(part, Mapping) or part.get("type") != "text" or part.keys() != {"type", "text"}:
            raise InvalidArgument(f"{where}[{index}]", '{"type": "text", "text": ...}', repr(part))
        set_field(message.parts.add(), "text", part["text"], f"{where}[{index}].text")


def _add_calls(message: pb.Message, calls: Any, where: str) -> None:
    for index, call in enumerate(_listed(where, calls)):
        place = f"{where}[{index}]"
        if isinstance(call, Mapping):
            function = _function(place, call, {"id", "name", "arguments"}, beside=("id", "index"))
            values: Mapping[str, Any] = {"id": call.get("id"), **function}
        else:  # of an answer
            values = {name: getattr(call, name, None) for name in ("id", "name", "arguments")}
        added = message.tool_calls.add()
        for name, value in values.items():
            if value is not None:
                inner = f"{place}.{name}"
                set_field(added, name, to_json(value, inner) if name == "arguments" else value, inner)


def _function(where: str, value: Any, names: set[str], beside: Sequence[str] = ()) -> Mapping[str, Any]:
    """The function with `names` that is `value`, or is in it `beside` other keys."""
    if isinstance(value, Mapping) and value.get("type") in (None, "function"):
        function = value.get("function", {name: inner for name, inner in value.items() if name != "type"})
        is_alone = "function" not in value or value.keys() <= {"type", "function", *beside}
        if is_alone and isinstance(function, Mapping) and function.keys() <= names:
            return function
    raise InvalidArgument(where, f"a function with {', '.join(sorted(names))}", repr(value))


def _listed(where: str, values: Any) -> Sequence[Any]:
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Sequence):
        raise InvalidArgument(where, "a list", repr(values))
    return values
