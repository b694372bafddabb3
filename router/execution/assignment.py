"""The workers of one attempt: chosen, begun, and given back.

    begin --adopted--> Adopt at the worker where it runs
      |
      place --all are full--> it waits in its model's line, and looks again when its turn comes
      |---- a prefill worker --> Prefill -- its ticket --> hand_over --> Start(ticket) at a decode worker
      '---- from tokens -------> Start

What a route holds at workers (a call, a ticket, a run, a booking of blocks) is given back by ``close``, which can be
called at any time and waits for nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from decant.protos import worker_pb2 as wire
from decant.protos.inference_pb2 import Generation
from decant.router.admission.admission_queue import SECONDS_PER_PRIORITY
from decant.router.execution.attempt_context import AttemptContext
from decant.router.execution.failures import AttemptFailed
from decant.router.execution.migration import Migration
from decant.router.execution.token_writer import pack
from decant.router.placement.policy import PlacementRequest, first_place, taker
from decant.router.placement.worker_load import LoadReservation
from decant.router.workers.pool import WorkerHandle, WorkerPool
from decant.router.workers.prefill_call import PrefillCall
from decant.router.workers.session import WorkerSession
from decant.router.workers.subscription import RunSubscription
from decant.router.workers.waiting_line import Kind, Waiter, WaitsFor
from decant.state.ids import Incarnation

GONE_SECONDS = 5.0
"""Patience while no worker of the model answers at all."""
FULL_SECONDS = 60.0
"""Patience while those that answer have no room."""


class PrefillSessionLost:
    """The prefill worker's session broke for good."""


class CapacityChanged:
    """It may be its turn, or how long it is worth waiting has changed."""


