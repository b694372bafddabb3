"""The form in which a template takes what a message contains: a text, or a list of typed parts.

    [{"type": "text", "text": "..."}]

A template that wants parts drops a text without an error. It shows by what becomes of a word.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_WORD = "Decantation"
_OTHER = {"role": "user", "content": "Hello."}
_CONVERSATIONS: Mapping[str, tuple[Sequence[Any], Sequence[Any]]] = {
    "user": ((), ()),
    "system": ((), (_OTHER,)),
    "assistant": ((_OTHER,), (_OTHER,)),
}
"""Messages before and after one of this role."""

_PARAMETERS = {"type": "object", "properties": {"word": {"type": "string"}}}
_TOOL = {"type": "function", "function": {"name": "look_up", "description": "Look up.", "parameters": _PARAMETERS}}

Render = Callable[..., str | None]
"""Renders a conversation, with tools if there are some; None if the template can't."""


class ContentFormat:
    """Forms that a template takes, by role; other roles are as the user's."""

    takes_no_content = False
    """Whether a turn with calls alone has null as its content."""
    takes_argument_texts = False
    """Whether the arguments of a call are JSON, not an object."""

    def __init__(self, render: Render) -> None:
        self._needs_parts: dict[str, bool] = {}
        self._takes_parts: dict[str, bool] = {}
        for role in _CONVERSATIONS:
            as_text, as_parts = (_rendered(render, role, content) for content in (_WORD, parts_of([_WORD])))
            has_text = as_text is not None and _WORD.lower() in as_text.lower()
            self._takes_parts[role] = as_parts == as_text if has_text else _is_word_of(as_parts)
            self._needs_parts[role] = not has_text and self._takes_parts[role]
            if as_text is None and as_parts is None and role == "user":
                return  # it renders nothing, perhaps slowly
        hello = {"role": "user", "content": self.of_text("user", "Hello.")}
        forms = ((has_content, as_text) for has_content in (False, True) for as_text in (False, True))
        fitting = (form for form in forms if _WORD in (_with_call(render, hello, *form) or ""))
        self.takes_no_content, self.takes_argument_texts = next(fitting, (False, False))

    def of_text(self, role: str, text: str) -> Any:
        """What the template takes for a text."""
        return parts_of([text]) if self._needs_parts.get(role, self._needs_parts["user"]) else text

    def takes_parts(self, role: str) -> bool:
        return self._takes_parts.get(role, self._takes_parts["user"])


def parts_of(texts: Sequence[str]) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def _rendered(render: Render, role: str, content: Any) -> str | None:
    before, after = _CONVERSATIONS[role]
    as_content = (lambda text: text) if isinstance(content, str) else (lambda text: parts_of([text]))
    others = [[{**other, "content": as_content(other["content"])} for other in side] for side in (before, after)]
    return render([*others[0], {"role": role, "content": content}, *others[1]])


def _with_call(render: Render, hello: Mapping[str, Any], has_content: bool, as_text: bool) -> str | None:
    arguments = {"word": _WORD}
    function = {"name": "look_up", "arguments": json.dumps(arguments) if as_text else arguments}
    calls = [{"id": "abcdefghi", "type": "function", "function": function}]
    turn = {"role": "assistant", **({"content": None} if has_content else {}), "tool_calls": calls}
    return render([hello, turn], [_TOOL])


def _is_word_of(rendered: str | None) -> bool:
    """Whether the template took the text out of its part, and did not write the list."""
    text = (rendered or "").lower()
    return _WORD.lower() in text and not any(f"{quote}type{quote}" in text for quote in ("'", '"'))
