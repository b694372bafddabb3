from __future__ import annotations

import asyncio
from datetime import UTC, datetime

from decant.protos import worker_pb2 as wire
from decant.protos.inference_pb2 import Generation
from decant.router.attempt.context import AttemptContext
from decant.router.request.attempt_trace import AttemptTrace
from decant.router.workers.pool import WorkerPool
from decant.router.workers.worker_handle import WorkerHandle
from decant.state.ids import State

_SPLIT = (Generation.STATE_PREFILLING, Generation.STATE_HANDING_OFF, Generation.STATE_DECODING)
_LOCAL = (Generation.STATE_DECODING,)


class AttemptRecorder:
    def __init__(self, context: AttemptContext, pool: WorkerPool) -> None:
        self.is_split = False
        stream, attempt = context.stream, context.owned.attempt
        self._context = context
        self._now = asyncio.get_running_loop().time
        self._costs = pool.costs[context.model]
        self._tokens = context.num_tokens  # as the attempt began
        self._is_first_output = not stream.num_tokens
        self._began_at = stream.request.accepted_at if attempt == 1 else self._now()
        self._first_token_at: float | None = None
        self._trace = stream.trace = AttemptTrace(attempts=attempt)

    def assign_prefill(self, worker: WorkerHandle | None) -> None:
        self._trace.prefill = None if worker is None else worker.registration

    def assign_decode(self, worker: WorkerHandle | None) -> None:
        self._trace.decode = None if worker is None else worker.registration

    def advance(self, state: State) -> None:
        owned = self._context.owned
        for stage in _SPLIT if self.is_split else _LOCAL:
            if owned.state < stage <= state:
                owned.transition(stage, datetime.now(UTC))
                self._context.record_attempt()

    # A prefill worker's reports

    def on_prefill_scheduled(self) -> None:
        if self._first_token_at is None:  # else the first token brought the time
            self._set_scheduled(self._now())
        self.advance(Generation.STATE_PREFILLING)

    def on_first_tokens(self, message: wire.FirstTokens, called_at: float) -> None:
        self._first_token_at = self._now()
        self._trace.prefill_s = message.prefill_us / 1e6
        self._add_prefill_cost(self._trace.prefill_s, message.cached_tokens, on_decode_worker=False)
        self._context.stream.cached_tokens = message.cached_tokens
        self._set_scheduled(called_at + message.queued_us / 1e6)
        self.advance(Generation.STATE_PREFILLING)

    def on_finished_at_first_token(self) -> None:
        self._trace.decode = None

    # A decode worker's reports; None: the report was lost

    def on_decode_scheduled(self, message: wire.Scheduled | None, started_at: float, *, has_ticket: bool) -> None:
        if has_ticket:
            self.advance(Generation.STATE_HANDING_OFF)
            return
        self._set_scheduled(started_at + (0.0 if message is None else message.waited_us / 1e6))
        self.advance(Generation.STATE_DECODING)
        if message is not None and self._is_first_output:
            self._context.stream.cached_tokens = message.cached_tokens

    def on_decode_started(self, message: wire.DecodeStarted | None, scheduled: wire.Scheduled | None) -> None:
        self.advance(Generation.STATE_DECODING)
        trace = self._trace
        trace.decode_began_at = self._now()
        if message is None:
            return
        cached_tokens = 0 if scheduled is None else scheduled.cached_tokens
        if message.WhichOneof("path") == "handoff":
            handoff = message.handoff
            trace.handoff_s = handoff.handoff_us / 1e6
            trace.handoff_bytes = handoff.bytes
            trace.decode_wait_s = handoff.decode_wait_us / 1e6
            self._add_transfer_cost(trace.handoff_s + trace.decode_wait_s, cached_tokens)
        else:
            trace.prefill_s = message.from_tokens.prefill_us / 1e6
            self._add_prefill_cost(trace.prefill_s, cached_tokens, on_decode_worker=True)

    def _add_prefill_cost(self, seconds: float, cached_tokens: int, *, on_decode_worker: bool) -> None:
        """Count at most the time since the attempt began: forecasts and placement depend on it."""
        elapsed = max(0.0, self._now() - self._began_at)
        self._costs.add_prefill(self._tokens - cached_tokens, min(seconds, elapsed), on_decode_worker=on_decode_worker)

    def _add_transfer_cost(self, seconds: float, cached_tokens: int) -> None:
        """Count at most the time since the first token: what ended before it did not pause the output."""
        paused = 0.0 if self._first_token_at is None else self._now() - self._first_token_at
        self._costs.add_transfer(self._tokens - cached_tokens, min(seconds, paused))

    def _set_scheduled(self, at: float) -> None:
        self._trace.scheduled_at = at
        self._trace.queue_s = max(0.0, at - self._began_at)
