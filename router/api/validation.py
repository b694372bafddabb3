"""A request as it came becomes one that can be run as it stands, or is refused by field, limit and value.

    GenerateRequest --supported?--> --in range?--> --tokens--> --fits the window?--> ValidRequest

Each field is honoured or refused. What this build can't honour stands in one table, which clients are also shown;
what a newer client sends and this build doesn't know is refused by its number.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import struct
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from decant.protos import inference_pb2 as pb
from decant.protos import worker_pb2 as wire
from decant.router.limits import (
    MAX_DETACH_TTL_MS,
    MAX_LOGIT_BIAS_ENTRIES,
    MAX_LOGPROBS,
    MAX_OUTPUTS,
    MAX_PRIORITY,
    MAX_STOP_TEXT_BYTES,
    MAX_STOP_TEXTS,
    MAX_STOP_TOKEN_IDS,
    at_most,
    check_id,
    check_sampling,
    check_size,
    within,
)
from decant.router.request.valid_request import ValidRequest
from decant.router.text.output_text import OutputOptions, new_output_text
from decant.router.text.prompt import ContextLengthOf, check_vocabulary, context_length_of, prompt_of
from decant.router.text.served_model import Models, ServedModel
from decant.router.text.stop_strings import StopStrings
from decant.runtime.channel import Deadline
from decant.runtime.error_details import Reason
from decant.runtime.errors import RETRY_AFTER_SECONDS, InvalidArgument, Unavailable, Unimplemented
from decant.runtime.packed import pack
from decant.state.ids import RequestKey

LISTED_BYTES = 16 * 1024
"""Of a message whose unknown fields are listed, in at most some ten milliseconds."""

_UNSUPPORTED: Mapping[str, Callable[[pb.GenerateRequest], Any]] = {
    "SamplingParams.n": lambda request: request.sampling.n if request.sampling.n > MAX_OUTPUTS else None,
    "GenerateRequest.guided": lambda request: request.HasField("guided"),
    "GenerateRequest.lora_name": lambda request: request.lora_name,
}
"""What this build can't honour, and whether a request asks for it."""

UNIMPLEMENTED_FIELDS = tuple(_UNSUPPORTED)

_MOST = {"SamplingParams.n": f"{MAX_OUTPUTS} is all this server does"}


async def validate(
    request: pb.GenerateRequest, models: Models, max_context_length: ContextLengthOf, deadline: Deadline, tenant: str
) -> ValidRequest:
    """Raises InvalidArgument, Unimplemented, NotFound, PermissionDenied; Unavailable where only workers could say how
    long a sequence of the model may be, and there are none; QueueFull and DeadlineExceeded for a long input, which may
    have to wait for its turn to be tokenized."""
    accepted_at = asyncio.get_running_loop().time()
    check_size(request)
    _check_supported(request)
    _check_form(request)
    model = models.find(request.model)
    wanted = _wanted(request)
    sampling = _sampling(request.sampling, model)
    longest = context_length_of(model, max_context_length)
    if longest is None:
        raise Unavailable(Reason.NO_WORKER, "no worker serves this model", retry_after=RETRY_AFTER_SECONDS)
    prompt = await prompt_of(request, model, longest, deadline)
    if request.response.echo:
        wanted = replace(wanted, echo=await _shown_prompt(request, prompt, model, wanted, deadline))
    stopping = _stopping(request.stopping, model, longest - len(prompt))
    id = request.request_id or str(uuid.uuid4())
    work = wire.EngineRequest(
        model=model.id,
        prompt=pack(prompt),
        outputs=[wire.OutputPrefix(output=0)],
        sampling=sampling,
        stopping=stopping,
        logprobs=wanted.logprobs,
        prompt_logprobs=wanted.prompt_logprobs,
        priority=request.priority,
        salt=salt_of(tenant, request.cache.cache_salt),
        bypass_prefix_cache=request.cache.bypass_prefix_cache,
    )
    return ValidRequest(
        key=RequestKey(tenant, id),
        payload=_with_id(request, id),
        engine_request=work,
        prompt_tokens=len(prompt),
        output_options=wanted,
        deadline=deadline,
        id_generated=not request.request_id,
        accepted_at=accepted_at,
        detach_ms=_detach_ms(request.stream),
        eos_token_ids=frozenset() if stopping.ignore_eos else model.eos_token_ids,
        session=f"{tenant}/{request.cache.session_id}" if request.cache.session_id else "",
        vocab_size=model.vocab_size,
        new_output_text=partial(new_output_text, model, wanted, stopping) if wanted.stops else None,
    )


