"""One accepted request from its admission to its end: its attempts, one after the other.

    admitted -> recorded -> attempt 1 --fails--> attempt 2 ... -> ended
                                                                    |
    cancelled, time over, superseded, a bug: at any point ----------'

It ends once: the first to say how wins, lets go of everything, and the course's reader is told.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Protocol

from decant.protos import worker_pb2 as wire
from decant.protos.inference_pb2 import Generation
from decant.protos.state_pb2 import RequestRecord
from decant.router.admission.quota import QuotaLeases
from decant.router.execution.attempt import Attempt
from decant.router.execution.attempt_context import AttemptContext
from decant.router.execution.failures import AttemptFailed, NoWorker, OwnedElsewhere
from decant.router.execution.finish import written_out
from decant.router.execution.journal_writer import JournalWriter, append_new
from decant.router.execution.stored import RestoreRequest, finish_to_record, stream_from_store
from decant.router.execution.token_stream import Finish, TokenStream
from decant.router.execution.token_writer import TokenWriter
from decant.router.execution.usage import receipt_of, usage_of
from decant.router.execution.valid_request import ValidRequest
from decant.router.settings import RouterSettings
from decant.router.workers.pool import WorkerPool
from decant.runtime import logs
from decant.runtime.admission import Admission, AdmissionSlot
from decant.runtime.error_details import Reason, ResumePoint, to_status
from decant.runtime.errors import (
    RETRY_AFTER_SECONDS,
    Aborted,
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    Internal,
    ServiceError,
    Unavailable,
)
from decant.state import errors
from decant.state.errors import StateError
from decant.state.ids import Incarnation
from decant.state.owned import OwnedRequest, StoredRequest
from decant.state.requests import Displaced, Requests

_log = logs.get(__name__)


@dataclass(frozen=True, slots=True)
class RouterServices:
    """What every execution stands on."""

    peer: wire.Peer
    settings: RouterSettings
    admission: Admission
    pool: WorkerPool
    requests: Requests
    flusher: JournalWriter
    bookings: QuotaLeases
    revive: RestoreRequest
    ended_s: float
    """How long an ended request is kept in the store."""


class ExecutionOwner(Protocol):
    """Who keeps executions."""

    def ended(self, execution: Execution) -> None:
        """It answers nobody any more."""

    def settled(self, execution: Execution) -> None:
        """It has ended, and the store knows, or need not."""


class Execution:
    """Runs in a task of its own, ``run``; ``end`` may be called from anywhere at any time.

    With ``adopted``, as another owner left it, it goes on: at the worker where it ran, else from what is written.
    """

    def __init__(
        self,
        request: ValidRequest,
        router: RouterServices,
        home: ExecutionOwner,
        adopted: StoredRequest | None = None,
        epoch: int = 1,
    ) -> None:
        if adopted is None:
            self.course = TokenStream(request)
            self.owned = _owned(request, Incarnation.of(router.peer))
            self.owned.epoch = epoch
        else:
            self.course = stream_from_store(adopted, request)
            self.course.is_behind = True
            self.owned = OwnedRequest.adopted(adopted)
        self.accepted: asyncio.Future[StoredRequest | None] = asyncio.get_running_loop().create_future()
        """Done once it is recorded, with the error that it came to before, or with what the store has under its id:
        an equal request, in whose place nothing is run."""
        self.awaited = 0
        """Calls that wait until it is accepted."""
        self.is_settled = asyncio.Event()
        """It has ended, and the store knows, or need not."""
        self.is_superseded = False
        self.grace: asyncio.TimerHandle | None = None
        self.task: asyncio.Task[None] | None = None
        self._request = request
        self._home = home
        self._router = router
        self._context = AttemptContext(self.course, self.owned, TokenWriter(self.course))
        self._admitted: AdmissionSlot | None = None
        self._attempt: Attempt | None = None
        self.is_recorded = adopted is not None  # or may be
        if adopted is None:
            self._context.wait = router.pool.wait_predictors[request.engine_request.model].enter(
                request.engine_request.priority
            )
        else:
            self._context.current_decode_worker = _holder(adopted) if self.owned.has_prompt_logprobs else None
            self._context.local_prefill = bool(adopted.entries)
            self._context.layout = _layout(adopted, router.pool)
            router.bookings.hold(request.key)
            self.accepted.set_result(None)

    async def run(self) -> None:
        end: Finish | ServiceError = Internal()  # unless something better is known
        reason = wire.Cancel.REASON_ATTEMPT
        try:
            async with asyncio.timeout(self._request.deadline.remaining()) as limit:
                await self._enter()
                end = await self._answer()
        except TimeoutError:
            if limit.expired():
                end, reason = DeadlineExceeded(), wire.Cancel.REASON_DEADLINE
            else:
                raise
        except asyncio.CancelledError:
            end = self._leaving()
            raise
        except ServiceError as error:
            end = error
        finally:
            self.end(end, reason)

    def end(self, end: Finish | ServiceError, reason: wire.Cancel.Reason = wire.Cancel.REASON_ATTEMPT) -> None:
        """The request is over; what is left of it at workers is cancelled for that reason. Only the first counts."""
        if self.course.end is not None:
            return
        self.course.end = end
        if self._context.wait is not None:
            self._context.wait.discard()
        self.course.told()
        self._home.ended(self)
        self.come_back()
        if self._attempt is not None:
            self._attempt.close(reason)
        elif self._context.current_decode_worker is not None:
            self._router.pool.cancel(self._context.current_decode_worker, self._run(), reason)
        if self.task is not None and self.task is not asyncio.current_task():
            self.task.cancel()
        if self._admitted is not None:
            self._admitted.leave()
        if not self.accepted.done():
            self.accepted.set_exception(end if isinstance(end, ServiceError) else Internal())
            self.accepted.exception()  # marks it as seen: the call that waited for it may be gone
        if self.is_recorded:
            self._record_end(end)
        else:
            self._router.bookings.release(self._request.key, 0)
            self.settled()

    def come_back(self) -> TokenStream:
        """Somebody reads it again: it is lost no more."""
        if self.grace is not None:
            self.grace.cancel()
            self.grace = None
        return self.course

    def settled(self) -> None:
        self.is_settled.set()
        self._home.settled(self)

    def leave(self) -> None:
        """This router ends before the request does: another one goes on with it, and its reader is sent there."""
        self.end(self._leaving())

    def _leaving(self) -> ServiceError:
        return self._interrupted(Reason.DRAINING, "this router ends")

    def _interrupted(self, reason: Reason, words: str) -> ServiceError:
        """The end of a stream here that a client resumes elsewhere, or asks for again before its first token."""
        written = len(self.course.tokens)
        if written:
            return Aborted(reason, words, resume=ResumePoint(0, written))
        return Unavailable(reason, words, retry_after=RETRY_AFTER_SECONDS)

    def superseded(self, error: Displaced) -> None:
        """Another router owns it, or another request has its id: nothing more is written."""
        self.is_superseded = True
        if isinstance(error, errors.AlreadyExists):
            self.end(AlreadyExists(error.key.id))
            return
        cancelled = error.state == Generation.STATE_CANCELLED
        self.end(Cancelled() if cancelled else self._moved(is_resumed=error.stream_epoch > self.owned.epoch))

    def _run(self) -> wire.Run:
        return self._context.run()

    @property
    def is_void(self) -> bool:
        """Whether it failed before its first token: an equal request begins anew."""
        return self.owned.state == Generation.STATE_FAILED and not self.course.tokens

    @property
    def is_taken_up(self) -> bool:
        return self.course.path.taken_up_at is not None

    async def _enter(self) -> None:
        router, request = self._router, self._request
        if self.is_recorded:
            self._admitted = router.admission.enter_at_once()
            if self._context.current_decode_worker is None:
                self.owned.start_attempt(datetime.now(UTC))
            router.flusher.begin(self)
            return
        if not router.flusher.is_unavailable:
            max_tokens = request.prompt_tokens + request.engine_request.stopping.max_tokens
            await router.bookings.acquire(request.key, max_tokens)
        self._admitted = await router.admission.enter(request.engine_request.priority, request.deadline)
        if router.flusher.is_unavailable:
            self._take_without_store("it is away")
        else:
            await self._record()
        self.is_recorded = True
        router.bookings.hold(request.key)
        router.flusher.begin(self)
        self.accepted.set_result(None)

    async def _record(self) -> None:
        self.is_recorded = True  # from now on it may be in Redis, whatever becomes of this call
        key = self._request.key
        try:
            found = await self._router.requests.accept(self.owned)
        except errors.AlreadyExists:
            self.is_recorded = False
            raise AlreadyExists(key.id) from None
        except StateError as error:
            self.is_recorded = False
            self._take_without_store(str(error))
            return
        if found is not None:
            self.is_recorded = False
            self.accepted.set_result(found)
            raise AlreadyExists(key.id)

    def _take_without_store(self, why: str) -> None:
        """Raises Unavailable where the settings don't want that."""
        if not self._router.settings.serve_without_redis:
            words = f"the state store is away: {why}"
            raise Unavailable(Reason.STATE_STORE_AWAY, words, retry_after=RETRY_AFTER_SECONDS)
        self.course.resumable = False

    async def _answer(self) -> Finish:
        router, context = self._router, self._context
        for block_tokens in router.pool.block_sizes(self._request.engine_request.model):
            await context.prefix.prepare(block_tokens)
        while True:
            self._attempt = attempt = Attempt(context, router.pool, router.peer)
            try:
                end = await attempt.run()
            except AttemptFailed as failed:
                self._failed(attempt, failed)
            except OwnedElsewhere as superseded:
                raise await self._superseded_by(superseded) from None
            except NoWorker:
                attempt.record(wire.Failure(cause=wire.CAUSE_BUSY, detail="no worker took it"))
                raise self._lost(Reason.NO_WORKER, "no worker can take the request now") from None
            else:
                attempt.record()
                return end

    def _failed(self, attempt: Attempt, failed: AttemptFailed) -> None:
        """The next attempt is prepared. Raises what the client learns when there is none."""
        context, failure = self._context, failed.failure
        attempt.close(wire.Cancel.REASON_ATTEMPT)
        attempt.record(failure)
        context.current_decode_worker = None
        _log.warning("attempt failed", attempt=self.owned.attempt, why=str(failed))
        if failure.cause == wire.CAUSE_ID_REUSED:
            self._avoid_other_request(attempt)
        if failed.blamed is not None:
            context.excluded_workers.add(failed.blamed)
            self._router.pool.record_failure(failed.blamed)
        context.local_prefill |= attempt.had_ticket or bool(self.course.tokens)
        if self.owned.attempt >= self._router.settings.attempts and written_out(self.course) is None:
            raise self._lost(Reason.WORKERS_LOST, f"{self.owned.attempt} attempts failed")
        append_new(self.owned, self.course)
        self.owned.start_attempt(datetime.now(UTC))

    def _avoid_other_request(self, attempt: Attempt) -> None:
        """A worker runs another request with this id. Raises AlreadyExists unless the store has this one."""
        if self.owned.synced_state is None:
            self.is_superseded = True
            raise AlreadyExists(self.owned.key.id)
        self._context.excluded_workers.update(worker.incarnation for worker in attempt.workers)

    async def _superseded_by(self, error: OwnedElsewhere) -> ServiceError:
        """What the store says of the owner that a worker knows of.

        While the store is away: the same epoch was begun again by a client's stream on another router; a greater one
        is taken for a takeover, after which a client may resume.
        """
        self.is_superseded = True
        try:
            found = await self._router.requests.read(self.owned.key, first=self.owned.length)
        except StateError:
            return self._moved(is_resumed=error.epoch == self.owned.epoch)
        if found.state == Generation.STATE_CANCELLED:
            return Cancelled()
        return self._moved(is_resumed=found.stream_epoch > self.owned.epoch or error.epoch == self.owned.epoch)

    def _moved(self, *, is_resumed: bool) -> ServiceError:
        """How a stream here ends when another router owns the request, by a client's newer stream or by itself."""
        if is_resumed:
            return Aborted(Reason.SUPERSEDED, "a newer stream of this request is open at another router")
        return self._interrupted(Reason.OWNER_CHANGED, "another router took over the request")

    def _lost(self, reason: Reason, words: str) -> ServiceError:
        return self._interrupted(Reason.WORKERS_LOST if self.course.tokens else reason, words)

    def _record_end(self, end: Finish | ServiceError) -> None:
        owned, course, record = self.owned, self.course, self.owned.record
        if self.is_superseded:
            self._router.bookings.forget(owned.key)
            self._router.flusher.forget(self)
            return
        self._router.flusher.begin(self)
        append_new(owned, course)
        if isinstance(end, ServiceError) and end.reason is Reason.DRAINING:
            self._router.bookings.forget(owned.key)
            self._router.flusher.end(self)  # it stays open, for whoever takes it over
            return
        if course.certain is None:  # whoever reads it now has seen what is written
            record.ClearField("certain_seq")
        record.cached_tokens = course.cached_tokens
        usage = usage_of(course)
        self._router.bookings.release(owned.key, usage.total_tokens if course.tokens or self.is_taken_up else 0)
        record.usage.CopyFrom(usage)
        record.receipt.CopyFrom(receipt_of(course, asyncio.get_running_loop().time()))
        state, finished = finish_to_record(end)
        if finished is not None:
            record.finished.append(finished)
        if isinstance(end, ServiceError):
            record.error.CopyFrom(to_status(end.fault))
        owned.transition(state, datetime.now(UTC))
        self._router.flusher.end(self)


def _holder(found: StoredRequest) -> Incarnation | None:
    """The decode worker where its last attempt runs, as far as is written."""
    attempts = found.record.attempts
    if not attempts or attempts[-1].attempt != found.attempt or not attempts[-1].HasField("decode_worker"):
        return None
    return Incarnation.of(attempts[-1].decode_worker)


def _layout(found: StoredRequest, pool: WorkerPool) -> int:
    """Of the workers of its last attempt, 0 where they don't give equal bits, or nobody knows them. Of one that was
    accepted a moment ago nothing is written yet: it is what all workers have, where that is one."""
    attempts = found.record.attempts
    if attempts:
        return attempts[-1].layout
    return 0 if found.entries else pool.layout_of(found.record.model)


def _owned(request: ValidRequest, life: Incarnation) -> OwnedRequest:
    now = datetime.now(UTC)
    record = RequestRecord(
        model=request.engine_request.model,
        seed=request.engine_request.sampling.seed,
        prompt_tokens=request.prompt_tokens,
    )
    left = request.deadline.remaining()
    if left is not None:
        record.deadline.FromDatetime(now + timedelta(seconds=min(left, 10 * 365 * 86400)))
    return OwnedRequest.begin(request.key, life, request.payload, record, now)
