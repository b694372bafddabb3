"""Fields of a body, each of which is an option, neutral or refused; none is ignored but those that change no answer.

option    it is an option of Decant's client with this name
neutral   accepted with the values that mean what Decant does anyway
other     an endpoint reads it itself
refused   any other field, by its name; null is the same as unset
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from typing import Any

from decant.gateway.errors import refused, unsupported

SAMPLING = frozenset(
    {"temperature", "top_p", "frequency_penalty", "presence_penalty", "seed", "n", "stop", "max_tokens", "user"}
)
"""Options of chats and completions that OpenAI has too."""
EXTENSIONS = frozenset(
    {
        *(
            "top_k",
            "min_p",
            "repetition_penalty",
            "min_tokens",
            "stop_token_ids",
            "ignore_eos",
            "include_stop_in_output",
        ),
        *("skip_special_tokens", "parse_special_tokens", "priority", "cache_salt", "session_id", "bypass_prefix_cache"),
        *("regex", "ebnf_grammar", "structural_tag", "choice"),
    }
)
"""Options of chats and completions that OpenAI does not have."""
OF_CHATS = frozenset(
    {
        *("tools", "tool_choice", "parallel_tool_calls"),
        *("reasoning", "max_reasoning_tokens", "add_generation_prompt", "continue_final_message"),
    }
)
"""Further options of chats."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "store": (False,),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "prompt_cache_retention": ("in_memory", "in-memory"),
    "suffix": ("",),
}
REFUSED = frozenset(
    {
        *("audio", "function_call", "functions", "moderation", "prediction", "prompt_cache_options"),
        "web_search_options",
    }
)
"""Fields of OpenAI's API that Decant does not do. Unknown ones are refused too."""

_TOKEN_ID = re.compile(r"[0-9]{1,10}")


def check(body: Mapping[str, Any], known: Set[str]) -> None:
    """Refuse each field that is set, and neither known nor neutral. Raises ApiError."""
    for name, value in body.items():
        if name in known or value is None:
            continue
        if name in NEUTRAL:
            if not any(value == one and type(value) is type(one) for one in NEUTRAL[name]):
                allowed = " or ".join(repr(one) for one in NEUTRAL[name])
                raise unsupported(name, f"only {allowed} is supported by Decant")
        elif name in REFUSED:
            raise unsupported(name)
        else:
            raise unsupported(name, "no such field")


def options_of(body: Mapping[str, Any], names: Set[str]) -> dict[str, Any]:
    return {name: body[name] for name in names if body.get(name) is not None}


def only(given: Mapping[str, Any], known: Set[str], where: str) -> None:
    """Refuse each other field of an object that is set. `where` precedes its name. Raises ApiError."""
    for name, value in given.items():
        if name not in known and value is not None:
            raise unsupported(f"{where}{name}", "no such field")


def flag(body: Mapping[str, Any], name: str, where: str = "") -> bool:
    """A field that is true, false or unset. Raises ApiError."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise refused(f"{where}{name}", "true or false", value)
    return bool(value)


def text(body: Mapping[str, Any], name: str, where: str = "") -> str:
    """A text; "" if it is unset. Raises ApiError."""
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise refused(f"{where}{name}", "a text", value)
    return value or ""


def first_text(body: Mapping[str, Any], *names: str) -> str | None:
    """The first of these texts that is not empty. Raises ApiError if any is no text."""
    return next(filter(None, [text(body, name) for name in names]), None)


def count(body: Mapping[str, Any], name: str) -> int | None:
    """A whole number from 0. Raises ApiError."""
    value = body.get(name)
    if value is not None and (type(value) is not int or value < 0):
        raise refused(name, "a whole number from 0", value)
    return value


def mapping(body: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """An object. Raises ApiError."""
    value = body.get(name)
    if value is not None and not isinstance(value, dict):
        raise refused(name, "an object", value)
    return value


def includes_usage(body: Mapping[str, Any]) -> bool:
    """Whether a stream ends with the usage. Raises ApiError."""
    options = mapping(body, "stream_options")
    if options is None:
        return False
    if not flag(body, "stream"):
        raise refused("stream_options", "only with stream", options)
    for name, value in options.items():
        if name not in ("include_usage", "include_obfuscation") or (name == "include_obfuscation" and value):
            raise unsupported(f"stream_options.{name}")
    return flag(options, "include_usage")


def bias(body: Mapping[str, Any]) -> dict[int, Any] | None:
    """`logit_bias` with token ids as numbers, which are texts in JSON. Raises ApiError."""
    given = mapping(body, "logit_bias")
    if given is None:
        return None
    if wrong := next((key for key in given if not _TOKEN_ID.fullmatch(key)), None):
        raise refused("logit_bias", "token ids and numbers", wrong)
    return {int(key): value for key, value in given.items()}
