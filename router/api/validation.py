"""Validation of a GenerateRequest. Unsupported and unknown fields are refused, never ignored."""

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

from decant.engine.request import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_PRIORITY
from decant.protos import inference_pb2 as pb
from decant.protos import worker_pb2 as wire
from decant.router.api.guides import guide_of
from decant.router.api.reasoning import reasoning_after, reasoning_limit
from decant.router.limits import (
    MAX_DETACH_TTL_MS,
    MAX_LOGIT_BIAS_ENTRIES,
    MAX_OUTPUTS,
    MAX_STOP_STRING_BYTES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    check_count,
    check_id,
    check_range,
    check_sampling,
    check_size,
)
from decant.router.request.valid_request import ValidRequest
from decant.router.text.answer import new_answer
from decant.router.text.detokenizing.token_table import PromptEnd
from decant.router.text.output_text import OutputOptions
from decant.router.text.prompt import ContextLengthOf, check_vocabulary, context_length_of, prompt_of
from decant.router.text.served_model import Models, ServedModel
from decant.router.text.stop_strings import StopStrings
from decant.router.text.tools.call_options import with_calls
from decant.runtime.connections.channel import Deadline
from decant.runtime.error_details import Reason
from decant.runtime.errors import RETRY_AFTER_SECONDS, InvalidArgument, Unavailable, Unimplemented
from decant.runtime.packed import pack
from decant.state.ids import RequestKey
from decant.state.owned import num_generated, returns_best

LISTED_BYTES = 16 * 1024
"""Up to this size unknown fields are listed, in about ten milliseconds."""

_UNSUPPORTED: Mapping[str, Callable[[pb.GenerateRequest], Any]] = {}
"""Fields of the API that are refused, by \"Message.field\": none now."""

UNIMPLEMENTED_FIELDS = tuple(_UNSUPPORTED)


async def validate(
    request: pb.GenerateRequest,
    models: Models,
    max_context_length: ContextLengthOf,
    deadline: Deadline,
    tenant: str,
    unix_time: float | None = None,
) -> ValidRequest:
    """Validate and tokenize a request; ``unix_time`` is when it was accepted, None: now.

    Raises InvalidArgument, Unimplemented, NotFound, PermissionDenied; Unavailable if no worker gives the context
    length; QueueFull or DeadlineExceeded where a text waits for a thread. The caller sets the adapter's digest.
    """
    accepted_at = asyncio.get_running_loop().time()
    check_size(request)
    _check_supported(request)
    _check_form(request)
    model = models.find(request.model)
    options = _output_options(request)
    _check_hidden_stops(options, model)
    sampling = _sampling(request.sampling, model)
    context_length = context_length_of(model, max_context_length)
    if context_length is None:
        raise Unavailable(Reason.NO_WORKER, "no worker serves this model", retry_after=RETRY_AFTER_SECONDS)
    prompt = await prompt_of(request, model, context_length, deadline, unix_time)
    options = await _behind_prompt(options, request, prompt, model, deadline)
    stopping = _stopping(request.stopping, model, context_length - len(prompt))
    reasoning = reasoning_after(request, prompt, model)
    guide = await guide_of(request, reasoning, model, deadline)
    id = request.request_id or str(uuid.uuid4())
    options = with_calls(replace(options, reasoning=reasoning), request, model, id)
    engine_request = wire.EngineRequest(
        model=model.id,
        prompt=pack(prompt),
        outputs=[wire.OutputPrefix(output=index) for index in range(num_generated(request))],
        sampling=sampling,
        stopping=stopping,
        logprobs=0 if options.logprobs is None and returns_best(request) else options.logprobs,
        prompt_logprobs=options.prompt_logprobs,
        priority=request.priority,
        salt=salt_of(tenant, request.cache.cache_salt),
        bypass_prefix_cache=request.cache.bypass_prefix_cache,
        guide=guide,
        reasoning=reasoning_limit(request.stopping, reasoning, model),
    )
    return ValidRequest(
        key=RequestKey(tenant, id),
        payload=_with_id(request, id),
        engine_request=engine_request,
        prompt_tokens=len(prompt),
        output_options=options,
        deadline=deadline,
        id_generated=not request.request_id,
        accepted_at=accepted_at,
        detach_ms=_detach_ms(request.stream),
        eos_token_ids=frozenset() if stopping.ignore_eos else model.eos_token_ids,
        session=f"{tenant}/{request.cache.session_id}" if request.cache.session_id else "",
        vocab_size=model.vocab_size,
        new_answer=partial(new_answer, model, options.without_calls(), stopping) if options.stops else None,
    )


