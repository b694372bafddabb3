"""One worker's part of an attempt. A leg records what its worker reports and releases all that it holds there.

    PrefillLeg   called --> scheduled --> ticket, first tokens (in either order) --> over
    DecodeLeg    started, or adopted --> scheduled (blocks reserved) --> joined (in the batch) --> ended

A leg decides nothing: it wakes its attempt. A later milestone implies those before it, because reports may be lost with
a session. The attempt raises a leg's failure where it waits for that leg.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Protocol

from decant.protos import worker_pb2 as wire
from decant.router.execution.attempt_context import AttemptContext
from decant.router.execution.failures import (
    RETRY_ELSEWHERE,
    AttemptFailed,
    NoCapacity,
    NothingToFetch,
    OwnedElsewhere,
    error_for,
)
from decant.router.execution.finish import finish_from_worker
from decant.router.execution.recorder import AttemptRecorder
from decant.router.execution.token_stream import Finish
from decant.router.placement.worker_load import LoadReservation
from decant.router.workers.pool import WorkerPool
from decant.router.workers.prefill_call import PrefillCall
from decant.router.workers.stream_io import StreamBroken
from decant.router.workers.subscription import RunSubscription
from decant.router.workers.token_sink import WriteError
from decant.router.workers.worker_handle import WorkerHandle
from decant.runtime import logs
from decant.runtime.error_details import Reason
from decant.runtime.errors import DeadlineExceeded

_log = logs.get(__name__)


class LegOwner(Protocol):
    """The attempt that began a leg."""

    def wake(self) -> None:
        """A leg has something new."""

    def on_draining(self, leg: DecodeLeg) -> None:
        """The leg's worker drains; repeated with each of its heartbeats."""

    def on_resumed(self, leg: DecodeLeg) -> None:
        """The leg's session came back: what the worker sent meanwhile may be lost."""


class Leg(ABC):
    """What both kinds have."""

    def __init__(self, context: AttemptContext, pool: WorkerPool, worker: WorkerHandle, owner: LegOwner) -> None:
        self.worker = worker
        self.started_at = asyncio.get_running_loop().time()
        self.finish: Finish | None = None
        """How the output ended here."""
        self.fatal: Exception | None = None
        """Ends the attempt, whichever leg it waits for."""
        self._context = context
        self._pool = pool
        self._owner = owner
        self._failure: Exception | None = None
        self._is_closed = False

    @property
    def failure(self) -> Exception | None:
        """Why the worker does no more: NoCapacity, AttemptFailed, or a ServiceError that is final for the request."""
        return self._failure

    def close(self, cancel: wire.Cancel | None) -> None:
        """Release everything at the worker, now. It is sent ``cancel`` if it may still work. May be repeated."""
        if not self._is_closed:
            self._is_closed = True
            self._release()
            self._leave(cancel)

    @abstractmethod
    def _release(self) -> None:
        """What this router holds for the worker: reservation, ticket. May be repeated."""

    @abstractmethod
    def _leave(self, cancel: wire.Cancel | None) -> None:
        """The call or the run."""

    def on_refused(self, refused: wire.Refused) -> None:
        if refused.failure.cause in RETRY_ELSEWHERE:
            self._fail(NoCapacity(self))
        else:
            self._fail(error_for(refused.failure, self.worker.incarnation))

    def on_superseded(self, superseded: wire.Superseded) -> None:
        self._fail_attempt(OwnedElsewhere(superseded.epoch))

    def _fail(self, error: Exception) -> None:
        """The first failure counts."""
        self._failure = self._failure or error
        self._owner.wake()

    def _fail_attempt(self, error: Exception) -> None:
        self.fatal = self.fatal or error
        self._owner.wake()

    def _error(self, cause: wire.Cause, detail: str) -> AttemptFailed:
        """For which this leg's worker is to blame."""
        return AttemptFailed(wire.Failure(cause=cause, detail=detail), self.worker.incarnation)

    def _finish_with(self, end: wire.OutputEnd) -> None:
        stream = self._context.stream
        try:
            self.finish = finish_from_worker(end, stream.request.engine_request.stopping, stream.tokens)
        except DeadlineExceeded as error:
            self._fail(error)
        if self.finish is None:  # the worker cancelled it, and not for this router
            detail = f"{self.worker.incarnation.id} ended it: {end.reason}"
            self._fail(AttemptFailed(wire.Failure(cause=wire.CAUSE_CANCELLED, detail=detail), None))
        self._owner.wake()


