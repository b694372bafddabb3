"""`/v1/chat/completions`: options of a body, and OpenAI's objects of what the routers return."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from decant.client import Answer, Delta, Output
from decant.gateway import body_fields, logprobs
from decant.gateway.errors import OF_HEADERS, refused, unsupported
from decant.gateway.generation import Caller, GenerationRequest, answers, finish_reason, pieces, usage_object

KNOWN = (
    body_fields.SAMPLING
    | body_fields.EXTENSIONS
    | body_fields.OF_CHATS
    | {
        *("model", "messages", "stream", "stream_options", "response_format", "logprobs", "top_logprobs", "logit_bias"),
        *("max_completion_tokens", "reasoning_effort", "safety_identifier", "prompt_cache_key", "metadata"),
    }
)
NAMES: Mapping[str, str] = {
    **OF_HEADERS,
    "logprobs": "top_logprobs",
    "json_schema": "response_format",
    "json_object": "response_format",
    "session_id": "prompt_cache_key",
    "reasoning": "reasoning_effort",
}
"""The body's names of Decant's fields that differ, for errors."""

_OF_OTHERS = ("refusal", "audio", "annotations", "function_call")
"""Fields that OpenAI's clients send back with an assistant's message, unset."""
_EFFORTS = ("minimal", "low", "medium", "high", "xhigh", "max")


def request(body: Mapping[str, Any]) -> GenerationRequest:
    """Raises ApiError for what Decant does not do."""
    body_fields.check(body, KNOWN)
    body_fields.mapping(body, "metadata")
    names = body_fields.SAMPLING | body_fields.EXTENSIONS | body_fields.OF_CHATS
    options = body_fields.options_of(body, names)
    options |= {
        "model": body_fields.text(body, "model") or None,
        "max_tokens": _max_tokens(body),
        "logprobs": _logprobs(body),
        "logit_bias": body_fields.bias(body),
        "user": body_fields.first_text(body, "user", "safety_identifier"),
        "session_id": body_fields.first_text(body, "session_id", "prompt_cache_key"),
        "reasoning": _reasoning(body),
        **_response_format(body),
    }
    return GenerationRequest(
        options={name: value for name, value in options.items() if value is not None},
        messages=_messages(body),
        is_stream=body_fields.flag(body, "stream"),
        includes_usage=body_fields.includes_usage(body),
    )


def _messages(body: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise refused("messages", "a list with at least one message", messages)
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(message, dict):
        raise refused(where, "an object", message)
    made = {name: value for name, value in message.items() if value is not None}
    for name in _OF_OTHERS:
        if name in made and not made.pop(name) == []:
            raise unsupported(f"{where}.{name}")
    if "reasoning_content" in made:
        made["reasoning"] = made.pop("reasoning_content")
    if made.get("role") == "developer":
        made["role"] = "system"
    return made


def _max_tokens(body: Mapping[str, Any]) -> Any:
    both = [body[name] for name in ("max_completion_tokens", "max_tokens") if body.get(name) is not None]
    if len(both) == 2 and both[0] != both[1]:
        raise refused("max_tokens", "unset beside max_completion_tokens", both[1])
    return both[0] if both else None


def _logprobs(body: Mapping[str, Any]) -> Any:
    if body_fields.flag(body, "logprobs"):
        return body_fields.count(body, "top_logprobs") or 0
    if body.get("top_logprobs"):
        raise refused("top_logprobs", "only with logprobs true", body["top_logprobs"])
    return None


def _reasoning(body: Mapping[str, Any]) -> Any:
    is_on, effort = body.get("reasoning"), body.get("reasoning_effort")
    if effort is None:
        return None if is_on is None else body_fields.flag(body, "reasoning")
    if is_on is not None:
        raise refused("reasoning", "unset beside reasoning_effort", is_on)
    if effort not in ("none", *_EFFORTS):
        raise refused("reasoning_effort", f"one of none, {', '.join(_EFFORTS)}", effort)
    return effort != "none"


def _response_format(body: Mapping[str, Any]) -> Mapping[str, Any]:
    given = body_fields.mapping(body, "response_format")
    if given is None:
        return {}
    kind = given.get("type")
    body_fields.only(given, {"type", "json_schema"} if kind == "json_schema" else {"type"}, "response_format.")
    if kind in ("text", "json_object"):
        return {"json_object": True} if kind == "json_object" else {}
    schema = given.get("json_schema")
    if kind != "json_schema" or not isinstance(schema, dict) or not isinstance(schema.get("schema"), dict):
        limit = "type text, json_object, or json_schema with json_schema.schema"
        raise refused("response_format", limit, given)
    where = "response_format.json_schema."
    body_fields.only(schema, {"name", "description", "schema", "strict"}, where)
    for name in ("name", "description"):
        body_fields.text(schema, name, where)
    body_fields.flag(schema, "strict", where)
    return {"json_schema": schema["schema"]}


async def whole(caller: Caller, wanted: GenerationRequest, frame: Mapping[str, Any]) -> dict[str, Any]:
    """The answer; `frame` has its id, time and model."""
    (answer,) = await answers(caller, wanted)
    has_logprobs = "logprobs" in wanted.options
    choices = [_choice(output, has_logprobs=has_logprobs) for output in answer.outputs]
    return {**_framed(frame, answer), "object": "chat.completion", "choices": choices, "usage": _usage(answer)}


def _framed(frame: Mapping[str, Any], answer: Answer) -> dict[str, Any]:
    return {**frame, "model": frame["model"] or answer.model}


def _usage(answer: Answer) -> dict[str, Any]:
    return usage_object([answer.usage])


def _choice(output: Output, *, has_logprobs: bool) -> dict[str, Any]:
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in output.tool_calls
    ]
    message: dict[str, Any] = {
        "role": "assistant",
        "content": output.text if output.text or not calls else None,
        "refusal": None,
    }
    if calls:
        message["tool_calls"] = calls
    if output.reasoning:
        message["reasoning_content"] = output.reasoning
    return {
        "index": output.index,
        "message": message,
        "logprobs": logprobs.of_chat(output.logprobs) if has_logprobs else None,
        "finish_reason": finish_reason(output.finished, has_calls=bool(calls)),
    }


async def chunks(
    caller: Caller, wanted: GenerationRequest, frame: Mapping[str, Any]
) -> AsyncGenerator[dict[str, Any], None]:
    """The chunks of a stream."""
    has_logprobs = "logprobs" in wanted.options
    begun: set[int] = set()
    with_calls: set[int] = set()
    made: dict[str, Any] = {**frame, "object": "chat.completion.chunk"}
    if wanted.includes_usage:
        made["usage"] = None
    async with aclosing(pieces(caller, wanted)) as parts:
        async for piece in parts:
            made["model"] = frame["model"] or (piece.stream.started.model if piece.stream.started else "")
            if piece.delta is not None:
                delta = piece.delta
                fields = _delta(delta, is_first=delta.index not in begun)
                if not fields and not delta.logprobs:
                    continue
                begun.add(delta.index)
                if delta.tool_calls:
                    with_calls.add(delta.index)
                tokens = logprobs.of_chat(delta.logprobs) if has_logprobs else None
                yield {**made, "choices": [_part(delta.index, fields, tokens)]}
                continue
            for output in piece.stream.outputs:
                reason = finish_reason(output.finished, has_calls=output.index in with_calls)
                yield {**made, "choices": [_part(output.index, {}, None, reason)]}
            if wanted.includes_usage:
                yield {**made, "choices": [], "usage": usage_object([piece.stream.usage])}


def _part(index: int, delta: Mapping[str, Any], tokens: Any, reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": tokens, "finish_reason": reason}


def _delta(delta: Delta, *, is_first: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": "assistant", "content": ""} if is_first else {}
    if delta.text:
        fields["content"] = delta.text
    if delta.reasoning:
        fields["reasoning_content"] = delta.reasoning
    if delta.tool_calls:
        fields["tool_calls"] = [
            {
                "index": call.index,
                **({"id": call.id, "type": "function"} if call.id else {}),
                "function": {**({"name": call.name} if call.name else {}), "arguments": call.arguments},
            }
            for call in delta.tool_calls
        ]
    return fields
