from __future__ import annotations

import asyncio

from decant.protos import inference_pb2 as pb
from decant.router.request.token_stream import RecordedStream, TokenStream
from decant.router.request.usage import decode_s, queue_s, receipt_of, usage_of
from decant.runtime.error_details import shorten
from decant.runtime.telemetry import logs
from decant.runtime.telemetry.metrics import ModelMetrics, PromptSource

_log = logs.get(__name__)


class RequestMeter:
    """Metrics and receipt of a stream; with several readers in turn, each token is counted once."""

    __slots__ = ("_last_at", "_metrics", "_now", "_stream")

    def __init__(self, stream: TokenStream, metrics: ModelMetrics) -> None:
        self._stream = stream
        self._metrics = metrics
        self._now = asyncio.get_running_loop().time
        self._last_at: float | None = None

    def record_sent(self, tokens: int) -> None:
        now, delivery = self._now(), self._stream.delivery
        if delivery.first_at is None:
            delivery.first_at = now
            self._metrics.ttft.observe(now - self._stream.request.accepted_at)
            if tokens > 1:
                delivery.second_at = now
        else:
            if delivery.second_at is None:
                delivery.second_at = now
            if self._last_at is not None:  # a gap without a reader is not counted
                self._metrics.inter_token.observe((now - self._last_at) / tokens)
        self._last_at = now

    def usage(self) -> pb.Usage:
        return usage_of(self._stream)

    def receipt(self) -> pb.Receipt:
        return receipt_of(self._stream, self._now())

    def close(self, outcome: str) -> None:
        self._count(outcome)
        stream = self._stream
        receipt = self.receipt()
        times = {field.name: value for field, value in receipt.ListFields() if field.name.endswith("_ms")}
        _log.info(
            "request ended",
            request_id=shorten(stream.request.key.id),
            tenant=shorten(stream.request.key.tenant),
            model=stream.request.engine_request.model,
            adapter=stream.request.payload.lora_name or None,
            user=shorten(stream.request.payload.user) if stream.request.payload.user else None,
            outcome=outcome,
            attempts=stream.trace.attempts,
            prompt_tokens=stream.request.prompt_tokens,
            cached_tokens=stream.cached_tokens,
            completion_tokens=stream.num_tokens,
            prefill_worker=stream.trace.prefill_worker,
            decode_worker=stream.trace.decode_worker,
            **times,
        )

    def _count(self, outcome: str) -> None:
        stream, metrics = self._stream, self._metrics
        tenant, adapter = stream.request.key.tenant, stream.request.payload.lora_name
        num_tokens = stream.num_tokens
        before, stream.delivery.counted = stream.delivery.counted, num_tokens
        metrics.generated.inc(num_tokens - (before or 0))
        metrics.tenants.count_tokens(tenant, num_tokens - (before or 0))
        metrics.adapters.count_tokens(adapter, num_tokens - (before or 0))
        if num_tokens and not before:
            metrics.prompt[PromptSource.CACHED].inc(stream.cached_tokens)
            metrics.prompt[PromptSource.COMPUTED].inc(max(0, stream.request.prompt_tokens - stream.cached_tokens))
        if before is not None:
            return
        metrics.count_request(outcome.removeprefix("FINISH_REASON_").lower())
        metrics.tenants.count_request(tenant, stream.request.prompt_tokens)
        metrics.adapters.count_request(adapter, stream.request.prompt_tokens)
        metrics.e2e.observe(self._now() - stream.request.accepted_at)
        for histogram, seconds in (
            (metrics.queue, queue_s(stream)),
            (metrics.prefill, stream.trace.prefill_s),
            (metrics.handoff, stream.trace.handoff_s),
            (metrics.decode, decode_s(stream)),
        ):
            if seconds is not None:
                histogram.observe(seconds)


class RecordedMeter(RequestMeter):
    """Usage and receipt as the store has them; a replay counts in no metric."""

    __slots__ = ("_record",)

    def __init__(self, stream: RecordedStream) -> None:
        self._record = stream.record

    def record_sent(self, tokens: int) -> None:
        pass

    def usage(self) -> pb.Usage:
        return self._record.usage

    def receipt(self) -> pb.Receipt:
        return self._record.receipt

    def close(self, outcome: str) -> None:
        pass


def meter_of(stream: TokenStream, metrics: ModelMetrics) -> RequestMeter:
    return RecordedMeter(stream) if isinstance(stream, RecordedStream) else RequestMeter(stream, metrics)