class PrefillLeg(Leg):
    """A prompt that one worker computes for another. ``target`` is the leg that has its ticket."""

    def __init__(
        self,
        context: AttemptContext,
        pool: WorkerPool,
        worker: WorkerHandle,
        request: wire.PrefillRequest,
        recorder: AttemptRecorder,
        owner: LegOwner,
    ) -> None:
        super().__init__(context, pool, worker, owner)
        self.ticket: wire.Ticket | None = None
        self.target: DecodeLeg | None = None
        self.is_over = False
        self._recorder = recorder
        self._has_first_tokens = False
        self._position = context.writer.position  # of the first output token
        self._reservation = worker.load.reserve(context.prefix, self._position, computed=True)
        worker.session.guests.add(self)
        self._call = PrefillCall(worker.prefill, request, self)

    @property
    def failure(self) -> Exception | None:
        if self._failure is None and self.is_over and self.target is None:
            return self._error(wire.CAUSE_PEER_LOST, "the prefill call ended without its end")
        return self._failure

    def is_scheduled(self) -> bool:
        """Whether the prompt's first chunk is computed."""
        return self.ticket is not None or self._has_first_tokens

    def has_ticket(self) -> bool:
        return self.ticket is not None

    def renew_ticket(self) -> None:
        """From now until a decode worker has it."""
        if self.ticket is not None:
            self._pool.tickets.renew(self.ticket, self.worker)

    def _release(self) -> None:
        self._reservation.release()
        self.worker.session.guests.discard(self)

    def _leave(self, cancel: wire.Cancel | None) -> None:
        if self.ticket is not None:
            self._pool.tickets.drop(self.ticket)
        self._call.close()
        if cancel is not None and not self.is_over:
            self.worker.session.cancel(cancel)

    def on_ticket(self, ticket: wire.Ticket) -> None:
        self.ticket = ticket
        self.renew_ticket()
        self._owner.wake()

    def on_first_tokens(self, message: wire.FirstTokens) -> None:
        self._has_first_tokens = True
        self._reservation.mark_prefilled()
        self._recorder.on_first_tokens(message, self.started_at)
        for first in message.tokens:
            self._append(first)
            if first.HasField("finished"):
                self._recorder.on_finished_at_first_token()
                self._finish_with(first.finished)
        self._owner.wake()

    def _append(self, first: wire.FirstTokens.First) -> None:
        logprobs = first.logprobs if first.HasField("logprobs") else None
        error = self._context.writer.write(self._position, first.token, logprobs)
        if error is WriteError.CONFLICT:
            _log.error("a first token differs from the known one", worker=self.worker.incarnation.id)
        elif error is WriteError.MALFORMED:
            self._fail_attempt(self._error(wire.CAUSE_CORRUPT, "its first token or the logprobs are malformed"))

    def on_prompt_logprobs(self, message: wire.PromptLogprobs) -> None:
        if self._context.writer.add_prompt_logprobs(message) is not None:
            self._fail_attempt(self._error(wire.CAUSE_CORRUPT, "its logprobs of the prompt are malformed"))
        self._owner.wake()

    def on_failed(self, failed: wire.Failed) -> None:
        self._fail(error_for(failed.failure, self.worker.incarnation))

    def on_over(self, broken: StreamBroken | None) -> None:
        self.is_over = True
        self._release()
        if broken is None:
            self._owner.wake()
        elif broken.reason is Reason.DRAINING:
            self._fail(NoCapacity(self))
        else:
            self._fail(self._error(wire.CAUSE_PEER_LOST, str(broken)))

    def on_session_lost(self) -> None:
        detail = "the prefill worker's session broke and did not come back"
        self._fail(self._error(wire.CAUSE_PEER_LOST, detail))


