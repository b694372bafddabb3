"""Runs of a decode worker, as changed by routers' commands and the engine's events.

Methods run on the event loop and wait for nothing.
"""

from __future__ import annotations

from decant.engine.errors import EngineStopped
from decant.engine.output import StepOutput
from decant.protos import worker_pb2 as wire
from decant.worker.decode.execution import RunExecutor
from decant.worker.decode.notifications import send_step_tokens
from decant.worker.decode.ownership import RunOwnership
from decant.worker.decode.run import DecodeRun
from decant.worker.decode.run_table import RunTable
from decant.worker.decode.session import RouterSession
from decant.worker.decode.start_validation import StartValidator
from decant.worker.engine_host import EngineHost
from decant.worker.wire_codec import RequestRejected


class DecodeRunManager:
    """Entry to the decode runs: applies each command of a router, and each event of the engine, to its run.

    `DecodeService` calls it for a session's messages, after it has checked that their sender owns the request.
    """

    def __init__(self, host: EngineHost) -> None:
        self.runs = RunTable(host.epochs)
        self.executor = RunExecutor(host, self.runs)
        self.ownership = RunOwnership(self.runs, self.executor)
        self._host = host
        self._validator = StartValidator(host, self.runs)
        host.steps.subscribe(self._on_step)
        host.steps.subscribe(self.executor.admission.on_step)
        host.crashes.subscribe(self._on_crash)
        host.epochs.new_owners.subscribe(self.ownership.on_new_epoch)
        host.sender.leases.ends.subscribe(self.executor.migrations.on_lease_end)

    # -- messages -----------------------------------------------------------------------------------------------

    def start(self, session: RouterSession, start: wire.Start) -> None:
        run = self.runs.get(start.run)
        if run is not None and run.ref.epoch == start.run.epoch:
            session.send(wire.WorkerMessage(run_status=self.ownership.attach(run, session, start.run)))
            return
        if run is not None:  # its new owner does not know it
            self.ownership.supersede(run, start.run.epoch)
        try:
            run = self._validator.validate(start)
        except RequestRejected as rejection:
            session.send(wire.WorkerMessage(refused=wire.Refused(run=start.run, failure=rejection.failure)))
            return
        self.runs.add(run)
        self.ownership.attach(run, session, start.run)
        request = start.engine_request
        self.executor.start(run, request.remaining_ms if request.HasField("remaining_ms") else None)

    def cancel(self, session: RouterSession, cancel: wire.Cancel) -> None:
        run = self.runs.get(cancel.run)
        if run is None:
            if not cancel.HasField("output"):  # the run itself may still come
                self.runs.add_tombstone(cancel.run, self._host.lease_s)
            return
        output = run.output(cancel.output) if cancel.HasField("output") else run.root
        if output is None:
            return
        self.ownership.ensure_attached(run, session, cancel.run)
        if cancel.HasField("end_position"):
            output.truncate_at(cancel.end_position)
            if output.end is not None:
                self.executor.truncate_cached(output, cancel.end_position)
        run.notify.ended(run.outputs)
        if cancel.HasField("output") and run.unfinished != [output]:
            self.executor.cancel_output(output)
            return
        is_late = cancel.reason == wire.Cancel.REASON_DEADLINE
        reason = wire.OutputEnd.REASON_DEADLINE if is_late else wire.OutputEnd.REASON_CANCELLED
        self.executor.cancel(run, reason)

    def adopt(self, session: RouterSession, adopt: wire.Adopt) -> None:
        run = self._find(session, adopt.run)
        if run is not None:
            status = self.ownership.attach(run, session, adopt.run, adopt.resume)
            session.send(wire.WorkerMessage(run_status=status))
            self.ownership.catch_up(run, adopt.resume)

    def resend(self, session: RouterSession, resend: wire.Resend) -> None:
        run = self._find(session, resend.run)
        if run is not None:
            self.ownership.ensure_attached(run, session, resend.run)
            run.notify.resend([resend.resume], self.executor.step)

    def migrate(self, session: RouterSession, migrate: wire.Migrate) -> None:
        run = self._find(session, migrate.run)
        if run is None:
            return
        self.ownership.ensure_attached(run, session, migrate.run)
        if migrate.withdrawn:
            self.executor.migrations.cancel(run)
        elif not run.has_ended and run.cancel_reason is None:
            self._offer(run)

    def _offer(self, run: DecodeRun) -> None:
        if run.phase == wire.RunStatus.PHASE_RUNNING:
            self.executor.migrations.issue_ticket(run)
        elif run.phase == wire.RunStatus.PHASE_WAITING:
            detail = "the run has not begun: start it elsewhere"
            self.executor.refuse(run, wire.Failure(cause=wire.CAUSE_DRAINING, detail=detail))
        else:
            run.offer.is_requested = True  # its cache is being fetched

    def forget(self, ref: wire.Run) -> None:
        run = self.runs.get(ref)
        if run is None:
            return
        if run.has_ended or self.executor.migrations.is_committed(run):
            self.executor.forget(run)
        else:
            run.is_forgotten = True
            self.executor.cancel(run, wire.OutputEnd.REASON_CANCELLED)

    def _find(self, session: RouterSession, ref: wire.Run) -> DecodeRun | None:
        run = self.runs.get(ref)
        if run is None:
            failure = wire.Failure(cause=wire.CAUSE_UNKNOWN_RUN, detail="this worker does not have the run")
            session.send(wire.WorkerMessage(failed=wire.Failed(run=ref, failure=failure)))
        return run

    # -- events ----------------------------------------------------------------------------------------------

    def _on_step(self, step: StepOutput) -> None:
        self.executor.step = step.step
        outputs = self.runs.by_sequence
        for started in step.started:
            if output := outputs.get(started.id):
                output.timeline = started.timeline
                run = output.run
                if run.ticket is None and output is run.root:
                    run.phase = wire.RunStatus.PHASE_RUNNING
                    run.notify.scheduled(started.cached)
        for part in step.prompt_logprobs:
            if output := outputs.get(part.id):
                output.run.notify.prompt_logprobs(part)
        send_step_tokens(outputs, step.tokens, step.step)
        for ended in step.ended:
            if output := outputs.get(ended.id):
                output.on_finished(ended)

    def _on_crash(self, stopped: EngineStopped) -> None:
        for run in self.runs:
            self.executor.fail(run, wire.Failure(cause=wire.CAUSE_ENGINE, detail=str(stopped)))

    async def close(self) -> None:
        self.runs.clear_tombstones()
        for run in self.runs:
            self.executor.forget(run)
        await self.executor.close()
