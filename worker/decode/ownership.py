"""Owners of runs: the session that gets a run's messages, and orphans. The engine is reached through
`RunExecutor`.

A run whose session ended is an orphan: forgotten one lease later, unless its router returns or another adopts it.
"""

from __future__ import annotations

from collections.abc import Iterable

from decant.protos import worker_pb2 as wire
from decant.runtime.connections.peer import same_incarnation
from decant.worker.decode.execution import RunExecutor
from decant.worker.decode.run import DecodeRun, key_of
from decant.worker.decode.run_table import RunTable
from decant.worker.decode.session import RouterSession


class RunOwnership:
    def __init__(self, runs: RunTable, executor: RunExecutor) -> None:
        self._runs = runs
        self._executor = executor

    def attach(
        self, run: DecodeRun, session: RouterSession, ref: wire.Run, resume: Iterable[wire.ResumePosition] = ()
    ) -> wire.RunStatus:
        if run.owner.session is not session:
            run.notify.superseded(ref.epoch)
            run.release_session()
            run.attach(session)
        run.ref.epoch = ref.epoch
        run.stop_orphan_timer()
        return run.status(resume)

    def ensure_attached(self, run: DecodeRun, session: RouterSession, ref: wire.Run) -> None:
        """Attach a run for messages other than Start, Adopt and Hello; a new session gets the run's status."""
        is_new = run.owner.session is not session
        status = self.attach(run, session, ref)
        if is_new:
            session.send(wire.WorkerMessage(run_status=status))

    def catch_up(self, run: DecodeRun, resume: Iterable[wire.ResumePosition]) -> None:
        run.notify.catch_up(resume, self._executor.step)
        if run.offer.ticket is not None and run.offer.ticket.run.epoch != run.ref.epoch:
            self._executor.migrations.cancel(run)

    def on_session_end(self, session: RouterSession) -> None:
        for run in self._runs:
            if run.owner.session is session:
                run.release_session()
                self._executor.start_orphan_timer(run)

    def orphans_of(self, router: wire.Peer) -> list[DecodeRun]:
        """Orphans of earlier sessions of this incarnation; those of earlier incarnations can be adopted."""
        return [run for run in self._runs if run.owner.session is None and same_incarnation(run.owner.router, router)]

    def unopened_tickets_of(self, session: RouterSession) -> list[bytes]:
        waiting = wire.RunStatus.PHASE_WAITING
        runs = (run for run in self._runs if run.owner.session is session and run.phase == waiting)
        return [run.ticket.id for run in runs if run.ticket is not None]

    def on_new_epoch(self, ref: wire.Run) -> None:
        """Forget the attempts that the new owner does not name."""
        for run in self._runs:
            if run.ref.request == ref.request and run.key != key_of(ref):
                self.supersede(run, ref.epoch)

    def supersede(self, run: DecodeRun, epoch: int) -> None:
        run.notify.superseded(epoch)
        self._executor.forget(run)
