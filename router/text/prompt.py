"""Token ids of prompts. Functions raise InvalidArgument for a prompt that can't run, and QueueFull or DeadlineExceeded
where a text waits for a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from decant.protos import inference_pb2 as pb
from decant.router.text.chat_template import ChatTemplate
from decant.router.text.control_tokens import WrittenTokens
from decant.router.text.conversation import offered_tools
from decant.router.text.served_model import MAX_INLINE_LENGTH, ServedModel
from decant.runtime.connections.channel import Deadline
from decant.runtime.error_details import Reason
from decant.runtime.errors import InvalidArgument

ContextLengthOf = Callable[[str], int | None]
"""The least of a model's usable workers; None while there are none."""

SLICE = 1 << 16
ASSUMED_CONTEXT_LENGTH = 1 << 20
"""Context length for Tokenize and Detokenize if neither the model's files nor workers name one."""


def context_length_of(model: ServedModel, max_context_length: ContextLengthOf) -> int | None:
    """Context length that the workers serve, else that of the model's files; None if both are unknown."""
    of_workers = max_context_length(model.id)
    return model.max_context_length if of_workers is None else of_workers


def least_prompt_tokens(request: pb.GenerateRequest, model: ServedModel) -> int:
    """Lower bound of a prompt's tokens, in time that does not grow with a text."""
    match request.WhichOneof("input"):
        case "token_ids":
            return len(request.token_ids.ids)
        case "messages":
            return 1  # a template may drop what a message holds
    return max(1, model.least_tokens_at_once(request.prompt))


async def prompt_of(
    request: pb.GenerateRequest,
    model: ServedModel,
    context_length: int,
    deadline: Deadline,
    unix_time: float | None = None,
) -> list[int]:
    """Token ids of a request's prompt: at least one, fewer than ``context_length``, all in the vocabulary.

    ``unix_time`` is the time for the chat template; None: now.
    """
    match request.WhichOneof("input"):
        case "messages":
            parse = request.parse_special_tokens
            ids = await chat_tokens(request.messages, model, context_length, deadline, unix_time, parse_special=parse)
        case "token_ids":
            if request.HasField("parse_special_tokens"):
                raise InvalidArgument("parse_special_tokens", "unset with token_ids", request.parse_special_tokens)
            return await prompt_ids("token_ids.ids", request.token_ids.ids, model, context_length, deadline)
        case _:
            written = text_written(request)
            ids = await text_tokens("prompt", request.prompt, model, context_length, deadline, written=written)
    return checked_tokens(request.WhichOneof("input") or "prompt", ids, model, context_length)


def checked_tokens(field: str, ids: list[int], model: ServedModel, context_length: int) -> list[int]:
    """Check the tokens of a text that is a whole prompt."""
    if not ids:
        raise InvalidArgument(field, "at least 1 token", 0, reason=Reason.EMPTY_PROMPT)
    check_vocabulary(field, ids, model)
    check_fits(field, len(ids), context_length)
    return ids


async def chat_tokens(
    messages: pb.Messages,
    model: ServedModel,
    context_length: int,
    deadline: Deadline,
    unix_time: float | None = None,
    *,
    parse_special: bool = False,
) -> list[int]:
    """Tokenize a conversation. What its content contains of control tokens is plain text unless ``parse_special``."""
    if model.chat is None:
        others = f"; it has {', '.join(model.other_templates)}" if model.other_templates else ""
        advice = f"{model.id} has no {'default ' if others else ''}chat template{others}: send a text"
        raise InvalidArgument("messages", "a model with a chat template", model.id, advice=advice)
    if not messages.messages:
        raise InvalidArgument("messages.messages", "at least 1 message", 0)
    is_continued = messages.continue_final_message
    add_prompt = messages.add_generation_prompt if messages.HasField("add_generation_prompt") else not is_continued
    if is_continued:
        _check_continued(messages)
    tools = offered_tools(messages)
    template = model.tool_chat if tools and model.tool_chat is not None else model.chat
    if tools and not template.takes_tools:
        raise InvalidArgument("messages.tools", "a model whose chat template takes tools", model.id)
    rendered = await template.render(
        messages.messages,
        tools,
        add_generation_prompt=add_prompt,
        continues=is_continued,
        variables=_switch(messages, template, model.id),
        deadline=deadline,
        unix_time=unix_time,
    )
    written = None if parse_special else rendered.written
    return await text_tokens("messages", rendered.text, model, context_length, deadline, special=False, written=written)


