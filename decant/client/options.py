"""Options of a request: the fields of GenerateRequest's groups in protos/inference.proto, flattened. None is unset."""

from __future__ import annotations

import difflib
import uuid
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Literal, TypeAlias, TypedDict, TypeVar, cast

from google.protobuf.message import Message

from decant.client.conversation import add_messages, add_tools, set_tool_choice
from decant.client.fields import set_field, to_json
from decant.protos import inference_pb2 as pb
from decant.runtime.errors import InvalidArgument

M = TypeVar("M", bound=Message)

Messages: TypeAlias = Sequence[Mapping[str, Any]]
"""Oldest first: ``{"role": "user", "content": "..."}``; also ``name``, ``reasoning``, ``tool_calls`` and
``tool_call_id``."""
Prompt: TypeAlias = str | Sequence[int] | Messages
"""Text, token ids, or messages."""


class Options(TypedDict, total=False):
    request_id: str | None
    model: str | None
    priority: int | None
    lora_name: str | None
    user: str | None
    parse_special_tokens: bool | None
    add_generation_prompt: bool | None  # of messages, as the next five
    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool | None
    reasoning: bool | None
    continue_final_message: bool | None
    # SamplingParams
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    repetition_penalty: float | None
    seed: int | None
    n: int | None
    best_of: int | None
    logit_bias: Mapping[int, float] | None
    # StoppingParams
    max_tokens: int | None
    min_tokens: int | None
    max_reasoning_tokens: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    include_stop_in_output: bool | None
    # ResponseOptions
    text: bool | None
    token_ids: bool | None
    logprobs: int | None
    prompt_logprobs: int | None
    skip_special_tokens: bool | None
    echo: bool | None
    # GuidedDecoding
    json_schema: str | Mapping[str, Any] | None
    regex: str | None
    ebnf_grammar: str | None
    structural_tag: str | Mapping[str, Any] | None
    choice: Sequence[str] | None
    json_object: bool | None
    # CacheOptions
    bypass_prefix_cache: bool | None
    cache_salt: str | None
    session_id: str | None
    # StreamOptions
    on_disconnect: Literal["cancel", "detach"] | None
    detach_ttl_ms: int | None
    min_chunk_tokens: int | None


_GROUPS: dict[str, type[Message]] = {
    "sampling": pb.SamplingParams,
    "stopping": pb.StoppingParams,
    "response": pb.ResponseOptions,
    "guided": pb.GuidedDecoding,
    "cache": pb.CacheOptions,
    "stream": pb.StreamOptions,
}
_GROUP_OF = {field.name: group for group, kind in _GROUPS.items() for field in kind.DESCRIPTOR.fields}
_GUIDES = [field.name for field in pb.GuidedDecoding.DESCRIPTOR.fields]


def request(prompt: Prompt, options: Options) -> pb.GenerateRequest:
    """Make a request. Raises InvalidArgument for a value that its field can't hold, TypeError for an unknown option."""
    message = pb.GenerateRequest()
    _set_input(message, prompt)
    guides = [name for name in _GUIDES if options.get(name) not in (None, False)]
    if len(guides) > 1:
        raise InvalidArgument(guides[-1], f"unset beside {guides[0]}", repr(options.get(guides[-1])))
    for name, value in options.items():
        if value is not None and not (name == "json_object" and value is False):
            _set_option(message, name, value)
    return message


def named_request(prompt: Prompt | None, messages: Messages | None, options: Options) -> pb.GenerateRequest:
    """Make a request with an id, so that repeated calls run once. Raises as `request`, and TypeError unless exactly one
    of `prompt` and `messages` is set.
    """
    if prompt is None and messages is None:
        request("", options)  # raises for token ids that are passed as token_ids=
    if (prompt is None) == (messages is None):
        raise TypeError(
            f"{_PROMPTS}, or messages=: " + ("both are given" if messages is not None else "neither is given")
        )
    if messages is not None and not _are_messages(messages):
        raise InvalidArgument("messages", 'a list of {"role": ..., "content": ...}', repr(messages))
    message = request(cast(Prompt, prompt if messages is None else messages), options)
    message.request_id = message.request_id or str(uuid.uuid4())
    return message


def tokenize_request(text: str | Sequence[Any], model: str, **options: bool | None) -> pb.TokenizeRequest:
    message = fill(pb.TokenizeRequest(return_tokens=True), model=model, **options)
    if isinstance(text, str):
        set_field(message, "text", text, "text")
    elif _are_messages(text):
        add_messages(message.messages, text)
    else:
        raise InvalidArgument("text", "a text or messages", repr(text))
    return message


def detokenize_request(token_ids: Sequence[int], model: str, skip_special_tokens: bool | None) -> pb.DetokenizeRequest:
    message = fill(pb.DetokenizeRequest(), model=model, skip_special_tokens=skip_special_tokens)
    set_field(message, "token_ids", token_ids, "token_ids")
    return message


def fill(message: M, **values: Any) -> M:
    for name, value in values.items():
        if value is not None:
            set_field(message, name, value, name)
    return message


def _set_input(message: pb.GenerateRequest, prompt: Any) -> None:
    if isinstance(prompt, str):
        set_field(message, "prompt", prompt, "prompt")
    elif isinstance(prompt, bytes | bytearray | Mapping | Set) or not hasattr(prompt, "__len__"):
        raise InvalidArgument("prompt", _PROMPTS, repr(prompt))
    elif _are_messages(prompt):
        add_messages(message.messages, prompt)
    else:
        try:
            message.token_ids.ids.extend(prompt)
        except (TypeError, ValueError):
            raise InvalidArgument("prompt", f"{_PROMPTS}; token ids are ints from 0", repr(prompt)) from None


_PROMPTS = "a text, token ids or messages"


def _are_messages(prompt: Any) -> bool:
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _set_option(message: pb.GenerateRequest, name: str, value: object) -> None:
    if name in _OF_MESSAGES:
        if message.WhichOneof("input") != "messages":
            raise InvalidArgument(name, "only with messages", value)
        _OF_MESSAGES[name](message.messages, value)
    elif name == "choice":
        message.guided.choice.SetInParent()
        set_field(message.guided.choice, "choices", value, name)
    elif group := _GROUP_OF.get(name):
        set_field(getattr(message, group), name, _to_field_value(name, value), name, value)
    elif name in Options.__annotations__:
        set_field(message, name, value, name)
    else:
        near = difflib.get_close_matches(name, [*Options.__annotations__, "timeout", "messages"], n=1)
        raise TypeError(f"no such option: {name}" + (f"; did you mean {near[0]}?" if near else ""))


def _field_of_messages(name: str) -> Callable[[pb.Messages, Any], None]:
    return lambda messages, value: set_field(messages, name, value, name)


_OF_MESSAGES: Mapping[str, Callable[[pb.Messages, Any], None]] = {
    **{
        name: _field_of_messages(name)
        for name in ("add_generation_prompt", "continue_final_message", "parallel_tool_calls", "reasoning")
    },
    "tools": add_tools,
    "tool_choice": set_tool_choice,
}


def _to_field_value(name: str, value: object) -> object:
    if name == "stop" and isinstance(value, str):
        return [value]
    if name in ("json_schema", "structural_tag"):
        return to_json(value, name)
    if name == "on_disconnect" and isinstance(value, str):
        return f"ON_DISCONNECT_{value.upper()}"
    return value
