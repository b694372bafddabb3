"""Usage and receipt of a request: times are of this router's event loop; workers report durations."""

from __future__ import annotations

from decant.engine.reasoning import ReasoningCount
from decant.protos import inference_pb2 as pb
from decant.router.request.token_stream import TokenStream


def usage_of(stream: TokenStream) -> pb.Usage:
    prompt, num_tokens = stream.request.prompt_tokens, stream.num_tokens
    return pb.Usage(
        prompt_tokens=prompt,
        completion_tokens=num_tokens,
        total_tokens=prompt + num_tokens,
        cached_prompt_tokens=stream.cached_tokens,
        reasoning_tokens=_reasoning_tokens(stream),
    )


def _reasoning_tokens(stream: TokenStream) -> int | None:
    reasoning = stream.request.output_options.reasoning
    if reasoning is None:
        return None
    return sum(ReasoningCount(reasoning.markers).add(output.tokens).count for output in stream.outputs)


def receipt_of(stream: TokenStream, now: float) -> pb.Receipt:
    trace, delivery, accepted_at = stream.trace, stream.delivery, stream.request.accepted_at
    return pb.Receipt(
        queue_ms=_ms(queue_s(stream)),
        prefill_ms=_ms(trace.prefill_s),
        handoff_ms=_ms(trace.handoff_s),
        decode_wait_ms=_ms(trace.decode_wait_s),
        decode_ms=_ms(decode_s(stream)),
        ttft_ms=_ms(_between(accepted_at, delivery.first_at)),
        second_token_ms=_ms(_between(delivery.first_at, delivery.second_at)),
        e2e_ms=_ms(now - accepted_at),
        handoff_bytes=trace.handoff_bytes,
        prefill_worker=trace.prefill_worker,
        decode_worker=trace.decode_worker,
        attempts=trace.attempts,
    )


def queue_s(stream: TokenStream) -> float | None:
    trace = stream.trace
    return _between(stream.request.accepted_at, trace.scheduled_at) if trace.queue_s is None else trace.queue_s


def decode_s(stream: TokenStream) -> float | None:
    return _between(stream.trace.decode_began_at, stream.last_token_at)


def _between(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else max(0.0, end - begin)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