def _check_continued(messages: pb.Messages) -> None:
    if messages.add_generation_prompt:
        raise InvalidArgument("messages.add_generation_prompt", "unset with continue_final_message", True)
    place = len(messages.messages) - 1
    last, field = messages.messages[place], f"messages.messages[{place}]"
    if last.role != "assistant":
        raise InvalidArgument(f"{field}.role", "assistant with continue_final_message", last.role)
    if not (last.content.strip() or "".join(part.text for part in last.parts).strip()) or last.tool_calls:
        limit = "text, and no calls, with continue_final_message"
        raise InvalidArgument(f"{field}.content", limit, last.content or "calls" if last.tool_calls else "")


def _switch(messages: pb.Messages, template: ChatTemplate, model: str) -> Mapping[str, bool]:
    """What turns the template's reasoning on or off."""
    if not messages.HasField("reasoning"):
        return {}
    if not template.reasoning_switches:
        limit = f"unset for {model}, whose chat template has no switch for it"
        raise InvalidArgument("messages.reasoning", limit, messages.reasoning)
    return dict.fromkeys(template.reasoning_switches, messages.reasoning)


def text_written(
    request: pb.GenerateRequest | pb.TokenizeRequest | pb.ScoreRequest | pb.EmbedRequest,
) -> WrittenTokens | None:
    """Control tokens in a text of a request, as `ServedModel.encode` takes them: by default all that it contains."""
    return () if request.HasField("parse_special_tokens") and not request.parse_special_tokens else None


async def text_tokens(  # noqa: PLR0913 - a text, what it is for, and its limits
    field: str,
    text: str,
    model: ServedModel,
    context_length: int,
    deadline: Deadline,
    *,
    special: bool = True,
    written: WrittenTokens | None = None,
) -> list[int]:
    """Tokenize a text, with the model's tokens around a prompt if ``special``; see `ServedModel.encode`."""
    if not text:
        return []
    check_fits(field, await model.least_tokens(text, context_length), context_length, at_least=True)
    return await model.encode(text, special=special, written=written, deadline=deadline)


async def prompt_ids(
    field: str, ids: Sequence[int], model: ServedModel, context_length: int, deadline: Deadline
) -> list[int]:
    """Check the ids of a prompt: at least one, fewer than ``context_length``, all in the vocabulary."""
    count = len(ids)
    if not count:
        raise InvalidArgument(field, "at least 1 token", 0, reason=Reason.EMPTY_PROMPT)
    check_fits(field, count, context_length)
    return await checked_ids(field, ids, model, deadline)


async def checked_ids(field: str, ids: Sequence[int], model: ServedModel, deadline: Deadline) -> list[int]:
    def checked() -> list[int]:
        listed: list[int] = []
        for start in range(0, len(ids), SLICE):  # one call would hold the interpreter's lock for too long
            part = ids[start : start + SLICE]
            check_vocabulary(field, part, model)
            listed += part
        return listed

    return checked() if len(ids) <= MAX_INLINE_LENGTH else await model.texts.run(4 * len(ids), deadline, checked)


def check_fits(field: str, tokens: int, context_length: int, *, at_least: bool = False) -> None:
    if tokens >= context_length:
        limit = f"at most {context_length - 1} tokens, so that one more fits the context length of {context_length}"
        value = f"at least {tokens}" if at_least else tokens
        raise InvalidArgument(field, limit, value, reason=Reason.PROMPT_TOO_LONG)


def check_vocabulary(field: str, ids: Iterable[int], model: ServedModel) -> None:
    highest = max(ids, default=0)
    if highest >= model.vocab_size:
        raise InvalidArgument(field, f"token ids below {model.vocab_size}", highest)