class WorkerAssignment:
    """``tell`` hears what the workers say, and Lost and Woken. The way that was taken stands in the course's path."""

    def __init__(
        self, job: AttemptContext, pool: WorkerPool, router: wire.Peer, tell: Callable[[WorkerHandle | None, Any], None]
    ) -> None:
        self.giver: WorkerHandle | None = None
        self.taker: WorkerHandle | None = None
        self.ticket: wire.Ticket | None = None
        self.hands_over = False
        """Whether two workers run it, one after the other."""
        self._job = job
        self._pool = pool
        self._router = router
        self._tell = tell
        self._now = asyncio.get_running_loop().time
        self._run = job.run()
        self._written = len(job.course.tokens)
        self.asked_at = self._now()
        """When the worker that reads the prompt was."""
        self._waits_since: float | None = None
        self._line = pool.lines[job.course.request.engine_request.model]
        self._waiter: Waiter | None = None
        self._prefill: PrefillCall | None = None
        self._following: RunSubscription | None = None
        self._at_giver: LoadReservation | None = None
        self._at_taker: LoadReservation | None = None
        self.move = Migration(job, pool, self._run, tell)

    @property
    def waits_until(self) -> float | None:
        """When its patience ends, while it waits for room."""
        if self._waits_since is None:
            return None
        is_full = self._pool.has_usable(self._job.course.request.engine_request.model)
        return self._waits_since + (FULL_SECONDS if is_full else GONE_SECONDS)

    @property
    def _goes_on(self) -> bool:
        """Whether more than one token is wanted: one is written by who reads the prompt."""
        return self._job.course.request.engine_request.stopping.max_tokens - self._written > 1

    # Beginning

    def begin(self) -> None:
        """Where it runs already, else where it can. Raises AttemptFailed where the first has gone."""
        if self._job.holder is not None:
            self._adopt(self._job.holder)
        else:
            self._go_on()

    def hand_over(self, ticket: wire.Ticket) -> None:
        """The prompt's first chunk is computed: choose who takes the cache."""
        self.ticket = ticket
        self._go_on()

    def look_again(self) -> None:
        """It may be this request's turn to take a place."""
        waiter = self._waiter
        if waiter is not None and self._line.is_turn_of(waiter):
            self._try_places()
            self._line.stays(waiter)

    def _go_on(self) -> None:
        """To a worker, or into the line: behind those that wait for the same already."""
        if self.ticket is not None and self.giver is not None:
            self._pool.hold(self.ticket, self.giver)
        kind = self._kind()
        is_first = not self._line.has(kind)
        if not (is_first and self._try_places()):
            self._wait(kind)
            if not is_first:
                self._line.open([kind])

    def _try_places(self) -> bool:
        """Whether there was one."""
        if self.ticket is not None and self.giver is not None:
            return self._choose_taker(self.ticket, self.giver)
        return self._place()

    def _kind(self) -> Kind:
        """What it waits for, if it has to."""
        if self.ticket is not None and self.giver is not None:
            return Kind(WaitsFor.CACHE, self.ticket.layout, self.giver.life)
        need = self._need()
        if need.from_tokens:
            return Kind(WaitsFor.FROM_TOKENS)
        return Kind(WaitsFor.SHORT_PREFILL if need.tokens < need.handoff_min_tokens else WaitsFor.PREFILL)

    def _seen(self) -> Any:
        job = self._job
        return self._pool.seen(job.course.request.engine_request.model, job.avoid, job.prefix)

    def _need(self) -> PlacementRequest:
        job, request = self._job, self._job.course.request
        return PlacementRequest(
            tokens=job.pen.position,
            from_tokens=job.from_tokens,
            session=request.session if job.prefix.may_hit else "",
            handoff_min_tokens=self._pool.handoff_min_tokens(request.engine_request.model) if self._goes_on else 0,
        )

    def _place(self) -> bool:
        """On its first worker."""
        place = first_place(self._seen(), self._need())
        if place is None:
            return False
        if place.prefill:
            self._ask_prefill(self._pool.worker(place.life))
        else:
            self._start(self._pool.worker(place.life))
        return True

    def _choose_taker(self, ticket: wire.Ticket, giver: WorkerHandle) -> bool:
        life = taker(self._seen(), self._need(), ticket.layout, giver.life)
        if life is None:
            return False
        self._start(self._pool.worker(life), ticket)
        return True

    def _adopt(self, holder: Incarnation) -> None:
        """It runs there already, begun by an earlier owner of the request."""
        try:
            worker = self._pool.worker(holder)
        except KeyError:
            detail = f"{holder.id}, where it ran, has gone"
            raise AttemptFailed(wire.Failure(cause=wire.CAUSE_UNKNOWN_RUN, detail=detail), None) from None
        self.hands_over = self._job.owned.state > Generation.STATE_QUEUED
        self._follow(worker, wire.Adopt(run=self._run))

    def _ask_prefill(self, worker: WorkerHandle) -> None:
        self._stop_waiting()
        self.hands_over = True
        self.asked_at = self._now()
        self._job.compute_at(worker)
        self.giver = worker
        self._job.course.path.prefill_worker = worker.life.id
        self._at_giver = worker.view.send(self._job.prefix, self._job.pen.position, computed=True)
        worker.session.guests.add(self)
        work = self._work(self._written)
        request = wire.PrefillRequest(
            run=self._run,
            router=self._router,
            worker=worker.facts.peer,
            engine_request=work,
            handoff=self._goes_on,
        )
        self._prefill = PrefillCall(worker.prefill, request, partial(self._tell, worker))

    def _start(self, worker: WorkerHandle, ticket: wire.Ticket | None = None) -> None:
        self._stop_waiting()
        if ticket is None:
            self.hands_over = False
            self.asked_at = self._now()
            self._job.compute_at(worker)
        else:
            self._pool.claimed(ticket)
        self._at_taker = worker.view.send(self._job.prefix, self._job.pen.position, computed=ticket is None)
        self._follow(worker, wire.Start(run=self._run, engine_request=self._work(self._written), ticket=ticket))

    def _follow(self, worker: WorkerHandle, first: wire.Start | wire.Adopt) -> None:
        self.taker = worker
        self._job.course.path.decode_worker = worker.life.id
        self._following = RunSubscription(first, self._job.pen, partial(self._tell, worker))
        worker.session.start(self._following)

    def _work(self, written: int) -> wire.EngineRequest:
        """The request's work as it stands now: the first tokens ``written``, its age, what is left of its time."""
        course = self._job.course
        request = course.request
        work = wire.EngineRequest()
        work.CopyFrom(request.engine_request)
        work.age_ms = max(0, round((self._now() - request.accepted_at) * 1000))
        left = request.deadline.remaining_ms()
        if left is not None:
            work.remaining_ms = left
        del work.outputs[:]
        work.outputs.add(output=0, tokens=pack(course.tokens[:written]))
        return work

    # To another worker, because its own drains

    def drains(self) -> None:
        """Its worker asks to be rid of it."""
        if self.taker is not None and self._following is not None:
            self.move.ask(self.taker)

    def move_on(self, ticket: wire.Ticket) -> None:
        """Its worker gave a ticket for the running sequence."""
        assert self.taker is not None
        self.move.begin(self.taker, ticket, self._work(len(self._job.course.tokens)))

    def moved(self) -> None:
        """Another worker has the sequence: it is the taker now."""
        assert self.taker is not None
        assert self._following is not None
        self.taker.session.forget(self._following)
        self._succeed()

    def heir_failed(self, failure: wire.Failure) -> None:
        """Whoever was to have it won't."""
        assert self.taker is not None
        self.move.failed(self.taker, failure)

    def inherit(self) -> bool:
        """Its worker is lost. False: nobody was about to have the whole sequence."""
        if not self.move.is_open:
            return False
        self._succeed()
        return True

    def _succeed(self) -> None:
        self.taker_over()
        self.taker, self._following, self._at_taker = self.move.arrived()
        self._job.course.path.decode_worker = self.taker.life.id

    # Waiting for room

    def _wait(self, kind: Kind) -> None:
        request = self._job.course.request
        order = request.accepted_at - request.engine_request.priority * SECONDS_PER_PRIORITY
        self._waits_since = self._now()
        self._waiter = Waiter(order, kind, partial(self._tell, None, CapacityChanged()))
        self._line.join(self._waiter)

    def _stop_waiting(self) -> None:
        self._waits_since = None
        if self._waiter is not None:
            waiter, self._waiter = self._waiter, None
            self._line.placed(waiter)

    # What is over

    def read(self) -> None:
        """The prompt is computed, by whoever does that."""
        sent = self._at_giver or self._at_taker
        if sent is not None:
            sent.read()

    def scheduled(self) -> None:
        """The ticket was opened: its taker renews it no more."""
        if self.ticket is not None:
            self._pool.drop(self.ticket)

    def prefill_over(self, giver: WorkerHandle) -> None:
        giver.session.guests.discard(self)
        if self._at_giver is not None:
            self._at_giver.over()

    def taker_over(self) -> None:
        """Its session follows the run no more."""
        self._following = None
        if self._at_taker is not None:
            self._at_taker.over()

    def without_taker(self) -> None:
        """Nothing was left for it to take, or it had no room."""
        self.taker_over()
        self.taker = None

    def refused_by(self, worker: WorkerHandle) -> None:
        """It has no room: the same attempt goes elsewhere, now or later. Nothing is held there."""
        worker.view.refused()
        path = self._job.course.path
        if worker is self.taker:
            self.without_taker()
            path.decode_worker = ""
        elif self._prefill is not None:
            self.prefill_over(worker)
            self._prefill.close()
            self.giver, self._prefill, self._at_giver = None, None, None
            path.prefill_worker = ""
        self._go_on()

    def lost(self, session: WorkerSession) -> None:
        """The prefill worker's session tells that it won't come back."""
        self._tell(self.giver, PrefillSessionLost())

    def close(self, reason: wire.Cancel.Reason, *, is_over: bool) -> None:
        """Lets go of all that is left at workers. ``is_over``: it ended by itself, and its giver need not be told."""
        self._stop_waiting()
        for sent in (self._at_giver, self._at_taker):
            if sent is not None:
                sent.over()
        if self.ticket is not None:
            self._pool.drop(self.ticket)
        cancel = wire.Cancel(run=self._run, reason=reason)
        if self._job.pen.stopped is not None:
            cancel.reason = wire.Cancel.REASON_STOP_TEXT
            cancel.end_position = self._job.pen.position
        if self.giver is not None and self._prefill is not None:
            self._leave_giver(self.giver, self._prefill, None if is_over else cancel)
        self.move.close(cancel)
        if self.taker is not None and self._following is not None:
            self.taker.session.leave(self._following, cancel)

    def _leave_giver(self, giver: WorkerHandle, prefill: PrefillCall, cancel: wire.Cancel | None) -> None:
        giver.session.guests.discard(self)
        prefill.close()
        if not prefill.is_over and cancel is not None:
            giver.session.cancel(cancel)
        self._prefill = None
