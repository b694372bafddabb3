"""Requests for scores and embeddings from arguments of Python."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict, TypeVar

from decant.client.fields import set_field
from decant.protos import inference_pb2 as pb
from decant.runtime.errors import InvalidArgument

Text = str | Sequence[int]
"""A text, or token ids."""

_Request = TypeVar("_Request", pb.ScoreRequest, pb.EmbedRequest)


class ScoreOptions(TypedDict, total=False):
    """Options of `score`; the fields of `ScoreRequest` describe them."""

    model: str
    lora_name: str
    logprobs: int
    cache_salt: str
    priority: int
    parse_special_tokens: bool | None


class EmbedOptions(TypedDict, total=False):
    """Options of `embed`; the fields of `EmbedRequest` describe them. ``pooling``: "last" or "mean"."""

    model: str
    lora_name: str
    pooling: str
    dimensions: int | None
    normalize: bool | None
    cache_salt: str
    priority: int
    parse_special_tokens: bool | None


def score_request(prompt: Text, continuations: Iterable[Text], options: Mapping[str, Any]) -> pb.ScoreRequest:
    message = _with_options(pb.ScoreRequest(), options, ScoreOptions.__annotations__)
    _set_text(message, "prompt", prompt, "prompt")
    for place, item in enumerate(_items("continuations", continuations)):
        _set_text(message.continuations.add(), "text", item, f"continuations[{place}]")
    return message


def embed_request(inputs: str | Iterable[Text], options: Mapping[str, Any]) -> pb.EmbedRequest:
    message = _with_options(pb.EmbedRequest(), options, EmbedOptions.__annotations__)
    for place, item in enumerate([inputs] if isinstance(inputs, str) else _items("inputs", inputs)):
        _set_text(message.inputs.add(), "text", item, f"inputs[{place}]")
    return message


def _with_options(message: _Request, options: Mapping[str, Any], known: Iterable[str]) -> _Request:
    for name, value in options.items():
        if name not in known:
            raise TypeError(f"no such option: {name}; there are {', '.join(known)}")
        if value is not None:
            set_field(message, name, _pooling(value) if name == "pooling" else value, name)
    return message


def _pooling(value: object) -> int:
    known = {
        name.removeprefix("POOLING_").lower(): number for name, number in pb.EmbedRequest.Pooling.items() if number
    }
    if not isinstance(value, str) or value not in known:
        raise InvalidArgument("pooling", " or ".join(map(repr, known)), repr(value))
    return known[value]


def _items(name: str, items: Any) -> list[Any]:
    if isinstance(items, str | bytes | bytearray) or not isinstance(items, Iterable):
        raise InvalidArgument(name, "a list of texts, or of lists of token ids", repr(items))
    return list(items)


def _set_text(message: Any, field: str, item: Any, name: str) -> None:
    if isinstance(item, str):
        set_field(message, field, item, name)
        return
    try:
        if isinstance(item, bytes | bytearray):
            raise TypeError
        message.token_ids.ids.extend(item)
        message.token_ids.SetInParent()
    except (TypeError, ValueError):
        raise InvalidArgument(name, "a text, or token ids, which are ints from 0", repr(item)) from None