def salt_of(tenant: str, cache_salt: str) -> bytes:
    """Blocks are shared between equal salts only: those of one tenant, and there of one salt of the client's own."""
    name = tenant.encode()
    return hashlib.blake2b(struct.pack("<I", len(name)) + name + cache_salt.encode(), digest_size=16).digest()


# ------------------------------------------------------------------------------------ the request as a whole


def _check_supported(request: pb.GenerateRequest) -> None:
    check_known(request)
    for field, asked in _UNSUPPORTED.items():
        if value := asked(request):
            raise Unimplemented(
                field, "a value" if value is True else value, limit=_MOST.get(field, Unimplemented.LIMIT)
            )


def check_known(message: Message) -> None:
    """Raises Unimplemented for a field of a newer build: passing over it might give another answer than was asked.

    In a large message such fields are counted, not listed: a list of millions would stop the event loop for seconds.
    """
    size = message.ByteSize()
    if size > LISTED_BYTES:
        _name_unknown_parts(message)
        message.DiscardUnknownFields()
        if unknown_bytes := size - message.ByteSize():
            raise Unimplemented(message.DESCRIPTOR.name, f"{unknown_bytes} bytes of unknown fields")
        return
    for unknown in UnknownFieldSet(message):  # type: ignore[attr-defined]
        raise Unimplemented(f"{message.DESCRIPTOR.name}.{unknown.field_number}")
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for inner in value if field.is_repeated else (value,):
            check_known(inner)


def _name_unknown_parts(message: Message) -> None:
    for field, value in message.ListFields():
        if field.message_type is not None and not field.is_repeated and value.ByteSize() <= LISTED_BYTES:
            check_known(value)


def _check_form(request: pb.GenerateRequest) -> None:
    check_id(request.request_id)
    within("priority", request.priority, -MAX_PRIORITY, MAX_PRIORITY)
    if request.stream.on_disconnect not in pb.StreamOptions.OnDisconnect.values():
        raise InvalidArgument("stream.on_disconnect", "a value of its enum", request.stream.on_disconnect)


def _detach_ms(asked: pb.StreamOptions) -> int | None:
    if asked.on_disconnect != pb.StreamOptions.ON_DISCONNECT_DETACH:
        if asked.HasField("detach_ttl_ms"):
            limit = "unset unless on_disconnect is ON_DISCONNECT_DETACH"
            raise InvalidArgument("stream.detach_ttl_ms", limit, asked.detach_ttl_ms)
        return None
    at_most("stream.detach_ttl_ms", asked.detach_ttl_ms, MAX_DETACH_TTL_MS, "ms")
    return asked.detach_ttl_ms if asked.HasField("detach_ttl_ms") else MAX_DETACH_TTL_MS


def _with_id(request: pb.GenerateRequest, id: str) -> pb.GenerateRequest:
    if request.request_id:
        return request
    payload = pb.GenerateRequest()
    payload.CopyFrom(request)
    payload.request_id = id
    return payload


# ---------------------------------------------------------------------------------------------- its parts


async def _shown_prompt(
    request: pb.GenerateRequest, prompt: Sequence[int], model: ServedModel, wanted: OutputOptions, deadline: Deadline
) -> str:
    """The prompt's text: as it was sent, or what its tokens say."""
    if request.HasField("prompt"):
        return request.prompt
    return await model.decode(prompt, skip_special_tokens=wanted.skip_special_tokens, deadline=deadline)


