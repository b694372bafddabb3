"""What one can ask for: keyword arguments by the names of protos/inference.proto, put into a GenerateRequest.

The groups of the message (sampling, stopping, response, guided, cache, stream) are flattened: their fields have
different names. None is the same as leaving an option out.
"""

from __future__ import annotations

import difflib
import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypedDict

from google.protobuf.message import Message

from protos import inference_pb2 as pb
from runtime.errors import InvalidArgument

Prompt: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Text; token ids; or messages, oldest first: ``{"role": "user", "content": "..."}``."""


class Options(TypedDict, total=False):
    """The options of a request. protos/inference.proto says what each means and which values it takes."""

    request_id: str | None
    model: str | None
    priority: int | None
    lora_name: str | None
    user: str | None
    add_generation_prompt: bool | None  # of messages
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
    logit_bias: Mapping[int, float] | None
    # StoppingParams
    max_tokens: int | None
    min_tokens: int | None
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
    structural_tag: str | None
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


def request(prompt: Prompt, options: Options) -> pb.GenerateRequest:
    """The request that asks for this. Raises InvalidArgument for a value that its field can't hold, TypeError for an
    option that there is none of."""
    made = pb.GenerateRequest()
    if isinstance(prompt, str):
        made.prompt = prompt
    elif prompt and isinstance(prompt[0], Mapping):
        put_messages(made.messages, prompt)
    else:
        _fill(made.token_ids, "ids", prompt, "token_ids.ids")
    for name, value in options.items():
        if value is not None:
            _put(made, name, value)
    return made


def named_request(prompt: Prompt, options: Options) -> pb.GenerateRequest:
    """The request, under an id of its own where none was given: it can be asked for again, and is run once."""
    made = request(prompt, options)
    made.request_id = made.request_id or str(uuid.uuid4())
    return made


def tokenize_request(text: str | Sequence[Any], model: str, add_special_tokens: bool | None) -> pb.TokenizeRequest:
    """Raises InvalidArgument."""
    made = pb.TokenizeRequest(model=model, add_special_tokens=add_special_tokens, return_tokens=True)
    if isinstance(text, str):
        made.text = text
    else:
        put_messages(made.messages, text)
    return made


def put_messages(to: pb.Messages, messages: Sequence[Any]) -> None:
    """Raises InvalidArgument."""
    for index, message in enumerate(messages):
        field = f"messages.messages[{index}]"
        if not isinstance(message, Mapping) or not message.keys() <= {"role", "content"}:
            raise InvalidArgument(field, "role and content, and nothing else", message)
        made = to.messages.add()
        for name, value in message.items():
            _fill(made, name, value, f"{field}.{name}")


def _put(made: pb.GenerateRequest, name: str, value: object) -> None:
    if name == "add_generation_prompt":
        if made.WhichOneof("input") != "messages":
            raise InvalidArgument("messages.add_generation_prompt", "only where messages are given", value)
        _fill(made.messages, name, value, f"messages.{name}")
    elif group := _GROUP_OF.get(name):
        _fill(getattr(made, group), name, _as_sent(name, value), f"{group}.{name}")
    elif name in Options.__annotations__:
        _fill(made, name, value, name)
    else:
        near = difflib.get_close_matches(name, list(Options.__annotations__), n=1)
        raise TypeError(f"no such option: {name}" + (f"; did you mean {near[0]}?" if near else ""))


def _as_sent(name: str, value: object) -> object:
    """An option may be given in a handier form than the message has."""
    if name == "stop" and isinstance(value, str):
        return [value]
    if name == "json_schema" and isinstance(value, Mapping):
        return json.dumps(value)
    if name == "choice" and isinstance(value, Sequence) and not isinstance(value, str):
        return pb.Choices(choices=value)
    if name == "on_disconnect" and isinstance(value, str):
        return f"ON_DISCONNECT_{value.upper()}"
    return value


def _fill(message: Message, name: str, value: Any, path: str) -> None:
    """Sets one field; `path` is what an error calls it."""
    field = message.DESCRIPTOR.fields_by_name[name]
    try:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            getattr(message, name).update(value)
        elif field.is_repeated:
            getattr(message, name).extend(value)
        elif field.message_type is not None:
            getattr(message, name).CopyFrom(value)
        else:
            setattr(message, name, value)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(path, f"a value that the field can hold ({error})", value) from None