class DecodeLeg(Leg):
    """A run at the worker that decodes it. ``opening`` starts it there, or adopts it from an earlier owner."""

    def __init__(
        self,
        context: AttemptContext,
        pool: WorkerPool,
        worker: WorkerHandle,
        opening: wire.Start | wire.Adopt,
        owner: LegOwner,
    ) -> None:
        super().__init__(context, pool, worker, owner)
        self.scheduled: wire.Scheduled | None = None
        self.started: wire.DecodeStarted | None = None
        self.offer: wire.Ticket | None = None
        """For a worker that goes on with the run, because this one drains."""
        self._is_scheduled = False
        self._is_joined = False
        self._ticket: wire.Ticket | None = None
        self._reservation: LoadReservation | None = None
        if isinstance(opening, wire.Start):
            has_ticket = opening.HasField("ticket")
            self._reservation = worker.load.reserve(context.prefix, context.writer.position, computed=not has_ticket)
            if has_ticket:
                self._ticket = opening.ticket
                pool.tickets.stop_renewing(opening.ticket)
        self._subscription = RunSubscription(opening, context.writer, self)
        worker.session.start(self._subscription)

    @property
    def has_ticket(self) -> bool:
        """Whether it fetches what another worker computed."""
        return self._ticket is not None

    @property
    def cached_tokens(self) -> int:
        """Of the sequence, in the worker's prefix cache when it was scheduled."""
        return 0 if self.scheduled is None else self.scheduled.cached_tokens

    def is_scheduled(self) -> bool:
        """Whether it has its blocks: its fetch is open, or its first chunk is computed."""
        return self._is_scheduled

    def is_joined(self) -> bool:
        """Whether it is in the batch."""
        return self._is_joined

    def has_offer(self) -> bool:
        return self.offer is not None

    def request_offer(self) -> None:
        """Ask the worker for a ticket for the running sequence. May be repeated."""
        self.worker.session.migrate(wire.Migrate(run=self._subscription.run))

    def withdraw_offer(self) -> None:
        """The worker goes on with the run if it can, else reports that it failed."""
        self.offer = None
        self.worker.session.migrate(wire.Migrate(run=self._subscription.run, withdrawn=True))

    def retire(self) -> None:
        """Another worker has the run, with all its tokens."""
        self._is_closed = True
        self._release()
        self.worker.session.retire(self._subscription)

    def _release(self) -> None:
        self._drop_ticket()
        if self._reservation is not None:
            self._reservation.release()

    def _leave(self, cancel: wire.Cancel | None) -> None:
        if cancel is not None:
            self.worker.session.abandon(self._subscription, cancel)

    def _drop_ticket(self) -> None:
        if self._ticket is not None:
            self._pool.tickets.drop(self._ticket)

    def _set_scheduled(self) -> None:
        self._is_scheduled = True
        self._drop_ticket()

    def _set_joined(self) -> None:
        self._set_scheduled()
        self._is_joined = True
        if self._reservation is not None:
            self._reservation.mark_prefilled()

    def on_scheduled(self, message: wire.Scheduled) -> None:
        self.scheduled = message
        self._set_scheduled()
        self._owner.wake()

    def on_decode_started(self, message: wire.DecodeStarted) -> None:
        self.started = message
        self._set_joined()
        self._owner.wake()

    def on_run_status(self, status: wire.RunStatus) -> None:
        if status.phase != wire.RunStatus.PHASE_WAITING:
            self._set_scheduled()
        if status.phase in (wire.RunStatus.PHASE_RUNNING, wire.RunStatus.PHASE_ENDED):
            self._set_joined()
        self._owner.on_resumed(self)
        self._owner.wake()

    def on_offer(self, ticket: wire.Ticket) -> None:
        self.offer = ticket
        self._owner.wake()

    def on_draining(self) -> None:
        self._owner.on_draining(self)

    def on_ended(self, ended: wire.Ended) -> None:
        """All tokens are in the stream."""
        self._set_joined()
        self._release()
        self._finish_with(ended.end)

    def on_failed(self, failed: wire.Failed) -> None:
        if failed.failure.cause == wire.CAUSE_CANCELLED and self._ticket is not None:
            self._fail(NothingToFetch(failed.failure, None))
        else:
            self._fail(error_for(failed.failure, self.worker.incarnation))
