"""One try at one request: which workers run it, and what they say of it.

    prefill worker P      ticket -----------> first token(s) -----------------------> over
    this attempt   place    |  choose D          |  (before the ticket, of a short      (ignored once D has it)
                            |                    |  prompt: one step does both)
    decode worker D         '-- Start(ticket) --> taken up --> joined --> frames --> ended
    state          QUEUED   PREFILLING           HANDING_OFF   DECODING              SUCCEEDED

    from tokens    place, Start ----------------> taken up --> joined --> frames --> ended
    state          QUEUED                        DECODING                            SUCCEEDED

    adopted        Adopt -----------------------> held ------------------> frames --> ended
    state          any                           DECODING                            SUCCEEDED

All that happens comes into one inbox and is taken in order; only tokens go straight into the course. Whom it runs on,
and what it holds there, is its ``WorkerAssignment``'s business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any, ClassVar, NoReturn

from decant.protos import worker_pb2 as wire
from decant.protos.inference_pb2 import Generation
from decant.router.execution.assignment import CapacityChanged, PrefillSessionLost, WorkerAssignment
from decant.router.execution.attempt_context import AttemptContext
from decant.router.execution.failures import NO_ROOM, AttemptFailed, NoWorker, OwnedElsewhere, raised_by
from decant.router.execution.finish import ended_by, written_out
from decant.router.execution.token_stream import AttemptTrace, Finish
from decant.router.execution.token_writer import WriteError
from decant.router.workers.pool import WorkerHandle, WorkerPool
from decant.router.workers.prefill_call import PrefillOver
from decant.router.workers.subscription import WorkerDraining
from decant.runtime import logs
from decant.runtime.error_details import Reason
from decant.state.ids import State

_HANDOFF = (Generation.STATE_PREFILLING, Generation.STATE_HANDING_OFF, Generation.STATE_DECODING)
_FROM_TOKENS = (Generation.STATE_DECODING,)

_log = logs.get(__name__)


class _StopStringFound:
    """The pen found a stop text."""


class Attempt:
    """Runs once. The attempt's number is the request's, which its owner has raised."""

    def __init__(self, job: AttemptContext, pool: WorkerPool, router: wire.Peer) -> None:
        owned, course = job.owned, job.course
        self._job = job
        self._course = course
        self._written = len(course.tokens)
        self._inbox = asyncio.Queue[tuple[WorkerHandle | None, Any]]()
        self._now = asyncio.get_running_loop().time
        self._began_at = course.request.accepted_at if owned.attempt == 1 else self._now()
        self._route = WorkerAssignment(job, pool, router, self._tell)
        self._costs = pool.costs[course.request.engine_request.model]
        self._first_at: float | None = None  # when the first token was heard
        self._cached_at_taker = 0
        self._prefill_over = False
        self._has_moved = False  # from the worker that joined it first
        self._taken_up = False  # by the taker: from now on only it matters
        self._end = job.pen.stopped or written_out(course)
        job.pen.tell_stopped = partial(self._tell, None, _StopStringFound())
        course.path = AttemptTrace(attempts=owned.attempt)

    async def run(self) -> Finish:
        """Raises AttemptFailed, NoWorker, OwnedElsewhere, or a ServiceError that is final for the request."""
        if self._end is None:
            self._route.begin()
        while self._end is None or self._is_to_be_explained:
            worker, event = await self._next()
            self._HEAR[type(event)](self, worker, event)
        for worker in (self.giver, self.taker):
            if worker is not None:
                worker.praise()
        return self._end

    @property
    def _tokens(self) -> int:
        """Of the sequence as it began here."""
        return self._course.request.prompt_tokens + self._written

    @property
    def giver(self) -> WorkerHandle | None:
        """Who reads the prompt for another."""
        return self._route.giver

    @property
    def taker(self) -> WorkerHandle | None:
        """Who decodes."""
        return self._route.taker

    @property
    def _is_to_be_explained(self) -> bool:
        """Whether the prompt's logprobs are still on their way: who reads it has a stream of its own, and what comes by
        the taker's may be faster."""
        return not self._course.is_explained and self.giver is not None and not self._prefill_over

    @property
    def _heir(self) -> WorkerHandle | None:
        """To whom it is on its way from the taker."""
        heir = self._route.move.heir
        return None if heir is None else heir.worker

    @property
    def had_ticket(self) -> bool:
        """Whether its prompt was read, or nearly so: what failed is the handoff, or came after it."""
        return self._route.ticket is not None

    def close(self, reason: wire.Cancel.Reason) -> None:
        """Lets go of all that is left at workers; ``reason`` is what they are told where no stop text was found."""
        self._route.close(reason, is_over=self._end is not None and self._job.pen.stopped is None)

    def _tell(self, worker: WorkerHandle | None, event: Any) -> None:
        self._inbox.put_nowait((worker, event))

    async def _next(self) -> tuple[WorkerHandle | None, Any]:
        while (patience_ends := self._route.waits_until) is not None:
            if patience_ends <= self._now():
                raise NoWorker
            with suppress(TimeoutError):
                async with asyncio.timeout_at(patience_ends):
                    return await self._inbox.get()
        return await self._inbox.get()

    def _hear_room(self, _: WorkerHandle | None, __: CapacityChanged) -> None:
        self._route.look_again()

    # What the prefill worker says

    def _hear_ticket(self, worker: WorkerHandle, ticket: wire.Ticket) -> None:
        if worker is self.taker:
            self._route.move_on(ticket)
            return
        if self._first_at is None:
            self._begun()
        self._reach(Generation.STATE_PREFILLING)
        self._route.hand_over(ticket)

    def _hear_first(self, worker: WorkerHandle, told: wire.FirstTokens) -> None:
        path, request = self._course.path, self._course.request
        path.prefill_s = told.prefill_us / 1e6
        self._first_at = self._now()
        self._route.read()
        self._costs.read(self._tokens - told.cached_tokens, path.prefill_s, beside_answers=False)
        self._begun(self._route.asked_at + told.queued_us / 1e6)  # the ticket came when the first chunk was computed
        self._course.cached_tokens = told.cached_tokens
        self._reach(Generation.STATE_PREFILLING)
        for first in told.tokens:
            position = request.prompt_tokens + self._written
            logprobs = first.logprobs if first.HasField("logprobs") else None
            trouble = self._job.pen.put(position, first.token, logprobs)
            if trouble is WriteError.CONFLICT:
                _log.error("a first token differs from the known one", worker=path.prefill_worker)
            elif trouble is WriteError.MALFORMED:
                self._fail(worker, wire.CAUSE_CORRUPT, "its first token or the logprobs are malformed")
            if first.HasField("finished"):
                path.decode_worker = ""
                self._end_with(first.finished)

    def _hear_prefill_over(self, giver: WorkerHandle, over: PrefillOver) -> None:
        self._route.prefill_over(giver)
        self._prefill_over = True
        if self._taken_up or (over.broken is None and self.taker is not None):
            return  # the taker knows what became of the cache
        if over.broken is not None and over.broken.reason is Reason.DRAINING:
            self._route.refused_by(giver)
            return
        words = "the prefill call ended without its end" if over.broken is None else str(over.broken)
        self._fail(giver, wire.CAUSE_PEER_LOST, words)

    def _hear_lost(self, giver: WorkerHandle, _: PrefillSessionLost) -> None:
        if not self._taken_up:
            self._fail(giver, wire.CAUSE_PEER_LOST, "the prefill worker's session broke and did not come back")

    # What the decode worker says

    def _hear_taken_up(self, worker: WorkerHandle, told: wire.Scheduled) -> None:
        if worker is self._heir:
            self._route.move.opened()
            return
        self._take_up(told.waited_us / 1e6)
        self._cached_at_taker = told.cached_tokens
        if not self.had_ticket and self._written == 0:
            self._course.cached_tokens = told.cached_tokens

    def _hear_joined(self, worker: WorkerHandle, decode_started: wire.DecodeStarted) -> None:
        if worker is self._heir:
            self._move()
        if self._has_moved:
            return
        self._join()
        path = self._course.path
        if decode_started.WhichOneof("path") == "handoff":
            handoff = decode_started.handoff
            path.handoff_s = handoff.handoff_us / 1e6
            path.handoff_bytes = handoff.bytes
            path.decode_wait_s = handoff.decode_wait_us / 1e6
            self._moved(path.handoff_s + path.decode_wait_s)
        else:
            path.prefill_s = decode_started.from_tokens.prefill_us / 1e6
            self._route.read()
            self._costs.read(self._tokens - self._cached_at_taker, path.prefill_s, beside_answers=True)

    def _moved(self, seconds: float) -> None:
        """How long the answer stood still: blocks moved while the prompt was computed too, and it may have waited for
        room, which is nothing that moving costs."""
        stood_still = 0.0 if self._first_at is None else self._now() - self._first_at
        self._costs.moved(self._tokens - self._cached_at_taker, min(seconds, stood_still))

    def _hear_held(self, worker: WorkerHandle, held: wire.RunStatus) -> None:
        """After a break: what was said meanwhile is made up for."""
        if worker is self._heir:
            self._hear_heir_held(held)
            return
        if worker is self.taker:
            self._route.move.resumed(worker)
        if held.phase != wire.RunStatus.PHASE_WAITING:
            self._take_up()
        if held.phase in (wire.RunStatus.PHASE_RUNNING, wire.RunStatus.PHASE_ENDED):
            self._join()

    def _take_up(self, waited_s: float = 0.0) -> None:
        if not self._taken_up:
            self._taken_up = True
            self._route.scheduled()
            if self.had_ticket:
                self._reach(Generation.STATE_HANDING_OFF)
            else:
                self._begun(self._route.asked_at + waited_s)
                self._reach(Generation.STATE_DECODING)

    def _join(self) -> None:
        self._take_up()
        self._reach(Generation.STATE_DECODING)
        if self._course.path.decode_began_at is None:
            self._course.path.decode_began_at = self._now()

    def _hear_ended(self, worker: WorkerHandle, ended: wire.Ended) -> None:
        if worker is self._heir:
            self._move()
        self._route.taker_over()
        self._join()
        self._end_with(ended.end)
        if self._end is None:  # it was cancelled there, and not by us
            self._fail(None, wire.CAUSE_CANCELLED, f"{worker.life.id} ended it: {ended.end.reason}")

    # What is said while it moves from its worker to another

    def _hear_drains(self, worker: WorkerHandle, _: WorkerDraining) -> None:
        if worker is self.taker:
            self._route.drains()

    def _hear_heir_held(self, held: wire.RunStatus) -> None:
        if held.phase != wire.RunStatus.PHASE_WAITING:
            self._route.move.opened()
        if held.phase in (wire.RunStatus.PHASE_RUNNING, wire.RunStatus.PHASE_ENDED):
            self._move()

    def _move(self) -> None:
        self._route.moved()
        self._note_move()

    def _note_move(self) -> None:
        """Whoever adopts the request looks for it at its new worker."""
        self._has_moved = True
        self._job.note(self.giver, self.taker)

    # What either says, and the pen

    def _hear_stopped(self, _: WorkerHandle | None, __: _StopStringFound) -> None:
        self._end = self._job.pen.stopped

    def _hear_refused(self, worker: WorkerHandle, refused: wire.Refused) -> None:
        if worker is self._heir:
            self._route.heir_failed(refused.failure)
        elif refused.failure.cause in NO_ROOM:
            self._route.refused_by(worker)
        else:
            raise raised_by(refused.failure, worker.life)

    def _hear_failed(self, worker: WorkerHandle, failed: wire.Failed) -> None:
        if worker is self._heir:
            self._route.heir_failed(failed.failure)
            return
        if worker is self.taker and self._route.inherit():
            self._note_move()
            return
        if worker is self.taker:
            self._route.taker_over()
            if failed.failure.cause == wire.CAUSE_CANCELLED and self.giver is not None and not self._prefill_over:
                # Nothing was left to fetch: the first token was the last one, and is on its way here.
                self._route.without_taker()
                self._taken_up = False
                return
        elif self._taken_up:
            return
        raise raised_by(failed.failure, worker.life)

    def _hear_superseded(self, _: WorkerHandle, superseded: wire.Superseded) -> None:
        raise OwnedElsewhere(superseded.epoch)

    def _hear_prompt(self, worker: WorkerHandle, told: wire.PromptLogprobs) -> None:
        if self._job.pen.explain(told) is not None:
            self._fail(worker, wire.CAUSE_CORRUPT, "its logprobs of the prompt are malformed")

    # How it stands

    def _begun(self, at: float | None = None) -> None:
        path = self._course.path
        if self._job.wait is not None:
            self._job.wait.begun()
        path.taken_up_at = self._now() if at is None else at
        path.queue_s = max(0.0, path.taken_up_at - self._began_at)

    def _reach(self, state: State) -> None:
        """Through every state on the way: what a worker said in between may have been lost in a break."""
        owned = self._job.owned
        for stage in _HANDOFF if self._route.hands_over else _FROM_TOKENS:
            if owned.state < stage <= state:
                owned.move(stage, datetime.now(UTC))
                self._job.note(self.giver, self.taker)

    def _end_with(self, end: wire.OutputEnd) -> None:
        self._end = self._job.pen.stopped or ended_by(
            end, self._course.request.engine_request.stopping, self._course.tokens
        )

    def _fail(self, worker: WorkerHandle | None, cause: wire.Cause, detail: str) -> NoReturn:
        life = None if worker is None else worker.life
        raise AttemptFailed(wire.Failure(cause=cause, detail=detail), life)

    _HEAR: ClassVar[dict[type, Callable[..., None]]] = {
        CapacityChanged: _hear_room,
        PrefillSessionLost: _hear_lost,
        WorkerDraining: _hear_drains,
        _StopStringFound: _hear_stopped,
        PrefillOver: _hear_prefill_over,
        wire.Ticket: _hear_ticket,
        wire.FirstTokens: _hear_first,
        wire.PromptLogprobs: _hear_prompt,
        wire.Scheduled: _hear_taken_up,
        wire.DecodeStarted: _hear_joined,
        wire.RunStatus: _hear_held,
        wire.Ended: _hear_ended,
        wire.Refused: _hear_refused,
        wire.Failed: _hear_failed,
        wire.Superseded: _hear_superseded,
    }
