"""Everything that is decoded here, from a router's start until nobody needs it any more.

    start ──> entrance ──> room ──> fetch ──> joined ─┐
                 └──> added ──> begun ──> first token ─┴──> a frame a step ──> ended ──> retired
    cancel, deadline, patience: from anywhere to ended; whatever was held is free by then

The engine is asked by commands that wait for nothing (``EngineLoop.post``), and heard after each step. All else
happens on the event loop at once, so no two of these methods ever meet in the middle of one another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import partial

from decant.engine.errors import EngineStopped, InvalidRequest
from decant.engine.output import SequenceFinished, StepOutput
from decant.engine.request import FinishReason
from decant.engine.transfer import IncomingSequence
from decant.handoff.receiver import TransferResult
from decant.protos import worker_pb2 as wire
from decant.runtime.peer import same_incarnation
from decant.worker.decode import notifications as telling
from decant.worker.decode.admission import DecodeAdmission, Outcome
from decant.worker.decode.frames import replay_frames
from decant.worker.decode.kv_fetch import KvFetches, failure_from
from decant.worker.decode.migration import MigrationSource
from decant.worker.decode.notifications import microseconds
from decant.worker.decode.runs import DecodeRun, RunTable, key_of
from decant.worker.decode.session import RouterSession
from decant.worker.decode.start_validation import StartValidator
from decant.worker.engine_host import EngineHost
from decant.worker.wire_codec import RequestRejected, end_reason, logprobs_from_wire


class DecodeRunManager:
    """The runs of one worker. ``step`` is the engine's last one."""

    def __init__(self, host: EngineHost) -> None:
        self.runs = RunTable(host.epochs)
        self.step = 0
        self._host = host
        self._validator = StartValidator(host, self.runs)
        self._admission = DecodeAdmission(host, self._on_admission)
        self._fetches = KvFetches(host)
        self._migrations = MigrationSource(host, self.runs, self._fail)
        host.step_listeners.append(self._on_step)
        host.crash_listeners.append(self._on_crash)
        host.epochs.listeners.append(self._on_new_owner)

    # -- what a router asks -------------------------------------------------------------------------------------

    def start(self, session: RouterSession, start: wire.Start) -> None:
        """Begin a run, or say how it stands."""
        run = self.runs.get(start.run)
        if run is not None and run.ref.epoch == start.run.epoch:
            session.send(wire.WorkerMessage(run_status=self.attach(run, session, start.run)))
            return
        if run is not None:  # its new owner does not know of it, and begins anew
            self._notify_superseded(run, start.run.epoch)
            self.drop(run)
        try:
            run = self._validator.validate(start)
        except RequestRejected as refused:
            session.send(wire.WorkerMessage(refused=wire.Refused(run=start.run, failure=refused.failure)))
            return
        self.runs.add(run)
        self.attach(run, session, start.run)
        if start.engine_request.HasField("remaining_ms"):
            late = partial(self.cancel_run, run, wire.OutputEnd.REASON_DEADLINE)
            run.deadline = asyncio.get_running_loop().call_later(start.engine_request.remaining_ms / 1000, late)
        self._admission.push(run)

    def cancel(self, session: RouterSession, cancel: wire.Cancel) -> None:
        """End a run; one that is unknown can't start for a while."""
        run = self.runs.get(cancel.run)
        if run is None:
            self.runs.add_tombstone(cancel.run, self._host.lease_s)
            return
        if cancel.HasField("output") and cancel.output != run.output:
            return  # no output of that number is here to be ended
        self._ensure_attached(run, session, cancel.run)
        if cancel.HasField("end_position"):
            run.truncated_at = run.index_of(cancel.end_position)
            if run.end is not None:
                self._truncate_cached(run, cancel.end_position)
        telling.ended(run)
        late = cancel.reason == wire.Cancel.REASON_DEADLINE
        self.cancel_run(run, wire.OutputEnd.REASON_DEADLINE if late else wire.OutputEnd.REASON_CANCELLED)

    def adopt(self, session: RouterSession, adopt: wire.Adopt) -> None:
        """The sender takes over a run that another router started."""
        run = self._known(session, adopt.run)
        if run is not None:
            session.send(wire.WorkerMessage(run_status=self.attach(run, session, adopt.run, adopt.resume)))
            self.catch_up(run, adopt.resume)

    def resend(self, session: RouterSession, resend: wire.Resend) -> None:
        """Tokens of a run once more."""
        run = self._known(session, resend.run)
        if run is not None:
            self._ensure_attached(run, session, resend.run)
            telling.repeated(run, [resend.resume], self.step)

    def migrate(self, session: RouterSession, migrate: wire.Migrate) -> None:
        """Another worker is to go on with a run, or is not any more. Of one that has ended, that was told."""
        run = self._known(session, migrate.run)
        if run is None or migrate.output != run.output:
            return
        self._ensure_attached(run, session, migrate.run)
        if migrate.withdrawn:
            self._migrations.withdraw(run)
        elif run.end is None and run.ending is None:
            self._migrate(run)

    def _migrate(self, run: DecodeRun) -> None:
        if run.phase == wire.RunStatus.PHASE_RUNNING:
            self._migrations.issue_ticket(run)
        elif run.phase == wire.RunStatus.PHASE_WAITING and (run.ticket is None or self._admission.withdraw(run)):
            self._host.loop.post(lambda engine: engine.cancel(run.request.id))
            self._refuse(run, wire.Failure(cause=wire.CAUSE_DRAINING, detail="it had not begun: start it elsewhere"))
        else:
            run.migration_requested = True  # its cache is on its way here

    def forget(self, ref: wire.Run) -> None:
        """Forget a run that has ended or was given to another worker. Any other is cancelled, and forgotten once its
        owner was sent the end."""
        run = self.runs.get(ref)
        if run is None:
            return
        if run.end is not None or self._migrations.is_committed(run):
            self.drop(run)
        else:
            run.is_retired = True
            self.cancel_run(run, wire.OutputEnd.REASON_CANCELLED)

    def _known(self, session: RouterSession, ref: wire.Run) -> DecodeRun | None:
        run = self.runs.get(ref)
        if run is None:
            failure = wire.Failure(cause=wire.CAUSE_UNKNOWN_RUN, detail="never known here, or forgotten")
            session.send(wire.WorkerMessage(failed=wire.Failed(run=ref, failure=failure)))
        return run

    # -- who owns what ------------------------------------------------------------------------------------------

    def attach(
        self, run: DecodeRun, session: RouterSession, ref: wire.Run, next: Iterable[wire.ResumePosition] = ()
    ) -> wire.RunStatus:
        """Make a run the session's, under the epoch of ``run``, and say how it stands."""
        if run.session is not session:
            self._notify_superseded(run, ref.epoch)
            self._detach_session(run)
            run.session, run.router, run.slot = session, session.router, session.take_slot()
        run.ref.epoch = ref.epoch
        if run.orphan_timer is not None:
            run.orphan_timer.cancel()
            run.orphan_timer = None
        return run.message(next)

    def _ensure_attached(self, run: DecodeRun, session: RouterSession, ref: wire.Run) -> None:
        """The session speaks of a run as its own. When it has not named it before, it learns its slot."""
        new = run.session is not session
        stands = self.attach(run, session, ref)
        if new:
            session.send(wire.WorkerMessage(run_status=stands))

    def catch_up(self, run: DecodeRun, next: Iterable[wire.ResumePosition]) -> None:
        """Tell a run's new session what it lacks."""
        if run.session is not None:
            for message in run.prompt_logprobs:
                run.session.send(wire.WorkerMessage(prompt_logprobs=message))
        telling.decode_started(run, run.position)
        telling.repeated(run, next, self.step)
        if run.offered is not None and run.offered.run.epoch != run.ref.epoch:
            self._migrations.withdraw(run)  # its new owner knows of no taker

    def detach(self, session: RouterSession) -> None:
        """A session broke: its runs go on as orphans, for one lease."""
        for run in self.runs:
            if run.session is session:
                self._detach_session(run)
                self._start_orphan_timer(run)

    def orphans_of(self, router: wire.Peer) -> list[DecodeRun]:
        """Runs of earlier sessions of this incarnation of a router. Those of an earlier one may be adopted."""
        return [run for run in self.runs if run.session is None and same_incarnation(run.router, router)]

    def renewals_of(self, session: RouterSession) -> list[bytes]:
        """Tickets that it brought and that wait here to be opened."""
        waiting = wire.RunStatus.PHASE_WAITING
        mine = (run for run in self.runs if run.session is session and run.phase == waiting)
        return [run.ticket.id for run in mine if run.ticket is not None]

    def _on_new_owner(self, ref: wire.Run) -> None:
        """A request has another owner, who names one attempt: the others are nobody's any more."""
        for run in self.runs:
            if run.ref.request == ref.request and run.key != key_of(ref):
                self._notify_superseded(run, ref.epoch)
                self.drop(run)

    def _notify_superseded(self, run: DecodeRun, epoch: int) -> None:
        """Tell the owner of a run, if he is here, that another owns it now."""
        if run.session is not None:
            run.session.send(wire.WorkerMessage(superseded=wire.Superseded(run=run.ref, epoch=epoch)))

    def _detach_session(self, run: DecodeRun) -> None:
        if run.session is not None:
            run.session.free_slot(run.slot)
            run.session = None

    def _start_orphan_timer(self, run: DecodeRun) -> None:
        """An orphan is forgotten one lease after its session broke, or after its end."""
        if run.orphan_timer is not None:
            run.orphan_timer.cancel()
        run.orphan_timer = asyncio.get_running_loop().call_later(self._host.lease_s, self.drop, run)

    # -- in -----------------------------------------------------------------------------------------------------

    def _on_admission(self, run: DecodeRun, outcome: Outcome) -> None:
        """The engine answered for a run that wanted in."""
        if isinstance(outcome, InvalidRequest):
            self._refuse(run, RequestRejected.of(outcome).failure)
        elif isinstance(outcome, EngineStopped):
            self._refuse(run, wire.Failure(cause=wire.CAUSE_ENGINE, detail=str(outcome)))
        elif run.ending is not None:
            self._release(run)
        elif isinstance(outcome, IncomingSequence):
            self._fetch(run, outcome)

    def _fetch(self, run: DecodeRun, arrival: IncomingSequence) -> None:
        """Room is reserved: pull the cache into it."""
        assert run.ticket is not None
        run.phase = wire.RunStatus.PHASE_ARRIVING
        telling.scheduled(run, arrival.cached_blocks * self._host.shape.block_size)
        run.fetch = self._fetches.fetch(run.ticket, arrival)
        run.fetch.add_done_callback(partial(self._fetched, run))

    def _fetched(self, run: DecodeRun, fetch: asyncio.Task[TransferResult]) -> None:
        assert run.ticket is not None
        error = None if fetch.cancelled() else fetch.exception()
        if run.ending is not None or fetch.cancelled():
            self._release(run)
        elif error is not None:
            self._fail(run, failure_from(error, run.ticket.sender))
        else:
            self._join(run, fetch.result())

    def _join(self, run: DecodeRun, taken: TransferResult) -> None:
        """The sequence is ours. The answer came with its first step: what that told is caught up with."""
        run.phase = wire.RunStatus.PHASE_RUNNING
        run.tokens.extend(taken.output[run.prior_tokens :])
        for entry in taken.logprobs:
            if run.prior_tokens <= entry.entry < len(taken.output):
                run.logprobs[entry.entry] = logprobs_from_wire(taken.output[entry.entry], entry)
        began = run.timeline.scheduled if run.timeline else None
        owned = taken.owned if began is None else min(began, taken.owned)
        path = wire.DecodeStarted.Handoff(handoff_us=microseconds(owned - taken.opened), bytes=taken.received)
        path.decode_wait_us = 0 if began is None else microseconds(began - owned)
        run.decode_started = wire.DecodeStarted(handoff=path)
        tokens_before_join, run.tokens_before_join = run.tokens_before_join, []
        for token in tokens_before_join:
            run.note(token)
        telling.decode_started(run, run.request.prompt_len + run.prior_tokens)
        if run.session is not None:
            for frame in replay_frames(run, run.prior_tokens, self.step):
                run.session.send(frame)
        if run.end_before_join is not None:
            self._on_ended(run, run.end_before_join)
        elif run.migration_requested:
            self._migrations.issue_ticket(run)

    def _refuse(self, run: DecodeRun, failure: wire.Failure) -> None:
        """The engine does not take it."""
        self.runs.leaving.discard(run)
        if self.runs.holds(run) and run.end is None:
            telling.refused(run, failure)
            self._remove(run)

    # -- out ----------------------------------------------------------------------------------------------------

    def cancel_run(self, run: DecodeRun, reason: wire.OutputEnd.Reason) -> None:
        """Cancel a run wherever it stands; ``SequenceFinished`` follows once it holds nothing."""
        if run.end is not None or run.ending is not None:
            return
        run.ending = reason
        self.runs.leaving.add(run)
        if self._admission.withdraw(run):
            self._release(run)
        elif run.phase == wire.RunStatus.PHASE_ARRIVING and run.fetch is not None:
            run.fetch.cancel()  # and ``_fetched`` lets go
        elif run.offered is not None:  # after the seal the engine has no end to tell
            self._migrations.end(run, by_itself=False)
            self._cancel(run, then=partial(self._finish, run))
        elif run.ticket is None or run.phase == wire.RunStatus.PHASE_RUNNING:
            self._cancel(run, then=lambda: None)  # the engine tells its end
        # else the engine is being asked for room, and ``_on_admission`` lets go

    def drop(self, run: DecodeRun) -> None:
        """End a run that nobody will ask for, and forget it."""
        self._detach_session(run)
        self.cancel_run(run, wire.OutputEnd.REASON_CANCELLED)
        self.runs.remove(run)

    def _release(self, run: DecodeRun) -> None:
        """Free whatever is held for a cancelled run, here and at its giver, then tell its end."""
        if run.ticket is not None:  # a fetch that was cancelled may not have come so far as to say it
            self._fetches.decline(run.ticket)
        self._cancel(run, then=partial(self._finish, run))

    def _cancel(self, run: DecodeRun, then: Callable[[], object]) -> None:
        """The engine lets go of it; then nothing is left here."""

        def gone() -> None:
            self.runs.leaving.discard(run)
            then()

        self._host.loop.post(lambda engine: engine.cancel(run.request.id, run.kept), then=gone)

    def _truncate_cached(self, run: DecodeRun, position: int) -> None:
        """It had ended by itself before its owner found that it should have stopped there."""
        tokens = [*run.request.token_ids[: run.request.prompt_len], *run.tokens]
        self._host.loop.post(lambda engine: engine.forget(tokens, run.request.salt, position))

    def _finish(self, run: DecodeRun, reason: wire.OutputEnd.Reason | None = None) -> None:
        """The output is written: by itself, or (no ``reason``) as far as was asked."""
        if run.end is not None or not self.runs.holds(run):
            return
        reason = reason or run.ending or wire.OutputEnd.REASON_CANCELLED
        if run.truncated_at is not None:
            del run.tokens[run.truncated_at :]
        run.phase = wire.RunStatus.PHASE_ENDED
        run.end = wire.OutputEnd(output=run.output, reason=reason, end_position=run.position)
        self._migrations.end(run, by_itself=True)
        self.runs.stop_events(run)
        run.stop_clocks()
        if run.session is None:
            self._start_orphan_timer(run)
        telling.ended(run)
        if run.is_retired:
            self.drop(run)

    def _fail(self, run: DecodeRun, failure: wire.Failure) -> None:
        """It ends here before its output does. Nothing is kept: its owner has what it was told."""
        if self.runs.holds(run) and run.end is None:
            telling.failed(run, failure)
            self._remove(run)

    def _remove(self, run: DecodeRun) -> None:
        run.ending = run.ending or wire.OutputEnd.REASON_CANCELLED  # for an answer that is still on its way
        self._migrations.end(run, by_itself=False)
        self._detach_session(run)
        self._admission.withdraw(run)
        self.runs.remove(run)

    # -- what the engine tells ----------------------------------------------------------------------------------

    def _on_step(self, output: StepOutput) -> None:
        self.step = output.step
        known = self.runs.by_sequence
        for begun in output.begun:
            if run := known.get(begun.id):
                run.timeline = begun.timeline
                if run.ticket is None:
                    run.phase = wire.RunStatus.PHASE_RUNNING
                    telling.scheduled(run, begun.cached)
        for told in output.prompt_logprobs:
            if run := known.get(told.id):
                telling.explained(run, told)
        telling.written(known, output.tokens, self.step)
        for ended in output.ended:
            if run := known.get(ended.id):
                self._on_ended(run, ended)
        self._admission.on_step(output)

    def _on_ended(self, run: DecodeRun, ended: SequenceFinished) -> None:
        run.timeline = ended.timeline
        if run.phase == wire.RunStatus.PHASE_ARRIVING:
            run.end_before_join = ended
        elif ended.reason is FinishReason.FAILED:
            self._fail(run, wire.Failure(cause=wire.CAUSE_ENGINE, detail=ended.detail))
        elif ended.reason is FinishReason.CANCELLED:
            self._finish(run)
        else:
            self._finish(run, end_reason(ended.reason, run.stopping))

    def _on_crash(self, stopped: EngineStopped) -> None:
        """Nothing more will come for anyone."""
        self._validator.stopped = stopped
        for run in self.runs:
            self._fail(run, wire.Failure(cause=wire.CAUSE_ENGINE, detail=str(stopped)))
            if run.fetch is not None:
                run.fetch.cancel()

    # -- the end of the worker ----------------------------------------------------------------------------------

    async def close(self) -> None:
        """Drop everything, and see what runs for it end."""
        self.runs.clear_tombstones()
        for run in self.runs:
            self.drop(run)
        await self._fetches.close()
