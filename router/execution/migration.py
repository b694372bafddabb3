"""A running attempt moves to another worker, because the one that writes it drains.

    its worker    drains ── Give ──> ticket                    writes on ........ sealed ──> retired
    the heir                            └── Start(ticket) ──> taken up ── blocks ──> joined: the attempt's taker

Both bring tokens meanwhile, and what comes first for a place is written. What fails on the way is withdrawn: the worker
goes on, or says that it can't because the seal was said; then the next attempt begins. Should the worker itself be
lost, an heir that fetches may have all of it: then the attempt is the heir's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from decant.protos import worker_pb2 as wire
from decant.router.execution.attempt_context import AttemptContext
from decant.router.execution.failures import NO_ROOM, AttemptFailed, raised_by
from decant.router.placement.policy import PlacementRequest, taker
from decant.router.placement.worker_load import LoadReservation
from decant.router.workers.pool import WorkerHandle, WorkerPool
from decant.router.workers.subscription import RunSubscription
from decant.state.ids import Incarnation


class DecodeRun(NamedTuple):
    """A run at the worker that decodes it, and what is booked for it there."""

    worker: WorkerHandle
    following: RunSubscription
    sent: LoadReservation


class Migration:
    """From the worker where a run is to another one, the heir. ``tell`` hears what the heir says."""

    def __init__(
        self, job: AttemptContext, pool: WorkerPool, run: wire.Run, tell: Callable[[WorkerHandle | None, Any], None]
    ) -> None:
        self.heir: DecodeRun | None = None
        self._job = job
        self._pool = pool
        self._run = run
        self._tell = tell
        self._ticket: wire.Ticket | None = None
        self.is_open = False
        """The heir fetches: it may have the whole sequence, whatever becomes of the worker."""
        self._failed: set[Incarnation] = set()

    def ask(self, worker: WorkerHandle) -> None:
        """It drains: have it give the run away, if there is anybody to take it. May be said again."""
        if self.heir is None and self._pool.can_receive(worker, self._job.avoid | self._failed):
            worker.session.migrate(wire.Migrate(run=self._run))

    def begin(self, worker: WorkerHandle, ticket: wire.Ticket, work: wire.EngineRequest) -> None:
        """It gave a ticket."""
        if self.heir is not None:
            return
        life = self._choose(worker)
        if life is None:
            self._withdraw(worker)
            return
        heir = self._pool.worker(life)
        self._ticket = ticket
        self._pool.hold(ticket, worker)
        self._pool.claimed(ticket)
        start = wire.Start(run=self._run, engine_request=work, ticket=ticket)
        sent = heir.view.send(self._job.prefix, self._job.pen.position, computed=False)
        self.heir = DecodeRun(heir, RunSubscription(start, self._job.pen, partial(self._tell, heir)), sent)
        heir.session.start(self.heir.following)

    def opened(self) -> None:
        """The heir has room and fetches."""
        self.is_open = True
        self._drop_ticket()

    def arrived(self) -> DecodeRun:
        """The run is the heir's alone."""
        heir = self.heir
        assert heir is not None
        self._drop_ticket()
        self.heir, self.is_open = None, False
        return heir

    def failed(self, worker: WorkerHandle, failure: wire.Failure) -> None:
        """The heir won't have it. Its session follows it no more."""
        heir = self.arrived()
        heir.sent.over()
        if failure.cause in NO_ROOM:
            heir.worker.view.refused()
        else:
            self._failed.add(heir.worker.life)
            error = raised_by(failure, heir.worker.life)
            if isinstance(error, AttemptFailed) and error.blamed == heir.worker.life:
                heir.worker.blame()
        self._withdraw(worker)

    def close(self, cancel: wire.Cancel) -> None:
        """Nobody needs to take it any more."""
        if self.heir is not None:
            heir = self.arrived()
            heir.sent.over()
            heir.worker.session.leave(heir.following, cancel)

    def resumed(self, worker: WorkerHandle) -> None:
        """The worker's session was away, and what was said meanwhile may be lost."""
        if self.heir is None:
            self._withdraw(worker)

    def _withdraw(self, worker: WorkerHandle) -> None:
        worker.session.migrate(wire.Migrate(run=self._run, withdrawn=True))

    def _choose(self, worker: WorkerHandle) -> Incarnation | None:
        job = self._job
        avoid = job.avoid | self._failed
        seen = self._pool.seen(job.course.request.engine_request.model, avoid, job.prefix)
        able = [each for each in seen if not each.avoided]
        return taker(able, PlacementRequest(tokens=job.pen.position), worker.facts.layout, worker.life)

    def _drop_ticket(self) -> None:
        if self._ticket is not None:
            self._pool.drop(self._ticket)
            self._ticket = None
