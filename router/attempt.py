"""One try at one request: which workers run it, and what they say of it.

    prefill worker P      ticket -----------> first token(s) -----------------------> over
    this attempt   place    |  choose D          |                                      (ignored once D has it)
    decode worker D         '-- Start(ticket) --> taken up --> joined --> frames --> ended
    state          QUEUED   PREFILLING           HANDING_OFF   DECODING              SUCCEEDED

    from tokens    place, Start ----------------> taken up --> joined --> frames --> ended
    state          QUEUED                        DECODING                            SUCCEEDED

    adopted        Adopt -----------------------> held ------------------> frames --> ended
    state          any                           DECODING                            SUCCEEDED

All that happens comes into one inbox and is taken in order; only tokens go straight into the course. Whatever an
attempt holds at workers is given back by ``close``, which can be called at any time and waits for nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any, ClassVar, NoReturn

from protos import worker_pb2 as wire
from protos.inference_pb2 import Generation
from router.failures import NO_ROOM, AttemptFailed, NoWorker, raised_by
from router.following import Following
from router.job import Job
from router.placement import first_place, taker
from router.pool import Pool, Worker
from router.prefill import PrefillCall, PrefillOver
from router.request import Ended, Path
from router.sessions import Session
from router.stops import ended_by
from router.writing import Trouble, pack
from runtime import logs
from runtime.errors import Aborted
from runtime.fault import Reason
from state.names import Life, State

GONE_SECONDS = 5.0
"""Patience while no worker of the model answers at all."""
FULL_SECONDS = 60.0
"""Patience while those that answer have no room."""

_HANDOFF = (Generation.STATE_PREFILLING, Generation.STATE_HANDING_OFF, Generation.STATE_DECODING)
_FROM_TOKENS = (Generation.STATE_DECODING,)

_log = logs.get(__name__)


class _Lost:
    """The prefill worker's session broke for good."""


class _Stopped:
    """The pen found a stop text."""


class _Woken:
    """There may be room."""


