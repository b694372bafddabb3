"""A conversation as templates get it: what transformers' apply_chat_template passes them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from decant.router.text.template_process.content_format import ContentFormat, parts_of
from decant.router.text.template_process.marked_text import CONTENT, TEMPLATE, MarkedText, of_content

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning in templates."""
_ROLES = frozenset({"system", "user", "assistant", "tool", "developer", "function"})


class Invalid(Exception):
    """A field of the request: its name, limit and value."""

    def __init__(self, field: str, limit: str, value: str) -> None:
        super().__init__(field, limit, value)
        self.reply = {"field": field, "limit": limit, "value": value[:200]}


def up_to_content(text: MarkedText, content: str) -> MarkedText:
    """The rendered text up to the end of its last message's content, with the white space behind it where the template
    keeps that: as transformers' ``continue_final_message`` cuts it.
    """
    begin = text.rfind(content.strip())
    if begin < 0:
        limit = "a template that keeps the last message's content, which the output continues"
        raise Invalid("messages.continue_final_message", limit, content)
    whole = content.lstrip()
    end = begin + len(whole if text.startswith(whole, begin) else content.strip())
    return cast(MarkedText, text[:end])  # a slice keeps its marks


class ConversationReader:
    """Reader of one request's conversation from its head and texts."""

    def __init__(self, texts: Sequence[str], template: str, form: ContentFormat) -> None:
        self.texts = texts
        self._template = template
        self._format = form

    def messages(self, listed: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        return [self._message(place, message) for place, message in enumerate(listed)]

    def tools(self, listed: Sequence[Mapping[str, int]]) -> list[dict[str, Any]] | None:
        """Definitions in the form of ``get_json_schema``; None without any, as templates expect it."""
        return [self._tool(place, tool) for place, tool in enumerate(listed)] or None

    def last_texts(self, listed: Sequence[Mapping[str, Any]]) -> list[str]:
        """Texts of the last message's content."""
        content = listed[-1]["content"]
        return [self.texts[index] for index in (content if isinstance(content, list) else [content])]

    def _message(self, place: int, message: Mapping[str, Any]) -> dict[str, Any]:
        role, content = self._role(self.texts[message["role"]]), message["content"]
        made: dict[str, Any] = {"role": role}
        if isinstance(content, list):
            parts = [self._text(index) for index in content]
            made["content"] = parts_of(parts) if self._format.takes_parts(role) else MarkedText("", CONTENT).join(parts)
        elif "tool_calls" in message and not self.texts[content]:
            if self._format.takes_no_content:
                made["content"] = None
        else:
            made["content"] = self._format.of_text(role, self._text(content))
        for name in ("name", "tool_call_id"):
            if name in message:
                made[name] = self._text(message[name])
        if "reasoning" in message:
            made[self._reasoning_key(place, message)] = self._text(message["reasoning"])
        if "tool_calls" in message:
            where = f"messages.messages[{place}].tool_calls"
            calls = message["tool_calls"]
            made["tool_calls"] = [self._call(f"{where}[{index}]", call) for index, call in enumerate(calls)]
        return made

    def _reasoning_key(self, place: int, message: Mapping[str, Any]) -> str:
        for name in _REASONING:
            if re.search(rf"\.{name}\b|['\"]{name}['\"]", self._template):
                return name
        limit = "empty for a model whose chat template takes none"
        raise Invalid(f"messages.messages[{place}].reasoning", limit, self.texts[message["reasoning"]])

    def _call(self, where: str, call: Mapping[str, int]) -> dict[str, Any]:
        arguments = self._object(f"{where}.arguments", self.texts[call["arguments"]])
        made = {"type": "function", "function": {"name": self._text(call["name"]), "arguments": arguments}}
        if self._format.takes_argument_texts:
            made["function"]["arguments"] = self._text(call["arguments"])  # type: ignore[index]
        return {"id": self._text(call["id"]), **made} if self.texts[call["id"]] else made

    def _tool(self, place: int, tool: Mapping[str, int]) -> dict[str, Any]:
        text = self.texts[tool["parameters"]] or '{"type": "object", "properties": {}}'
        parameters = self._object(f"messages.tools[{place}].parameters", text)
        name, description = self._text(tool["name"]), self._text(tool["description"])
        function = {"name": name, "description": description, "parameters": parameters}
        return {"type": "function", "function": function}

    def _object(self, field: str, text: str) -> Any:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise Invalid(field, f"a JSON object ({error})", text) from None
        if not isinstance(value, dict):
            raise Invalid(field, "a JSON object", text)
        return of_content(value)

    def _text(self, index: int) -> MarkedText:
        return MarkedText(self.texts[index], CONTENT)

    def _role(self, role: str) -> MarkedText:
        """A role is the template's own word if it is a common one, or a literal of the template: some templates make
        tokens of it.
        """
        is_named = role in _ROLES or f"'{role}'" in self._template or f'"{role}"' in self._template
        return MarkedText(role, TEMPLATE if is_named else CONTENT)
