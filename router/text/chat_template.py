"""Renderer of chat messages with the model's own template, in a confined process (`template_channel.py`).

Even in jinja2's sandbox a template may loop or allocate without end. A process that does not reply in RENDER_SECONDS is
killed; the next request starts another.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from decant.protos import inference_pb2 as pb
from decant.router.text.control_tokens import NO_TOKENS, AddedTexts, WrittenTokens
from decant.router.text.conversation import Conversation
from decant.router.text.template_channel import RENDER_SECONDS, TemplateChannel
from decant.router.text.text_work import TextWork
from decant.runtime.connections.channel import Deadline
from decant.runtime.errors import InvalidArgument

MAX_RENDERED = 16 * 1024 * 1024
"""Characters."""
NO_DEADLINE = Deadline()
_SWITCHES = ("enable_thinking", "thinking")


NO_VARIABLES: Mapping[str, bool] = {}


def _is_variable(name: str, template: str) -> bool:
    return re.search(rf"(?<![\w.'\"]){name}(?![\w'\"])", template) is not None


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt, and the control tokens in it that the template wrote: what content has of these is plain text."""

    text: str
    written: WrittenTokens


class ChatTemplate:
    def __init__(
        self,
        template: str,
        variables: Mapping[str, str],
        added: AddedTexts = NO_TOKENS,
        *,
        timeout_s: float = RENDER_SECONDS,
        max_characters: int = MAX_RENDERED,
    ) -> None:
        self.source = template
        self.takes_tools = re.search(r"\btools\b", template) is not None
        self.reasoning_switches = [name for name in _SWITCHES if _is_variable(name, template)]
        """Variables that turn reasoning on and off."""
        self._tokens = added.control
        self._work = TextWork(max_concurrent=1)
        setup = {
            "template": template,
            "variables": dict(variables),
            "max_characters": max_characters,
            "tokens": added.control,
            "other_tokens": added.others,
        }
        self._channel = TemplateChannel(setup, timeout_s)

    def start(self) -> str | None:
        """Start the process and check the template; return what it needs and does not have."""
        failure: str | None = self._channel.start().get("failed")
        return failure

    async def render(  # noqa: PLR0913 - a conversation, how it ends, and what its template gets
        self,
        messages: Sequence[pb.Message],
        tools: Sequence[pb.Tool] = (),
        *,
        add_generation_prompt: bool,
        continues: bool = False,
        variables: Mapping[str, bool] = NO_VARIABLES,
        deadline: Deadline = NO_DEADLINE,
        unix_time: float | None = None,
    ) -> Rendered:
        """Render messages; ``unix_time`` is what the template takes for now, None: the clock's.

        ``continues``: end with the content of the last message. ``variables`` are the request's.
        """
        conversation = Conversation()
        head = {
            **conversation.head(messages, tools),
            "add_generation_prompt": add_generation_prompt,
            "continues": continues,
            "variables": dict(variables),
            "lengths": list(map(len, conversation.texts)),
            "time": unix_time,
        }
        content = b"".join(conversation.texts)
        return await self._work.run(len(content), deadline, self._render, json.dumps(head).encode(), content)

    def _render(self, head: bytes, texts: bytes) -> Rendered:
        reply, text = self._channel.request(head, texts)
        match reply:
            case {"field": field, "limit": limit, "value": value}:
                raise InvalidArgument(field, limit, value)
            case {"refused": refusal}:
                raise InvalidArgument("messages", "a conversation that the model's chat template takes", refusal)
            case {"failed": failure}:
                raise InvalidArgument("messages", "a conversation that the model's chat template can render", failure)
        written = reply["written"]
        tokens = [self._tokens[index] for index in written[1::2]]
        return Rendered(text, list(zip(written[::2], tokens, strict=True)))
