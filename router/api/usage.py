"""What a request has cost, and when: for its client, for the metrics, for the log.

All times are read from the event loop's clock of this router; what a worker measured arrives as a duration.
"""

from __future__ import annotations

import asyncio

from decant.protos import inference_pb2 as pb
from decant.router.execution.token_stream import TokenStream
from decant.router.execution.usage import decode_s, queue_s, receipt_of, usage_of
from decant.runtime import logs
from decant.runtime.error_details import part
from decant.runtime.metrics import ModelMetrics, PromptSource

_log = logs.get(__name__)


class RequestMeter:
    """One reader's of a request. What several saw in turn is counted once: the first that was sent, and each token."""

    __slots__ = ("_course", "_last_at", "_metrics", "_now")

    def __init__(self, course: TokenStream, metrics: ModelMetrics) -> None:
        self._course = course
        self._metrics = metrics
        self._now = asyncio.get_running_loop().time
        self._last_at: float | None = None

    def sent(self, tokens: int) -> None:
        """So many more tokens are on their way to the client, together. The gap before them is observed once, as
        what it is for each of them."""
        now, course = self._now(), self._course
        if course.first_sent_at is None:
            course.first_sent_at = now
            self._metrics.ttft.observe(now - course.request.accepted_at)
            if tokens > 1:
                course.second_sent_at = now
        else:
            if course.second_sent_at is None:
                course.second_sent_at = now
            if self._last_at is not None:  # the gap in which nobody read is nobody's
                self._metrics.inter_token.observe((now - self._last_at) / tokens)
        self._last_at = now

    def usage(self) -> pb.Usage:
        return usage_of(self._course)

    def receipt(self) -> pb.Receipt:
        return receipt_of(self._course, self._now())

    def close(self, outcome: str) -> None:
        """The client has its end, or has left: counted, and logged in one line."""
        self._count()
        course = self._course
        receipt = self.receipt()
        times = {field.name: value for field, value in receipt.ListFields() if field.name.endswith("_ms")}
        _log.info(
            "request ended",
            request_id=part(course.request.key.id),
            tenant=part(course.request.key.tenant),
            model=course.request.engine_request.model,
            user=part(course.request.payload.user) if course.request.payload.user else None,
            outcome=outcome,
            attempts=course.path.attempts,
            prompt_tokens=course.request.prompt_tokens,
            cached_tokens=course.cached_tokens,
            completion_tokens=len(course.tokens),
            prefill_worker=course.path.prefill_worker,
            decode_worker=course.path.decode_worker,
            **times,
        )

    def _count(self) -> None:
        course, metrics = self._course, self._metrics
        written = len(course.tokens)
        before, course.counted = course.counted, written
        metrics.generated.inc(written - (before or 0))
        if written and not before:
            metrics.prompt[PromptSource.CACHED].inc(course.cached_tokens)
            metrics.prompt[PromptSource.COMPUTED].inc(max(0, course.request.prompt_tokens - course.cached_tokens))
        if before is not None:
            return
        metrics.e2e.observe(self._now() - course.request.accepted_at)
        for histogram, seconds in (
            (metrics.queue, queue_s(course)),
            (metrics.prefill, course.path.prefill_s),
            (metrics.decode, decode_s(course)),
        ):
            if seconds is not None:
                histogram.observe(seconds)


class RecordedMeter(RequestMeter):
    """Of a request that is over, or only looked at: nothing is counted, and what was told once is told again."""

    __slots__ = ()

    def __init__(self, course: TokenStream) -> None:
        self._course = course
        self._now = asyncio.get_running_loop().time

    def sent(self, tokens: int) -> None:
        pass

    def usage(self) -> pb.Usage:
        recorded = self._course.recorded
        return super().usage() if recorded is None else recorded.usage

    def receipt(self) -> pb.Receipt:
        recorded = self._course.recorded
        return super().receipt() if recorded is None else recorded.receipt

    def close(self, outcome: str) -> None:
        pass


def account_of(course: TokenStream, metrics: ModelMetrics) -> RequestMeter:
    """For whoever reads it now."""
    return RequestMeter(course, metrics) if course.recorded is None else RecordedMeter(course)