class Attempt:
    """Runs once. The attempt's number is the request's, which its owner has raised."""

    def __init__(self, job: Job, pool: Pool, router: wire.Peer) -> None:
        owned, course = job.owned, job.course
        self.giver: Worker | None = None
        self.taker: Worker | None = None
        self._job = job
        self._pool = pool
        self._router = router
        self._course = course
        self._run = wire.Run(request=str(owned.key), epoch=owned.epoch, attempt=owned.attempt)
        self._written = len(course.tokens)
        self._stages: tuple[State, ...] = _FROM_TOKENS
        self._inbox = asyncio.Queue[tuple[Worker | None, Any]]()
        self._now = asyncio.get_running_loop().time
        self._began_at = course.request.accepted_at if owned.attempt == 1 else self._now()
        self._waits_since: float | None = None
        self._asked_at = self._began_at  # the worker that reads the prompt
        self._woken = False
        self._ticket: wire.Ticket | None = None
        self._prefill: PrefillCall | None = None
        self._following: Following | None = None
        self._prefill_over = False
        self._taken_up = False  # by the taker: from now on only it matters
        self._end = job.pen.stopped
        job.pen.tell_stopped = partial(self._tell, None, _Stopped())
        course.path = Path(attempts=owned.attempt)

    async def run(self) -> Ended:
        """Raises AttemptFailed, NoWorker, and the ServiceError that another attempt would not change."""
        if self._end is None and self._job.holder is not None:
            self._adopt(self._job.holder)
        elif self._end is None:
            self._place()
        while self._end is None:
            worker, event = await self._next()
            self._HEAR[type(event)](self, worker, event)
        for worker in (self.giver, self.taker):
            if worker is not None:
                worker.praise()
        return self._end

    @property
    def had_ticket(self) -> bool:
        """Whether its prompt was read, or nearly so: what failed is the handoff, or came after it."""
        return self._ticket is not None

    def close(self, reason: wire.Cancel.Reason) -> None:
        """Lets go of all that is left at workers; ``reason`` is what they are told where no stop text was found."""
        self._pool.forget_waker(self._wake)
        if self._ticket is not None:
            self._pool.drop(self._ticket)
        cancel = wire.Cancel(run=self._run, reason=reason)
        if self._job.pen.stopped is not None:
            cancel.reason = wire.Cancel.REASON_STOP_TEXT
            cancel.end_position = self._job.pen.position
        if self.giver is not None and self._prefill is not None:
            self._leave_giver(self.giver, self._prefill, cancel)
        if self.taker is not None and self._following is not None:
            self.taker.session.leave(self._following, cancel)

    def lost(self, session: Session) -> None:
        """The prefill worker's session tells that it won't come back."""
        self._tell(self.giver, _Lost())

    def _leave_giver(self, giver: Worker, prefill: PrefillCall, cancel: wire.Cancel) -> None:
        giver.session.guests.discard(self)
        prefill.close()
        if not prefill.is_over and (self._end is None or self._job.pen.stopped is not None):
            giver.session.cancel(cancel)
        self._prefill = None

    def _tell(self, worker: Worker | None, event: Any) -> None:
        self._inbox.put_nowait((worker, event))

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            self._tell(None, _Woken())

    async def _next(self) -> tuple[Worker | None, Any]:
        if self._waits_since is None:
            return await self._inbox.get()
        patience = FULL_SECONDS if self._seen() else GONE_SECONDS
        try:
            async with asyncio.timeout_at(self._waits_since + patience) as limit:
                return await self._inbox.get()
        except TimeoutError:
            if limit.expired():
                raise NoWorker from None
            raise

    # Where it goes

    def _seen(self) -> Any:
        return self._pool.seen(self._course.request.work.model, self._job.avoid)

    def _place(self) -> None:
        """On its first worker, or into the line of those that wait for one."""
        place = first_place(self._seen(), self._job.pen.position, from_tokens=self._job.from_tokens)
        if place is None:
            self._wait()
        elif place.prefill:
            self._ask_prefill(self._pool.worker(place.life))
        else:
            self._start(self._pool.worker(place.life))

    def _adopt(self, holder: Life) -> None:
        """It runs there already, begun by an earlier owner of the request."""
        try:
            worker = self._pool.worker(holder)
        except KeyError:
            self._fail(None, wire.CAUSE_UNKNOWN_RUN, f"{holder.id}, where it ran, has gone")
        self.taker = worker
        self._course.path.decode_worker = worker.life.id
        if self._job.owned.state > Generation.STATE_QUEUED:
            self._stages = _HANDOFF
        self._following = Following(wire.Adopt(run=self._run), self._job.pen, partial(self._tell, worker))
        worker.session.start(self._following)

    def _choose_taker(self, ticket: wire.Ticket, giver: Worker) -> None:
        life = taker(self._seen(), ticket.tokens, ticket.layout, giver.life)
        if life is None:
            self._wait()
        else:
            self._start(self._pool.worker(life), ticket)

    def _wait(self) -> None:
        if self._waits_since is None:
            self._waits_since = self._now()
            self._pool.wake_on_change(self._wake)

    def _go(self) -> None:
        self._waits_since = None
        self._pool.forget_waker(self._wake)

    def _hear_room(self, _: Worker | None, __: _Woken) -> None:
        self._woken = False
        if self._waits_since is None:
            return
        if self._ticket is not None and self.giver is not None:
            self._choose_taker(self._ticket, self.giver)
        else:
            self._place()

    def _ask_prefill(self, worker: Worker) -> None:
        self._go()
        self._stages = _HANDOFF
        self._asked_at = self._now()
        self.giver = worker
        self._course.path.prefill_worker = worker.life.id
        worker.book(self._job.pen.position)
        worker.session.guests.add(self)
        work = self._work()
        request = wire.PrefillRequest(
            run=self._run,
            router=self._router,
            worker=worker.facts.peer,
            work=work,
            handoff=work.stopping.max_tokens - self._written > 1,
        )
        self._prefill = PrefillCall(worker.prefill, request, partial(self._tell, worker))

    def _start(self, worker: Worker, ticket: wire.Ticket | None = None) -> None:
        self._go()
        self.taker = worker
        self._course.path.decode_worker = worker.life.id
        if ticket is None:
            self._stages = _FROM_TOKENS
            self._asked_at = self._now()
        else:
            self._pool.claimed(ticket)
        worker.book(self._job.pen.position)
        start = wire.Start(run=self._run, work=self._work(), ticket=ticket)
        self._following = Following(start, self._job.pen, partial(self._tell, worker))
        worker.session.start(self._following)

    def _work(self) -> wire.Work:
        """The request's work as it stands now: tokens of earlier attempts, its age, what is left of its time."""
        request = self._course.request
        work = wire.Work()
        work.CopyFrom(request.work)
        work.age_ms = max(0, round((self._now() - request.accepted_at) * 1000))
        left = request.deadline.remaining_ms()
        if left is not None:
            work.remaining_ms = left
        del work.outputs[:]
        work.outputs.add(output=0, tokens=pack(self._course.tokens[: self._written]))
        return work

    # What the prefill worker says

    def _hear_ticket(self, giver: Worker, ticket: wire.Ticket) -> None:
        self._ticket = ticket
        self._begun()
        self._reach(Generation.STATE_PREFILLING)
        self._pool.hold(ticket, giver)
        self._choose_taker(ticket, giver)

    def _hear_first(self, _: Worker, told: wire.FirstTokens) -> None:
        path, request = self._course.path, self._course.request
        path.prefill_s = told.prefill_us / 1e6
        self._begun(self._asked_at + told.queued_us / 1e6)  # the ticket came when the first chunk was computed
        self._course.cached_tokens = told.cached_tokens
        self._reach(Generation.STATE_PREFILLING)
        for first in told.tokens:
            position = request.prompt_tokens + self._written
            logprobs = first.logprobs if first.HasField("logprobs") else None
            if self._job.pen.put(position, first.token, logprobs) is Trouble.CONFLICT:
                _log.error("a first token differs from the known one", worker=path.prefill_worker)
            if first.HasField("finished"):
                path.decode_worker = ""
                self._end_with(first.finished)

    def _hear_prefill_over(self, giver: Worker, over: PrefillOver) -> None:
        giver.session.guests.discard(self)
        self._prefill_over = True
        if self._taken_up or (over.broken is None and self.taker is not None):
            return  # the taker knows what became of the cache
        if over.broken is not None and over.broken.reason is Reason.DRAINING:
            self._refused_by(giver)
            return
        words = "the prefill call ended without its end" if over.broken is None else str(over.broken)
        self._fail(giver, wire.CAUSE_PEER_LOST, words)

    def _hear_lost(self, giver: Worker, _: _Lost) -> None:
        if not self._taken_up:
            self._fail(giver, wire.CAUSE_PEER_LOST, "the prefill worker's session broke and did not come back")

    # What the decode worker says

    def _hear_taken_up(self, _: Worker, told: wire.TakenUp) -> None:
        self._take_up(told.waited_us / 1e6)
        if self._ticket is None and self._written == 0:
            self._course.cached_tokens = told.cached_tokens

    def _hear_joined(self, _: Worker, joined: wire.Joined) -> None:
        self._join()
        path = self._course.path
        if joined.WhichOneof("path") == "handoff":
            handoff = joined.handoff
            path.handoff_s = handoff.handoff_us / 1e6
            path.handoff_bytes = handoff.bytes
            path.decode_wait_s = handoff.decode_wait_us / 1e6
        else:
            path.prefill_s = joined.from_tokens.prefill_us / 1e6

    def _hear_held(self, _: Worker, held: wire.Held) -> None:
        """After a break: what was said meanwhile is made up for."""
        if held.phase != wire.Held.PHASE_WAITING:
            self._take_up()
        if held.phase in (wire.Held.PHASE_RUNNING, wire.Held.PHASE_ENDED):
            self._join()

    def _take_up(self, waited_s: float = 0.0) -> None:
        if not self._taken_up:
            self._taken_up = True
            if self._ticket is not None:
                self._pool.drop(self._ticket)
                self._reach(Generation.STATE_HANDING_OFF)
            else:
                self._begun(self._asked_at + waited_s)
                self._reach(Generation.STATE_DECODING)

    def _join(self) -> None:
        self._take_up()
        self._reach(Generation.STATE_DECODING)
        if self._course.path.decode_began_at is None:
            self._course.path.decode_began_at = self._now()

    def _hear_ended(self, taker: Worker, ended: wire.Ended) -> None:
        self._following = None
        self._join()
        self._end_with(ended.end)
        if self._end is None:  # it was cancelled there, and not by us
            self._fail(None, wire.CAUSE_CANCELLED, f"{taker.life.id} ended it: {ended.end.reason}")

    # What either says, and the pen

    def _hear_stopped(self, _: Worker | None, __: _Stopped) -> None:
        self._end = self._job.pen.stopped

    def _hear_refused(self, worker: Worker, refused: wire.Refused) -> None:
        if refused.failure.cause in NO_ROOM:
            self._refused_by(worker)
        else:
            raise raised_by(refused.failure, worker.life)

    def _refused_by(self, worker: Worker) -> None:
        """It has no room: the same attempt goes elsewhere, now or later. Nothing is held there."""
        worker.refused()
        if worker is self.taker:
            self.taker, self._following = None, None
            self._course.path.decode_worker = ""
        elif self._prefill is not None:
            worker.session.guests.discard(self)
            self._prefill.close()
            self.giver, self._prefill = None, None
            self._course.path.prefill_worker = ""
        if self._ticket is not None and self.giver is not None:
            self._pool.hold(self._ticket, self.giver)
            self._choose_taker(self._ticket, self.giver)
        else:
            self._place()

    def _hear_failed(self, worker: Worker, failed: wire.Failed) -> None:
        if worker is self.taker:
            self._following = None
            if failed.failure.cause == wire.CAUSE_CANCELLED and self.giver is not None and not self._prefill_over:
                # Nothing was left to fetch: the first token was the last one, and is on its way here.
                self.taker, self._taken_up = None, False
                return
        elif self._taken_up:
            return
        raise raised_by(failed.failure, worker.life)

    def _hear_superseded(self, _: Worker, superseded: wire.Superseded) -> None:
        raise Aborted(Reason.SUPERSEDED, f"another router owns the request, in epoch {superseded.epoch}")

    def _hear_prompt(self, _: Worker, told: wire.PromptLogprobs) -> None:
        self._job.pen.explain(told)

    # How it stands

    def _begun(self, at: float | None = None) -> None:
        path = self._course.path
        path.taken_up_at = self._now() if at is None else at
        path.queue_s = max(0.0, path.taken_up_at - self._began_at)

    def _reach(self, state: State) -> None:
        """Through every state on the way: what a worker said in between may have been lost in a break."""
        owned = self._job.owned
        for stage in self._stages:
            if owned.state < stage <= state:
                owned.move(stage, datetime.now(UTC))
                self._job.note(self.giver, self.taker)

    def _end_with(self, end: wire.OutputEnd) -> None:
        self._end = self._job.pen.stopped or ended_by(end, self._course.request.work.stopping, self._course.tokens)

    def _fail(self, worker: Worker | None, cause: wire.Cause, detail: str) -> NoReturn:
        life = None if worker is None else worker.life
        raise AttemptFailed(wire.Failure(cause=cause, detail=detail), life)

    _HEAR: ClassVar[dict[type, Callable[..., None]]] = {
        _Woken: _hear_room,
        _Lost: _hear_lost,
        _Stopped: _hear_stopped,
        PrefillOver: _hear_prefill_over,
        wire.Ticket: _hear_ticket,
        wire.FirstTokens: _hear_first,
        wire.PromptLogprobs: _hear_prompt,
        wire.TakenUp: _hear_taken_up,
        wire.Joined: _hear_joined,
        wire.Held: _hear_held,
        wire.Ended: _hear_ended,
        wire.Refused: _hear_refused,
        wire.Failed: _hear_failed,
        wire.Superseded: _hear_superseded,
    }