def salt_of(tenant: str, cache_salt: str) -> bytes:
    """Salt that confines shared blocks to a tenant and ``cache_salt``."""
    name = tenant.encode()
    return hashlib.blake2b(struct.pack("<I", len(name)) + name + cache_salt.encode(), digest_size=16).digest()


# Request


def _check_supported(request: pb.GenerateRequest) -> None:
    check_known(request)
    for field, value_in in _UNSUPPORTED.items():
        if value := value_in(request):
            raise Unimplemented(field, "a value" if value is True else value)


def check_known(message: Message) -> None:
    """Refuse unknown fields with Unimplemented: ignoring one may change the answer.

    In a large message their bytes are counted: listing millions of fields would block the event loop for seconds.
    """
    size = message.ByteSize()
    if size > LISTED_BYTES:
        _check_small_parts(message)
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


def _check_small_parts(message: Message) -> None:
    for field, value in message.ListFields():
        if field.message_type is not None and not field.is_repeated and value.ByteSize() <= LISTED_BYTES:
            check_known(value)


def _check_form(request: pb.GenerateRequest) -> None:
    check_id(request.request_id)
    check_range("priority", request.priority, -MAX_PRIORITY, MAX_PRIORITY)
    if request.stream.on_disconnect not in pb.StreamOptions.OnDisconnect.values():
        raise InvalidArgument("stream.on_disconnect", "a value of its enum", request.stream.on_disconnect)


def _detach_ms(options: pb.StreamOptions) -> int | None:
    if options.on_disconnect != pb.StreamOptions.ON_DISCONNECT_DETACH:
        if options.HasField("detach_ttl_ms"):
            limit = "unset unless on_disconnect is ON_DISCONNECT_DETACH"
            raise InvalidArgument("stream.detach_ttl_ms", limit, options.detach_ttl_ms)
        return None
    check_count("stream.detach_ttl_ms", options.detach_ttl_ms, MAX_DETACH_TTL_MS, "ms")
    return options.detach_ttl_ms if options.HasField("detach_ttl_ms") else MAX_DETACH_TTL_MS


def _with_id(request: pb.GenerateRequest, id: str) -> pb.GenerateRequest:
    if request.request_id:
        return request
    payload = pb.GenerateRequest()
    payload.CopyFrom(request)
    payload.request_id = id
    return payload


# Fields


async def _behind_prompt(
    options: OutputOptions, request: pb.GenerateRequest, prompt: Sequence[int], model: ServedModel, deadline: Deadline
) -> OutputOptions:
    """Options of outputs whose text follows that of the prompt; an answer to messages begins a text of its own."""
    is_answer = request.HasField("messages") and not request.messages.continue_final_message
    if is_answer and not request.response.echo:
        return options
    end = model.token_table.prompt_end(prompt, skip_special_tokens=options.skip_special_tokens)
    echo = await _echo(request, prompt, model, end, deadline) if request.response.echo else ""
    return replace(options, after=end, echo=echo)


async def _echo(
    request: pb.GenerateRequest, prompt: Sequence[int], model: ServedModel, end: PromptEnd, deadline: Deadline
) -> str:
    if request.HasField("prompt"):
        return request.prompt
    skip = _skips_special_tokens(request.response)
    return await model.text_before(prompt, end, skip_special_tokens=skip, deadline=deadline)


def _skips_special_tokens(response: pb.ResponseOptions) -> bool:
    return response.skip_special_tokens if response.HasField("skip_special_tokens") else True


