"""One request from its admission to its end.

QUEUED --accepted by the store--> RECORDED --> RUNNING (attempts) --> ENDED --written--> PERSISTED
   '----- cancelled, deadline, superseded, draining, a bug: at any time -----^
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from enum import IntEnum

from decant.protos import worker_pb2 as wire
from decant.protos.inference_pb2 import Generation, Waiting
from decant.router.admission.model_admission import AcceptedRequest, StartedRequest
from decant.router.attempt.attempt import Attempt
from decant.router.attempt.context import adopted_context, new_context
from decant.router.attempt.failures import AttemptFailed, NoWorker, OwnedElsewhere
from decant.router.execution.interruptions import interruption_error, owner_changed_error, workers_lost_error
from decant.router.execution.journal_writer import append_new
from decant.router.execution.services import ExecutionOwner, RouterServices
from decant.router.request.finish import finish_from_tokens
from decant.router.request.output import Finish
from decant.router.request.stored import record_end
from decant.router.request.token_stream import TokenStream
from decant.router.request.valid_request import ValidRequest
from decant.runtime.error_details import Reason
from decant.runtime.errors import (
    RETRY_AFTER_SECONDS,
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    Internal,
    ServiceError,
    Unavailable,
)
from decant.runtime.telemetry import logs, tracing
from decant.state import errors
from decant.state.errors import StateError
from decant.state.owned import StoredRequest
from decant.state.requests import Displaced

_log = logs.get(__name__)


class Phase(IntEnum):
    """Progress of a request; it goes back only from RECORDED, when the store refuses it or is unavailable."""

    QUEUED = 0
    RECORDED = 1
    """In Redis, or perhaps, or Redis is unavailable with ``serve_without_redis``."""
    RUNNING = 2
    ENDED = 3
    PERSISTED = 4
    """Nothing more will be written: usually Redis has the end."""


class Execution:
    """A request in this router: ``run`` is the body of a task; ``close`` may be called at any time.

    An ``adopted`` request continues on the worker that runs it, else from its tokens.
    """

    def __init__(
        self,
        request: ValidRequest,
        router: RouterServices,
        owner: ExecutionOwner,
        adopted: StoredRequest | None = None,
        epoch: int = 1,
    ) -> None:
        self.phase = Phase.QUEUED
        self.accepted: asyncio.Future[StoredRequest | None] = asyncio.get_running_loop().create_future()
        """None: it runs. Else the stored request with this id and payload, whose stream is used instead, or the error
        that ended it before.
        """
        self.num_waiting_callers = 0
        self.persisted = asyncio.Event()
        self.is_superseded = False
        """Another router or request has the id: nothing more is recorded."""
        self.disconnect_timer: asyncio.TimerHandle | None = None
        self.task: asyncio.Task[None] | None = None
        self._request = request
        self._owner = owner
        self._router = router
        self._queued: AcceptedRequest | None = None
        """It waits for the slot."""
        self._slot: StartedRequest | None = None
        self._admission = router.admission.of(request.engine_request.model)
        self._attempt: Attempt | None = None
        self._finish: Finish | None = None
        """Finish of a complete answer whose receipt may still wait: nothing ends it otherwise, except another owner."""
        if adopted is None:
            self._context = new_context(request, router.peer, epoch)
        else:
            self._context = adopted_context(request, adopted, router.pool)
            router.quota_leases.hold(request.key)
            self.phase = Phase.RECORDED
            self.accepted.set_result(None)
        self.stream, self.owned = self._context.stream, self._context.owned

    @property
    def is_recorded(self) -> bool:
        return self.phase >= Phase.RECORDED

    @property
    def can_restart(self) -> bool:
        return self.owned.state == Generation.STATE_FAILED and not self.stream.num_tokens

    @property
    def is_scheduled(self) -> bool:
        return self.stream.trace.scheduled_at is not None

    def progress(self) -> Waiting:
        ahead = None if self._queued is None else self._admission.num_ahead(self._queued)
        return Waiting(state=self.owned.state, attempt=self.owned.attempt, requests_ahead=ahead)

    async def run(self) -> None:
        end: Finish | ServiceError | None = None
        reason = wire.Cancel.REASON_ATTEMPT
        try:
            async with asyncio.timeout(self._request.deadline.remaining()) as limit:
                with tracing.span("admission", self._request.engine_request.traceparent):
                    stored = await self._admit()
                if stored is not None:
                    self.accepted.set_result(stored)
                    end = AlreadyExists(self._request.key.id)
                    return
                self._advance(Phase.RUNNING)
                end = self._finish = await self._run_attempts()
            assert self._attempt is not None
            await self._attempt.wait_for_report()  # no deadline applies to it: the answer is complete
        except TimeoutError:
            if limit.expired():
                end, reason = DeadlineExceeded(), wire.Cancel.REASON_DEADLINE
            else:
                raise
        except asyncio.CancelledError:
            end = interruption_error(self.stream, Reason.DRAINING, "this router is shutting down")
            raise
        except ServiceError as error:
            end = error
        finally:
            self.close(Internal() if end is None else end, reason)  # None: a bug

    def close(self, end: Finish | ServiceError, reason: wire.Cancel.Reason = wire.Cancel.REASON_ATTEMPT) -> None:
        """Release everything, wake the reader, and send workers a cancel with ``reason``. The first call counts."""
        if self.phase >= Phase.ENDED:
            return
        if self._finish is not None and not self.is_superseded:
            end = self._finish
        if isinstance(end, Finish):
            tokens = self.stream.num_tokens // len(self.stream.outputs)
            self._admission.learn(self._request.size, tokens, self.stream.cached_tokens)
        was_recorded, self.phase = self.is_recorded, Phase.ENDED
        self.stream.end = end
        self.stream.notify()
        self._owner.on_ended(self)
        self._release(reason)
        if not self.accepted.done():
            self.accepted.set_exception(end if isinstance(end, ServiceError) else Internal())
            self.accepted.exception()  # retrieved here: the caller that waited for it may be gone
        if was_recorded:
            self._record_end(end)
        else:
            self._router.quota_leases.release(self._request.key, 0)
            self.mark_persisted()
        self._router.kv_events.record_answer(self.stream, self._context.prefix)

    def _release(self, reason: wire.Cancel.Reason) -> None:
        self.reattach_reader()
        if self._attempt is not None:
            self._attempt.close(reason)
        elif self._context.current_decode_worker is not None:
            self._router.pool.cancel(self._context.current_decode_worker, self._context.run_id, reason)
        if self.task is not None and self.task is not asyncio.current_task():
            self.task.cancel()
        if self._slot is not None:
            self._slot.release()

    def _record_end(self, end: Finish | ServiceError) -> None:
        router, owned, stream = self._router, self.owned, self.stream
        if self.is_superseded:
            router.quota_leases.forget(owned.key)
            router.journal_writer.forget(self)
            return
        router.journal_writer.begin(self)
        append_new(owned, stream)
        if isinstance(end, ServiceError) and end.reason is Reason.DRAINING:
            router.quota_leases.forget(owned.key)  # it stays open, for the router that takes it over
        else:
            record_end(owned, stream, end)
            was_started = bool(stream.num_tokens) or self.is_scheduled
            router.quota_leases.release(owned.key, owned.record.usage.total_tokens if was_started else 0)
        router.journal_writer.finish(self)

    def mark_persisted(self) -> None:
        if self.phase is not Phase.ENDED:
            return
        self.phase = Phase.PERSISTED
        self.persisted.set()
        self._owner.on_persisted(self)

    def reattach_reader(self) -> TokenStream:
        if self.disconnect_timer is not None:
            self.disconnect_timer.cancel()
            self.disconnect_timer = None
        return self.stream

    def close_for_peers(self) -> None:
        self.close(interruption_error(self.stream, Reason.DRAINING, "this router is shutting down"))

    def on_superseded(self, error: Displaced) -> None:
        self.is_superseded = True
        if isinstance(error, errors.AlreadyExists):
            self.close(AlreadyExists(error.key.id))
        elif error.state == Generation.STATE_CANCELLED:
            self.close(Cancelled())
        else:
            self.close(owner_changed_error(self.stream, by_client=error.stream_epoch > self.owned.epoch))

    def _advance(self, phase: Phase) -> None:
        if self.phase < Phase.ENDED:
            self.phase = phase

    # Admission

    async def _admit(self) -> StoredRequest | None:
        """Wait for a slot and record the request; return the stored one, if there is an equal one with its id."""
        router, request = self._router, self._request
        if self.is_recorded:
            self._slot = self._admission.enter_at_once(self._accepted_request())
            if self._context.current_decode_worker is None:
                self.owned.start_attempt(datetime.now(UTC))
            router.journal_writer.begin(self)
            return None
        if not router.journal_writer.is_unavailable:
            await router.quota_leases.acquire(request.key, request.size.max_total_tokens)
        self._queued = self._accepted_request()
        self._slot = await self._admission.enter(self._queued)
        self._queued = None
        if router.journal_writer.is_unavailable:
            self._accept_unrecorded("writes fail")
        elif (stored := await self._record()) is not None:
            return stored
        self._advance(Phase.RECORDED)
        router.quota_leases.hold(request.key)
        router.journal_writer.begin(self)
        self.accepted.set_result(None)
        return None

    def _accepted_request(self) -> AcceptedRequest:
        request = self._request
        priority = request.engine_request.priority
        return self._admission.accepted(request.size, priority, request.deadline, lambda: max(self.stream.counts))

    async def _record(self) -> StoredRequest | None:
        """Record the request; return the stored one, if there is an equal one with its id. Raises AlreadyExists."""
        self._advance(Phase.RECORDED)  # the store may have it, even if this call is cancelled
        error: StateError | None = None
        try:
            stored = await self._router.requests.accept(self.owned)
        except StateError as failed:
            stored, error = None, failed
        if stored is None and error is None:
            return None
        self._advance(Phase.QUEUED)  # the store has another request with the id, or nothing
        if isinstance(error, errors.AlreadyExists):
            raise AlreadyExists(self._request.key.id)
        if error is not None:
            self._accept_unrecorded(str(error))
        return stored

    def _accept_unrecorded(self, why: str) -> None:
        if not self._router.settings.serve_without_redis:
            detail = f"the state store is unavailable: {why}"
            raise Unavailable(Reason.STATE_STORE_UNAVAILABLE, detail, retry_after=RETRY_AFTER_SECONDS)
        self.stream.resumable = False

    # Attempts

    async def _run_attempts(self) -> Finish:
        router, context = self._router, self._context
        block_sizes = router.pool.block_sizes(self._request.engine_request.model)
        for block_size in block_sizes:
            await context.prefix.prepare(block_size)
        router.kv_events.record_prompt(self.stream, context.prefix, block_sizes)
        while True:
            self._attempt = attempt = Attempt(context, router.pool, router.peer)
            try:
                end = await attempt.run()
            except AttemptFailed as failed:
                self._prepare_next(attempt, failed)
            except OwnedElsewhere as error:
                raise await self._owned_elsewhere(error) from None
            except NoWorker:
                context.record_attempt(wire.Failure(cause=wire.CAUSE_BUSY, detail="no worker took it"))
                raise workers_lost_error(self.stream, Reason.NO_WORKER, "no worker can take the request now") from None
            else:
                context.record_attempt()
                return end

    def _prepare_next(self, attempt: Attempt, failed: AttemptFailed) -> None:
        context, failure = self._context, failed.failure
        attempt.close(wire.Cancel.REASON_ATTEMPT)
        context.record_attempt(failure)
        context.current_decode_worker = None
        self._router.metrics.failovers.labels(self._request.engine_request.model, failed.label).inc()
        _log.warning("attempt failed", attempt=self.owned.attempt, error=str(failed))
        if failure.cause == wire.CAUSE_ID_REUSED:
            self._exclude_other_request()
        if failed.faulty_worker is not None:
            context.excluded_workers.add(failed.faulty_worker)
            self._router.pool.record_failure(failed.faulty_worker)
        context.local_prefill |= attempt.had_ticket or bool(self.stream.num_tokens)
        if self.owned.attempt >= self._router.settings.attempts and not self._is_complete():
            raise workers_lost_error(self.stream, Reason.WORKERS_LOST, f"{self.owned.attempt} attempts failed")
        append_new(self.owned, self.stream)
        self.owned.start_attempt(datetime.now(UTC))

    def _is_complete(self) -> bool:
        """Whether another attempt only has to find that the tokens are all."""
        stream = self.stream
        return stream.has_prompt_logprobs and all(
            output.finish is not None or finish_from_tokens(stream.request, output.tokens) is not None
            for output in stream.outputs
        )

    def _exclude_other_request(self) -> None:
        """Avoid workers that have another request with this id; raise AlreadyExists unless the store has this one."""
        if self.owned.synced_state is None:
            self.is_superseded = True
            raise AlreadyExists(self.owned.key.id)
        self._context.excluded_workers.update(self.stream.trace.workers)

    async def _owned_elsewhere(self, error: OwnedElsewhere) -> ServiceError:
        """Error for the client of a request that another router owns.

        While the store is unavailable, an equal epoch means that a client's stream on another router restarted the
        request; a higher one means a takeover.
        """
        self.is_superseded = True
        try:
            stored = await self._router.requests.read(self.owned.key, first=self.owned.length)
        except StateError:
            return owner_changed_error(self.stream, by_client=error.epoch == self.owned.epoch)
        if stored.state == Generation.STATE_CANCELLED:
            return Cancelled()
        by_client = stored.stream_epoch > self.owned.epoch or error.epoch == self.owned.epoch
        return owner_changed_error(self.stream, by_client=by_client)
