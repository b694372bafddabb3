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
from decant.worker.decode.frames import again
from decant.worker.decode.kv_fetch import KvFetches, why
from decant.worker.decode.migration import MigrationSource
from decant.worker.decode.notifications import microseconds
from decant.worker.decode.runs import DecodeRun, RunTable, key_of
from decant.worker.decode.session import RouterSession
from decant.worker.decode.start_validation import StartValidator
from decant.worker.engine_host import EngineHost
from decant.worker.wire_codec import RequestRejected, end_reason, logprobs_of


class DecodeRunManager:
    """The runs of one worker. ``step`` is the engine's last one."""

    def __init__(self, hub: EngineHost) -> None:
        self.runs = RunTable(hub.epochs)
        self.step = 0
        self._hub = hub
        self._starts = StartValidator(hub, self.runs)
        self._entrance = DecodeAdmission(hub, self._settle)
        self._fetching = KvFetches(hub)
        self._giving = MigrationSource(hub, self.runs, self._fail)
        hub.step_listeners.append(self._on_step)
        hub.crash_listeners.append(self._on_crash)
        hub.epochs.listeners.append(self._on_new_owner)

    # -- what a router asks -------------------------------------------------------------------------------------

    def start(self, session: RouterSession, start: wire.Start) -> None:
        """Begin a run, or say how it stands."""
        held = self.runs.get(start.run)
        if held is not None and held.run.epoch == start.run.epoch:
            session.tell(wire.WorkerMessage(run_status=self.attach(held, session, start.run)))
            return
        if held is not None:  # its new owner does not know of it, and begins anew
            self._dispossess(held, start.run.epoch)
            self.drop(held)
        try:
            held = self._starts.take(start)
        except RequestRejected as refused:
            session.tell(wire.WorkerMessage(refused=wire.Refused(run=start.run, failure=refused.failure)))
            return
        self.runs.add(held)
        self.attach(held, session, start.run)
        if start.engine_request.HasField("remaining_ms"):
            late = partial(self.end_early, held, wire.OutputEnd.REASON_DEADLINE)
            held.deadline = asyncio.get_running_loop().call_later(start.engine_request.remaining_ms / 1000, late)
        self._entrance.push(held)

    def cancel(self, session: RouterSession, cancel: wire.Cancel) -> None:
        """End a run; one that is unknown can't start for a while."""
        held = self.runs.get(cancel.run)
        if held is None:
            self.runs.mark(cancel.run, self._hub.lease_s)
            return
        if cancel.HasField("output") and cancel.output != held.output:
            return  # no output of that number is here to be ended
        self._claim(held, session, cancel.run)
        if cancel.HasField("end_position"):
            held.cut = held.index_of(cancel.end_position)
            if held.end is not None:
                self._forget_behind(held, cancel.end_position)
        telling.ended(held)
        late = cancel.reason == wire.Cancel.REASON_DEADLINE
        self.end_early(held, wire.OutputEnd.REASON_DEADLINE if late else wire.OutputEnd.REASON_CANCELLED)

    def adopt(self, session: RouterSession, adopt: wire.Adopt) -> None:
        """The sender takes over a run that another router started."""
        held = self._known(session, adopt.run)
        if held is not None:
            session.tell(wire.WorkerMessage(run_status=self.attach(held, session, adopt.run, adopt.resume)))
            self.catch_up(held, adopt.resume)

    def resend(self, session: RouterSession, resend: wire.Resend) -> None:
        """Tokens of a run once more."""
        held = self._known(session, resend.run)
        if held is not None:
            self._claim(held, session, resend.run)
            telling.repeated(held, [resend.resume], self.step)

    def migrate(self, session: RouterSession, migrate: wire.Migrate) -> None:
        """Another worker is to go on with a run, or is not any more. Of one that has ended, that was told."""
        held = self._known(session, migrate.run)
        if held is None or migrate.output != held.output:
            return
        self._claim(held, session, migrate.run)
        if migrate.withdrawn:
            self._giving.withdraw(held)
        elif held.end is None and held.ending is None:
            self._give(held)

    def _give(self, held: DecodeRun) -> None:
        if held.phase == wire.RunStatus.PHASE_RUNNING:
            self._giving.offer(held)
        elif held.phase == wire.RunStatus.PHASE_WAITING and (held.ticket is None or self._entrance.withdraw(held)):
            self._hub.loop.post(lambda engine: engine.cancel(held.request.id))
            self._refuse(held, wire.Failure(cause=wire.CAUSE_DRAINING, detail="it had not begun: start it elsewhere"))
        else:
            held.is_asked_for = True  # its cache is on its way here

    def forget(self, run: wire.Run) -> None:
        """Forget a run that has ended or was given to another worker. Any other is cancelled, and forgotten once its
        owner was sent the end."""
        held = self.runs.get(run)
        if held is None:
            return
        if held.end is not None or self._giving.is_sealed(held):
            self.drop(held)
        else:
            held.is_retired = True
            self.end_early(held, wire.OutputEnd.REASON_CANCELLED)

    def _known(self, session: RouterSession, run: wire.Run) -> DecodeRun | None:
        held = self.runs.get(run)
        if held is None:
            failure = wire.Failure(cause=wire.CAUSE_UNKNOWN_RUN, detail="never known here, or forgotten")
            session.tell(wire.WorkerMessage(failed=wire.Failed(run=run, failure=failure)))
        return held

    # -- who owns what ------------------------------------------------------------------------------------------

    def attach(
        self, held: DecodeRun, session: RouterSession, run: wire.Run, next: Iterable[wire.ResumePosition] = ()
    ) -> wire.RunStatus:
        """Make a run the session's, under the epoch of ``run``, and say how it stands."""
        if held.session is not session:
            self._dispossess(held, run.epoch)
            self._part(held)
            held.session, held.router, held.slot = session, session.router, session.take_slot()
        held.run.epoch = run.epoch
        if held.patience is not None:
            held.patience.cancel()
            held.patience = None
        return held.message(next)

    def _claim(self, held: DecodeRun, session: RouterSession, run: wire.Run) -> None:
        """The session speaks of a run as its own. When it has not named it before, it learns its slot."""
        new = held.session is not session
        stands = self.attach(held, session, run)
        if new:
            session.tell(wire.WorkerMessage(run_status=stands))

    def catch_up(self, held: DecodeRun, next: Iterable[wire.ResumePosition]) -> None:
        """Tell a run's new session what it lacks."""
        if held.session is not None:
            for message in held.prompt_logprobs:
                held.session.tell(wire.WorkerMessage(prompt_logprobs=message))
        telling.decode_started(held, held.position)
        telling.repeated(held, next, self.step)
        if held.offered is not None and held.offered.run.epoch != held.run.epoch:
            self._giving.withdraw(held)  # its new owner knows of no taker

    def detach(self, session: RouterSession) -> None:
        """A session broke: its runs go on as orphans, for one lease."""
        for held in self.runs:
            if held.session is session:
                self._part(held)
                self._lose_patience(held)

    def orphans_of(self, router: wire.Peer) -> list[DecodeRun]:
        """Runs of earlier sessions of this incarnation of a router. Those of an earlier one may be adopted."""
        return [held for held in self.runs if held.session is None and same_incarnation(held.router, router)]

    def renewals_of(self, session: RouterSession) -> list[bytes]:
        """Tickets that it brought and that wait here to be opened."""
        waiting = wire.RunStatus.PHASE_WAITING
        mine = (held for held in self.runs if held.session is session and held.phase == waiting)
        return [held.ticket.id for held in mine if held.ticket is not None]

    def _on_new_owner(self, run: wire.Run) -> None:
        """A request has another owner, who names one attempt: the others are nobody's any more."""
        for held in self.runs:
            if held.run.request == run.request and held.key != key_of(run):
                self._dispossess(held, run.epoch)
                self.drop(held)

    def _dispossess(self, held: DecodeRun, epoch: int) -> None:
        """Tell the owner of a run, if he is here, that another owns it now."""
        if held.session is not None:
            held.session.tell(wire.WorkerMessage(superseded=wire.Superseded(run=held.run, epoch=epoch)))

    def _part(self, held: DecodeRun) -> None:
        if held.session is not None:
            held.session.free_slot(held.slot)
            held.session = None

    def _lose_patience(self, held: DecodeRun) -> None:
        """An orphan is forgotten one lease after its session broke, or after its end."""
        if held.patience is not None:
            held.patience.cancel()
        held.patience = asyncio.get_running_loop().call_later(self._hub.lease_s, self.drop, held)

    # -- in -----------------------------------------------------------------------------------------------------

    def _settle(self, held: DecodeRun, outcome: Outcome) -> None:
        """The engine answered for a run that wanted in."""
        if isinstance(outcome, InvalidRequest):
            self._refuse(held, RequestRejected.of(outcome).failure)
        elif isinstance(outcome, EngineStopped):
            self._refuse(held, wire.Failure(cause=wire.CAUSE_ENGINE, detail=str(outcome)))
        elif held.ending is not None:
            self._let_go(held)
        elif isinstance(outcome, IncomingSequence):
            self._fetch(held, outcome)

    def _fetch(self, held: DecodeRun, arrival: IncomingSequence) -> None:
        """Room is reserved: pull the cache into it."""
        assert held.ticket is not None
        held.phase = wire.RunStatus.PHASE_ARRIVING
        telling.scheduled(held, arrival.cached_blocks * self._hub.shape.block_size)
        held.fetch = self._fetching.fetch(held.ticket, arrival)
        held.fetch.add_done_callback(partial(self._fetched, held))

    def _fetched(self, held: DecodeRun, fetch: asyncio.Task[TransferResult]) -> None:
        assert held.ticket is not None
        error = None if fetch.cancelled() else fetch.exception()
        if held.ending is not None or fetch.cancelled():
            self._let_go(held)
        elif error is not None:
            self._fail(held, why(error, held.ticket.sender))
        else:
            self._join(held, fetch.result())

    def _join(self, held: DecodeRun, taken: TransferResult) -> None:
        """The sequence is ours. The answer came with its first step: what that told is caught up with."""
        held.phase = wire.RunStatus.PHASE_RUNNING
        held.tokens.extend(taken.output[held.written_before :])
        for entry in taken.logprobs:
            if held.written_before <= entry.entry < len(taken.output):
                held.logprobs[entry.entry] = logprobs_of(taken.output[entry.entry], entry)
        began = held.timeline.scheduled if held.timeline else None
        owned = taken.owned if began is None else min(began, taken.owned)
        path = wire.DecodeStarted.Handoff(handoff_us=microseconds(owned - taken.opened), bytes=taken.received)
        path.decode_wait_us = 0 if began is None else microseconds(began - owned)
        held.decode_started = wire.DecodeStarted(handoff=path)
        early, held.early = held.early, []
        for token in early:
            held.note(token)
        telling.decode_started(held, held.request.prompt_len + held.written_before)
        if held.session is not None:
            for frame in again(held, held.written_before, self.step):
                held.session.tell(frame)
        if held.early_end is not None:
            self._ended(held, held.early_end)
        elif held.is_asked_for:
            self._giving.offer(held)

    def _refuse(self, held: DecodeRun, failure: wire.Failure) -> None:
        """The engine does not take it."""
        self.runs.leaving.discard(held)
        if self.runs.holds(held) and held.end is None:
            telling.refused(held, failure)
            self._forget(held)

    # -- out ----------------------------------------------------------------------------------------------------

    def end_early(self, held: DecodeRun, reason: wire.OutputEnd.Reason) -> None:
        """Cancel a run wherever it stands; ``SequenceFinished`` follows once it holds nothing."""
        if held.end is not None or held.ending is not None:
            return
        held.ending = reason
        self.runs.leaving.add(held)
        if self._entrance.withdraw(held):
            self._let_go(held)
        elif held.phase == wire.RunStatus.PHASE_ARRIVING and held.fetch is not None:
            held.fetch.cancel()  # and ``_fetched`` lets go
        elif held.offered is not None:  # after the seal the engine has no end to tell
            self._giving.end(held, by_itself=False)
            self._cancel(held, then=partial(self._finish, held))
        elif held.ticket is None or held.phase == wire.RunStatus.PHASE_RUNNING:
            self._cancel(held, then=lambda: None)  # the engine tells its end
        # else the engine is being asked for room, and ``_settle`` lets go

    def drop(self, held: DecodeRun) -> None:
        """End a run that nobody will ask for, and forget it."""
        self._part(held)
        self.end_early(held, wire.OutputEnd.REASON_CANCELLED)
        self.runs.remove(held)

    def _let_go(self, held: DecodeRun) -> None:
        """Free whatever is held for a cancelled run, here and at its giver, then tell its end."""
        if held.ticket is not None:  # a fetch that was cancelled may not have come so far as to say it
            self._fetching.give_up(held.ticket)
        self._cancel(held, then=partial(self._finish, held))

    def _cancel(self, held: DecodeRun, then: Callable[[], object]) -> None:
        """The engine lets go of it; then nothing is left here."""

        def gone() -> None:
            self.runs.leaving.discard(held)
            then()

        self._hub.loop.post(lambda engine: engine.cancel(held.request.id, held.kept), then=gone)

    def _forget_behind(self, held: DecodeRun, position: int) -> None:
        """It had ended by itself before its owner found that it should have stopped there."""
        tokens = [*held.request.token_ids[: held.request.prompt_len], *held.tokens]
        self._hub.loop.post(lambda engine: engine.forget(tokens, held.request.salt, position))

    def _finish(self, held: DecodeRun, reason: wire.OutputEnd.Reason | None = None) -> None:
        """The output is written: by itself, or (no ``reason``) as far as was asked."""
        if held.end is not None or not self.runs.holds(held):
            return
        reason = reason or held.ending or wire.OutputEnd.REASON_CANCELLED
        if held.cut is not None:
            del held.tokens[held.cut :]
        held.phase = wire.RunStatus.PHASE_ENDED
        held.end = wire.OutputEnd(output=held.output, reason=reason, end_position=held.position)
        self._giving.end(held, by_itself=True)
        self.runs.silence(held)
        held.stop_clocks()
        if held.session is None:
            self._lose_patience(held)
        telling.ended(held)
        if held.is_retired:
            self.drop(held)

    def _fail(self, held: DecodeRun, failure: wire.Failure) -> None:
        """It ends here before its output does. Nothing is kept: its owner has what it was told."""
        if self.runs.holds(held) and held.end is None:
            telling.failed(held, failure)
            self._forget(held)

    def _forget(self, held: DecodeRun) -> None:
        held.ending = held.ending or wire.OutputEnd.REASON_CANCELLED  # for an answer that is still on its way
        self._giving.end(held, by_itself=False)
        self._part(held)
        self._entrance.withdraw(held)
        self.runs.remove(held)

    # -- what the engine tells ----------------------------------------------------------------------------------

    def _on_step(self, output: StepOutput) -> None:
        self.step = output.step
        known = self.runs.by_sequence
        for begun in output.begun:
            if held := known.get(begun.id):
                held.timeline = begun.timeline
                if held.ticket is None:
                    held.phase = wire.RunStatus.PHASE_RUNNING
                    telling.scheduled(held, begun.cached)
        for told in output.prompt_logprobs:
            if held := known.get(told.id):
                telling.explained(held, told)
        telling.written(known, output.tokens, self.step)
        for ended in output.ended:
            if held := known.get(ended.id):
                self._ended(held, ended)
        self._entrance.on_step(output)

    def _ended(self, held: DecodeRun, ended: SequenceFinished) -> None:
        held.timeline = ended.timeline
        if held.phase == wire.RunStatus.PHASE_ARRIVING:
            held.early_end = ended
        elif ended.reason is FinishReason.FAILED:
            self._fail(held, wire.Failure(cause=wire.CAUSE_ENGINE, detail=ended.detail))
        elif ended.reason is FinishReason.CANCELLED:
            self._finish(held)
        else:
            self._finish(held, end_reason(ended.reason, held.stopping))

    def _on_crash(self, stopped: EngineStopped) -> None:
        """Nothing more will come for anyone."""
        self._starts.stopped = stopped
        for held in self.runs:
            self._fail(held, wire.Failure(cause=wire.CAUSE_ENGINE, detail=str(stopped)))
            if held.fetch is not None:
                held.fetch.cancel()

    # -- the end of the worker ----------------------------------------------------------------------------------

    async def close(self) -> None:
        """Drop everything, and see what runs for it end."""
        self.runs.clear_marks()
        for held in self.runs:
            self.drop(held)
        await self._fetching.close()
