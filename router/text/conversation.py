"""A conversation as it goes to the template process: a head of positions, and the texts that stand there."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from decant.protos import inference_pb2 as pb
from decant.runtime.errors import InvalidArgument

_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def offered_tools(messages: pb.Messages) -> Sequence[pb.Tool]:
    """Tools that the assistant may call. Raises InvalidArgument."""
    names = set()
    for place, tool in enumerate(messages.tools):
        field = f"messages.tools[{place}].name"
        if not _TOOL_NAME.fullmatch(tool.name):
            raise InvalidArgument(field, "1 to 64 ASCII letters, digits, _, - and .", tool.name)
        if tool.name in names:
            raise InvalidArgument(field, "each name once", tool.name)
        names.add(tool.name)
    for field in ("tool_choice", "parallel_tool_calls"):
        if messages.HasField(field) and not messages.tools:
            value = str(getattr(messages, field)).strip()
            raise InvalidArgument(f"messages.{field}", "unset without tools", value)
    choice = messages.tool_choice
    if choice.mode not in pb.ToolChoice.Mode.values():
        raise InvalidArgument("messages.tool_choice.mode", "a value of its enum", choice.mode)
    if choice.HasField("name") and choice.name not in names:
        raise InvalidArgument("messages.tool_choice.name", "the name of one of messages.tools", choice.name)
    return () if messages.tool_choice.mode == pb.ToolChoice.MODE_NONE else messages.tools


@dataclass(slots=True)
class Conversation:
    texts: list[bytes] = field(default_factory=list)

    def head(self, messages: Sequence[pb.Message], tools: Sequence[pb.Tool]) -> dict[str, Any]:
        """JSON of the messages and tools, with positions in `texts` instead of texts."""
        add = self._add
        listed = [
            {"name": add(tool.name), "description": add(tool.description), "parameters": add(tool.parameters)}
            for tool in tools
        ]
        return {"messages": [self._message(place, message) for place, message in enumerate(messages)], "tools": listed}

    def _message(self, place: int, message: pb.Message) -> dict[str, Any]:
        add = self._add
        head: dict[str, Any] = {"role": add(message.role), "content": add(message.content)}
        if message.parts:
            if message.content:
                raise InvalidArgument(f"messages.messages[{place}].content", "empty with parts", message.content)
            head["content"] = [add(part.text) for part in message.parts]
        for name in ("name", "tool_call_id", "reasoning"):
            if text := getattr(message, name):
                head[name] = add(text)
        if message.tool_calls:
            head["tool_calls"] = [
                {"id": add(call.id), "name": add(call.name), "arguments": add(call.arguments)}
                for call in message.tool_calls
            ]
        return head

    def _add(self, text: str) -> int:
        self.texts.append(text.encode())
        return len(self.texts) - 1