def _wanted(request: pb.GenerateRequest) -> OutputOptions:
    asked, stopping = request.response, request.stopping
    if asked.HasField("logprobs"):
        at_most("response.logprobs", asked.logprobs, MAX_LOGPROBS, "alternatives")
    if asked.HasField("prompt_logprobs"):
        at_most("response.prompt_logprobs", asked.prompt_logprobs, MAX_LOGPROBS, "alternatives")
    text = asked.text if asked.HasField("text") else True
    if asked.echo and not text:
        raise InvalidArgument("response.echo", "false where response.text is", True)
    return OutputOptions(
        text=text,
        token_ids=asked.token_ids,
        logprobs=asked.logprobs if asked.HasField("logprobs") else None,
        prompt_logprobs=asked.prompt_logprobs if asked.HasField("prompt_logprobs") else None,
        skip_special_tokens=asked.skip_special_tokens if asked.HasField("skip_special_tokens") else True,
        stops=_stop_texts(stopping.stop),
        include_stop=stopping.include_stop_in_output,
        min_chunk_tokens=max(1, request.stream.min_chunk_tokens),
    )


def _stop_texts(texts: Sequence[str]) -> StopStrings | None:
    at_most("stopping.stop", len(texts), MAX_STOP_TEXTS, "texts")
    for place, text in enumerate(texts):
        if not text:
            raise InvalidArgument(f"stopping.stop[{place}]", "at least 1 character", 0)
        at_most(f"stopping.stop[{place}]", len(text.encode()), MAX_STOP_TEXT_BYTES, "bytes")
    return StopStrings(texts) if texts else None


def _sampling(asked: pb.SamplingParams, model: ServedModel) -> wire.Sampling:
    check_sampling(asked)
    if asked.HasField("n") and asked.n < 1:
        raise InvalidArgument("sampling.n", "from 1", asked.n)
    _check_bias(asked.logit_bias, model)
    # What is set stands over the model's own; the map is the request's alone.
    chosen = pb.SamplingParams()
    chosen.CopyFrom(model.default_sampling)
    chosen.MergeFrom(asked)
    return wire.Sampling(
        temperature=chosen.temperature,
        top_p=chosen.top_p,
        top_k=chosen.top_k,
        min_p=chosen.min_p,
        frequency_penalty=chosen.frequency_penalty,
        presence_penalty=chosen.presence_penalty,
        repetition_penalty=chosen.repetition_penalty,
        seed=asked.seed if asked.HasField("seed") else secrets.randbits(64),
        logit_bias=asked.logit_bias,
    )


def _check_bias(bias: Mapping[int, float], model: ServedModel) -> None:
    at_most("sampling.logit_bias", len(bias), MAX_LOGIT_BIAS_ENTRIES, "entries")
    check_vocabulary("sampling.logit_bias", bias, model)
    for id, value in bias.items():
        within(f"sampling.logit_bias[{id}]", value, -100.0, 100.0)


def _stopping(asked: pb.StoppingParams, model: ServedModel, room: int) -> wire.Stopping:
    """`room`: output tokens for which the window has room."""
    if asked.HasField("max_tokens") and asked.max_tokens < 1:
        raise InvalidArgument("stopping.max_tokens", "from 1", asked.max_tokens)
    cut = not asked.HasField("max_tokens") or asked.max_tokens > room
    max_tokens = room if cut else asked.max_tokens
    if asked.min_tokens > max_tokens:
        limit = f"at most {max_tokens}, {'what the window leaves' if cut else 'as max_tokens'}"
        raise InvalidArgument("stopping.min_tokens", limit, asked.min_tokens)
    at_most("stopping.stop_token_ids", len(asked.stop_token_ids), MAX_STOP_TOKEN_IDS, "ids")
    check_vocabulary("stopping.stop_token_ids", asked.stop_token_ids, model)
    return wire.Stopping(
        max_tokens=max_tokens,
        cut_to_window=cut,
        min_tokens=asked.min_tokens,
        stop_token_ids=sorted(set(asked.stop_token_ids)),
        ignore_eos=asked.ignore_eos,
    )
