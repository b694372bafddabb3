"""Limits of requests that the engine does not have, and checks of all, which raise InvalidArgument."""

from __future__ import annotations

import math

from decant.engine.request import MAX_LOGPROBS, MAX_TOP_K, SAMPLING_ABOVE_ZERO, SAMPLING_RANGES
from decant.protos import inference_pb2 as pb
from decant.runtime.errors import InvalidArgument

MAX_REQUEST_BYTES = 16 * 1024 * 1024
MAX_REQUEST_ID_BYTES = 128
MAX_MESSAGES = 4096
MAX_OUTPUTS = 128
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_BYTES = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS_ENTRIES = 1024
MAX_DETACH_TTL_MS = 3_600_000
MAX_CONTINUATIONS = 256
MAX_EMBED_INPUTS = 1024


def check_sampling(params: pb.SamplingParams) -> None:
    for name, (low, high) in SAMPLING_RANGES.items():
        check_range(f"sampling.{name}", getattr(params, name), low, high)
    check_range("sampling.top_k", params.top_k, 0, MAX_TOP_K)
    for name, high in SAMPLING_ABOVE_ZERO.items():
        value = getattr(params, name)
        if params.HasField(name) and not 0.0 < value <= high:
            raise InvalidArgument(f"sampling.{name}", f"above 0, to {high:g}", value)


_Sized = pb.GenerateRequest | pb.TokenizeRequest | pb.DetokenizeRequest | pb.ScoreRequest | pb.EmbedRequest


def check_size(request: _Sized) -> None:
    """Check the sizes of a message; call it before other checks, which are slow on large messages."""
    check_count(request.DESCRIPTOR.name, request.ByteSize(), MAX_REQUEST_BYTES, "bytes")
    if isinstance(request, pb.GenerateRequest | pb.TokenizeRequest):
        check_count("messages.messages", len(request.messages.messages), MAX_MESSAGES, "messages")


def check_id(request_id: str) -> None:
    check_count("request_id", len(request_id.encode()), MAX_REQUEST_ID_BYTES, "bytes")


def check_range(field: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise InvalidArgument(field, f"{low:.10g} to {high:.10g}", value)


def check_count(field: str, count: int, limit: int, what: str) -> None:
    if count > limit:
        raise InvalidArgument(field, f"at most {limit} {what}", count)


def limits(*, max_queued_requests: int, resume_grace_ms: int, result_ttl_ms: int) -> pb.Limits:
    return pb.Limits(
        max_request_bytes=MAX_REQUEST_BYTES,
        max_request_id_bytes=MAX_REQUEST_ID_BYTES,
        max_outputs=MAX_OUTPUTS,
        max_logprobs=MAX_LOGPROBS,
        max_stop_strings=MAX_STOP_STRINGS,
        max_stop_string_bytes=MAX_STOP_STRING_BYTES,
        max_stop_token_ids=MAX_STOP_TOKEN_IDS,
        max_logit_bias_entries=MAX_LOGIT_BIAS_ENTRIES,
        max_detach_ttl_ms=MAX_DETACH_TTL_MS,
        resume_grace_ms=resume_grace_ms,
        result_ttl_ms=result_ttl_ms,
        max_queued_requests=max_queued_requests,
        max_messages=MAX_MESSAGES,
        max_continuations=MAX_CONTINUATIONS,
        max_embed_inputs=MAX_EMBED_INPUTS,
    )
