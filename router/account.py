"""What a request has cost, and when: for its client, for the metrics, for the log.

All times are read from the event loop's clock of this router; what a worker measured arrives as a duration.
"""

from __future__ import annotations

import asyncio

from protos import inference_pb2 as pb
from router.request import Course
from runtime import logs
from runtime.fault import part
from runtime.metrics import ModelMetrics, PromptSource

_log = logs.get(__name__)


class Account:
    """One request's, from its first token to its end as its client sees it."""

    __slots__ = ("_course", "_first_at", "_last_at", "_metrics", "_now", "_second_at")

    def __init__(self, course: Course, metrics: ModelMetrics) -> None:
        self._course = course
        self._metrics = metrics
        self._now = asyncio.get_running_loop().time
        self._first_at: float | None = None
        self._second_at: float | None = None
        self._last_at: float | None = None

    def sent(self, tokens: int) -> None:
        """So many more tokens are on their way to the client, together. The gap before them is observed once, as
        what it is for each of them."""
        now = self._now()
        if self._last_at is None:
            self._first_at = now
            self._metrics.ttft.observe(now - self._course.request.accepted_at)
            if tokens > 1:
                self._second_at = now
        else:
            self._second_at = self._second_at or now
            self._metrics.inter_token.observe((now - self._last_at) / tokens)
        self._last_at = now

    def usage(self) -> pb.Usage:
        prompt, written = self._course.request.prompt_tokens, len(self._course.tokens)
        return pb.Usage(
            prompt_tokens=prompt,
            completion_tokens=written,
            total_tokens=prompt + written,
            cached_prompt_tokens=self._course.cached_tokens,
        )

    def receipt(self) -> pb.Receipt:
        """As of now."""
        path, accepted_at = self._course.path, self._course.request.accepted_at
        return pb.Receipt(
            queue_ms=_ms(self._queue_s()),
            prefill_ms=_ms(path.prefill_s),
            handoff_ms=_ms(path.handoff_s),
            decode_wait_ms=_ms(path.decode_wait_s),
            decode_ms=_ms(self._decode_s()),
            ttft_ms=_ms(_between(accepted_at, self._first_at)),
            second_token_ms=_ms(_between(self._first_at, self._second_at)),
            e2e_ms=(self._now() - accepted_at) * 1000,
            handoff_bytes=path.handoff_bytes,
            prefill_worker=path.prefill_worker,
            decode_worker=path.decode_worker,
            attempts=path.attempts,
        )

    def close(self, outcome: str) -> None:
        """The client has its end, or has left: counted, and logged in one line."""
        self._count()
        course = self._course
        receipt = self.receipt()
        times = {field.name: round(value, 3) for field, value in receipt.ListFields() if field.name.endswith("_ms")}
        _log.info(
            "request ended",
            request_id=part(course.request.key.id),
            model=course.request.work.model,
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
        metrics.e2e.observe(self._now() - course.request.accepted_at)
        for histogram, seconds in (
            (metrics.queue, self._queue_s()),
            (metrics.prefill, course.path.prefill_s),
            (metrics.decode, self._decode_s()),
        ):
            if seconds is not None:
                histogram.observe(seconds)
        metrics.generated.inc(len(course.tokens))
        if course.tokens:
            metrics.prompt[PromptSource.CACHED].inc(course.cached_tokens)
            metrics.prompt[PromptSource.COMPUTED].inc(max(0, course.request.prompt_tokens - course.cached_tokens))

    def _queue_s(self) -> float | None:
        path = self._course.path
        return _between(self._course.request.accepted_at, path.taken_up_at) if path.queue_s is None else path.queue_s

    def _decode_s(self) -> float | None:
        return _between(self._course.path.decode_began_at, self._course.last_token_at)


def _between(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else max(0.0, end - begin)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000
