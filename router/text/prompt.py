"""A prompt becomes token ids, from a text, a conversation or ids. What can't fit the context is refused unread.

    text ------------------------> bounded by its length? --> tokenized --> fits? --> token ids
    messages --chat template--> text --^
    token ids --counted--> fits? --------------------------> in the vocabulary? ------^

Long inputs are worked on in threads (``TextWork``): no input stops the event loop for more than some milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from decant.protos import inference_pb2 as pb
from decant.router.text.served_model import ENCODED_AT_ONCE, ServedModel
from decant.runtime.channel import Deadline
from decant.runtime.error_details import Reason
from decant.runtime.errors import InvalidArgument

ContextLengthOf = Callable[[str], int | None]
"""The least window that the live workers of a model serve; None while there are none."""

SLICE = 1 << 16
"""Token ids that are looked at in one call."""
UNKNOWN_WINDOW = 1 << 20
"""Context length that is assumed for work on words alone while neither the model's files nor workers name one."""


def window(model: ServedModel, max_context_length: ContextLengthOf) -> int | None:
    """Tokens of prompt and output together: what the workers serve, which may be less than the model was made for, or
    more where its rotary scaling reaches further. None where only they could tell, and there are none."""
    served = max_context_length(model.id)
    return model.window if served is None else served


async def prompt_of(request: pb.GenerateRequest, model: ServedModel, longest: int, deadline: Deadline) -> list[int]:
    """Its token ids: at least one, each one of the model's, fewer than ``longest``.

    Raises InvalidArgument, QueueFull, DeadlineExceeded.
    """
    match request.WhichOneof("input"):
        case "messages":
            ids = await chat_tokens(request.messages, model, longest, deadline)
        case "token_ids":
            return await _given_ids(request.token_ids.ids, model, longest, deadline)
        case _:
            ids = await text_tokens("prompt", request.prompt, model, longest, deadline)
    if not ids:
        raise InvalidArgument("prompt", "at least 1 token", 0, reason=Reason.EMPTY_PROMPT)
    field = request.WhichOneof("input") or "prompt"
    check_vocabulary(field, ids, model)
    check_fits(field, len(ids), longest)
    return ids


async def chat_tokens(messages: pb.Messages, model: ServedModel, longest: int, deadline: Deadline) -> list[int]:
    """A conversation as the model's chat template writes it. Raises InvalidArgument, QueueFull, DeadlineExceeded."""
    if model.chat is None:
        advice = f"{model.id} has no chat template: send a text"
        raise InvalidArgument("messages", "a model with a chat template", model.id, advice=advice)
    if not messages.messages:
        raise InvalidArgument("messages.messages", "at least 1 message", 0)
    opens = messages.add_generation_prompt if messages.HasField("add_generation_prompt") else True
    text = await model.chat.render(messages.messages, add_generation_prompt=opens, deadline=deadline)
    return await text_tokens("messages", text, model, longest, deadline, special=False)


async def text_tokens(
    field: str, text: str, model: ServedModel, longest: int, deadline: Deadline, *, special: bool = True
) -> list[int]:
    """Raises InvalidArgument for a text that is too long for the context, whatever its tokens; QueueFull,
    DeadlineExceeded."""
    if not text:
        return []
    check_fits(field, await model.least_tokens(text, longest), longest, at_least=True)
    return await model.encode(text, special=special, deadline=deadline)


async def _given_ids(ids: Sequence[int], model: ServedModel, longest: int, deadline: Deadline) -> list[int]:
    field, count = "token_ids.ids", len(ids)
    if not count:
        raise InvalidArgument(field, "at least 1 token", 0, reason=Reason.EMPTY_PROMPT)
    check_fits(field, count, longest)
    return await checked_ids(field, ids, model, deadline)


async def checked_ids(field: str, ids: Sequence[int], model: ServedModel, deadline: Deadline) -> list[int]:
    """A message's ids, each one of the model's. Raises InvalidArgument, QueueFull, DeadlineExceeded."""

    def checked() -> list[int]:
        listed: list[int] = []
        for start in range(0, len(ids), SLICE):  # in one call they would hold the interpreter's lock for too long
            part = ids[start : start + SLICE]
            check_vocabulary(field, part, model)
            listed += part
        return listed

    return checked() if len(ids) <= ENCODED_AT_ONCE else await model.texts.run(4 * len(ids), deadline, checked)


def check_fits(field: str, tokens: int, longest: int, *, at_least: bool = False) -> None:
    """Raises InvalidArgument for a prompt beside which the window has no room for one token more. ``at_least``: it has
    so many tokens or more."""
    if tokens >= longest:
        limit = f"at most {longest - 1} tokens, so that one more fits the window of {longest}"
        found = f"at least {tokens}" if at_least else tokens
        raise InvalidArgument(field, limit, found, reason=Reason.PROMPT_TOO_LONG)


def check_vocabulary(field: str, ids: Iterable[int], model: ServedModel) -> None:
    """Raises InvalidArgument for an id that the model has no row for."""
    highest = max(ids, default=0)
    if highest >= model.vocab_size:
        raise InvalidArgument(field, f"token ids below {model.vocab_size}", highest)