def _output_options(request: pb.GenerateRequest) -> OutputOptions:
    response, stopping = request.response, request.stopping
    if response.HasField("logprobs"):
        check_count("response.logprobs", response.logprobs, MAX_LOGPROBS, "alternatives")
    if response.HasField("prompt_logprobs"):
        check_count("response.prompt_logprobs", response.prompt_logprobs, MAX_LOGPROBS, "alternatives")
    text = response.text if response.HasField("text") else True
    if response.echo and not text:
        raise InvalidArgument("response.echo", "false where response.text is", True)
    return OutputOptions(
        text=text,
        token_ids=response.token_ids,
        logprobs=response.logprobs if response.HasField("logprobs") else None,
        prompt_logprobs=response.prompt_logprobs if response.HasField("prompt_logprobs") else None,
        skip_special_tokens=_skips_special_tokens(response),
        stops=_stop_strings(stopping.stop),
        include_stop=stopping.include_stop_in_output,
        min_chunk_tokens=max(1, request.stream.min_chunk_tokens),
    )


def _stop_strings(texts: Sequence[str]) -> StopStrings | None:
    check_count("stopping.stop", len(texts), MAX_STOP_STRINGS, "strings")
    for place, text in enumerate(texts):
        if not text:
            raise InvalidArgument(f"stopping.stop[{place}]", "at least 1 character", 0)
        check_count(f"stopping.stop[{place}]", len(text.encode()), MAX_STOP_STRING_BYTES, "bytes")
    return StopStrings(texts) if texts else None


def _check_hidden_stops(options: OutputOptions, model: ServedModel) -> None:
    """Refuse stop strings with a special token beside other text, which the text never has while those are skipped."""
    stops = options.stops.texts if options.stops is not None and options.skip_special_tokens else ()
    for place, stop in enumerate(stops):
        token = model.token_table.find_special(stop)
        if token is not None and stop not in model.token_table.special_tokens:
            limit = f"{token} alone or no special token, or response.skip_special_tokens false"
            raise InvalidArgument(f"stopping.stop[{place}]", limit, stop)


def _sampling(params: pb.SamplingParams, model: ServedModel) -> wire.Sampling:
    check_sampling(params)
    if params.HasField("n") and not 1 <= params.n <= MAX_OUTPUTS:
        raise InvalidArgument("sampling.n", f"1 to {MAX_OUTPUTS}", params.n)
    returned = max(1, params.n)
    if params.HasField("best_of") and not returned <= params.best_of <= MAX_OUTPUTS:
        raise InvalidArgument("sampling.best_of", f"from n, {returned}, to {MAX_OUTPUTS}", params.best_of)
    _check_bias(params.logit_bias, model)
    # The request overrides the model's defaults, but for the bias, which has none.
    sampling = pb.SamplingParams()
    sampling.CopyFrom(model.default_sampling)
    sampling.MergeFrom(params)
    return wire.Sampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        repetition_penalty=sampling.repetition_penalty,
        seed=params.seed if params.HasField("seed") else secrets.randbits(64),
        logit_bias=params.logit_bias,
    )


def _check_bias(bias: Mapping[int, float], model: ServedModel) -> None:
    check_count("sampling.logit_bias", len(bias), MAX_LOGIT_BIAS_ENTRIES, "entries")
    check_vocabulary("sampling.logit_bias", bias, model)
    for id, value in bias.items():
        check_range(f"sampling.logit_bias[{id}]", value, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)


def _stopping(params: pb.StoppingParams, model: ServedModel, max_output_tokens: int) -> wire.Stopping:
    if params.HasField("max_tokens") and params.max_tokens < 1:
        raise InvalidArgument("stopping.max_tokens", "from 1", params.max_tokens)
    is_capped = not params.HasField("max_tokens") or params.max_tokens > max_output_tokens
    max_tokens = max_output_tokens if is_capped else params.max_tokens
    if params.min_tokens > max_tokens:
        limit = f"at most {max_tokens}, {'what the context length leaves' if is_capped else 'as max_tokens'}"
        raise InvalidArgument("stopping.min_tokens", limit, params.min_tokens)
    check_count("stopping.stop_token_ids", len(params.stop_token_ids), MAX_STOP_TOKEN_IDS, "ids")
    check_vocabulary("stopping.stop_token_ids", params.stop_token_ids, model)
    return wire.Stopping(
        max_tokens=max_tokens,
        capped_by_context_length=is_capped,
        min_tokens=params.min_tokens,
        stop_token_ids=sorted(set(params.stop_token_ids)),
        ignore_eos=params.ignore_eos,
    )
