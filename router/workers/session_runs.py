from __future__ import annotations

from collections.abc import Collection

from decant.protos import worker_pb2 as wire
from decant.router.workers.outgoing import Outgoing
from decant.router.workers.subscription import (
    MoveTest,
    OutputSubscription,
    RunKey,
    RunSubscription,
    RunTable,
    WriteError,
)
from decant.runtime.packed import unpack
from decant.runtime.telemetry import logs

_log = logs.get(__name__)


class SessionRuns:
    """Runs of one session; messages about them go to their sinks and listeners.

    The path of every token: one lookup a token, no task switch.
    """

    def __init__(self, worker_id: str, outgoing: Outgoing) -> None:
        self.table = RunTable()
        self._worker_id = worker_id
        self._outgoing = outgoing

    def owned(self) -> list[wire.Hello.Owned]:
        return [run.owned() for run in self.table]

    # What happens to all runs

    def on_welcome(self, welcome: wire.Welcome, hello_runs: Collection[RunKey]) -> None:
        """Start again what the worker may never have received: runs unknown to it or started after the hello."""
        for status in welcome.runs:
            self._on_run_status(status)
        for unknown in welcome.unknown_runs:
            run = self.table.get(unknown)
            if run is not None and run.start is not None:
                self._outgoing.send(run.opening_message())
            elif run is not None:
                self._fail(run, wire.CAUSE_UNKNOWN_RUN, "the worker does not have it after a broken session")
        for run in [each for each in self.table if each.key not in hello_runs]:
            self._outgoing.send(run.opening_message())  # started while the session was opened

    def on_draining(self) -> None:
        for run in self.table:
            run.listener.on_draining()

    def on_crowded(self, count: int, is_worth: MoveTest) -> int:
        """Let runs with up to ``count`` sequences in all ask to move to another worker; return how many did."""
        moved = 0
        for run in self.table:
            if moved == count:
                break
            moved += run.listener.on_crowded(count - moved, is_worth)
        return moved

    def fail_all(self, detail: str) -> None:
        for run in self.table:
            self._cancel(run)
            self._fail(run, wire.CAUSE_PEER_LOST, detail)

    # Messages about one run

    def handle(self, message: wire.WorkerMessage) -> bool:
        match message.WhichOneof("message"):
            case "frame":
                self._on_frame(message.frame)
            case "run_status":
                self._on_run_status(message.run_status)
            case "decode_started":
                self._on_decode_started(message.decode_started)
            case "ended":
                self._on_ended(message.ended)
            case "prompt_logprobs":
                if (run := self.table.get(message.prompt_logprobs.run)) is not None:
                    run.listener.on_prompt_logprobs(message.prompt_logprobs)
            case "scheduled":
                if (run := self.table.mark_reported(message.scheduled.run)) is not None:
                    run.listener.on_scheduled(message.scheduled)
            case "ticket":
                if (run := self.table.mark_reported(message.ticket.run)) is not None:
                    run.listener.on_offer(message.ticket)
            case _:
                return self._handle_failure(message)
        return True

    def _handle_failure(self, message: wire.WorkerMessage) -> bool:
        match message.WhichOneof("message"):
            case "refused":
                if (run := self.table.pop(message.refused.run)) is not None:
                    run.listener.on_refused(message.refused)
            case "failed":
                if (run := self.table.pop(message.failed.run)) is not None:
                    run.listener.on_failed(message.failed)
            case "superseded":
                if (run := self.table.pop(message.superseded.run)) is not None:
                    run.listener.on_superseded(message.superseded)
            case _:
                return False
        return True

    def _on_frame(self, frame: wire.Frame) -> None:
        by_slot = self.table.by_slot
        logprobs = {entry.entry: entry for entry in frame.logprobs}
        entries = zip(unpack(frame.slots), unpack(frame.positions), unpack(frame.tokens), strict=True)
        for entry, (slot, position, token) in enumerate(entries):
            output = by_slot.get(slot)
            if output is not None:
                error = output.sink.write(position, token, logprobs.get(entry) if logprobs else None)
                if error is not None:
                    self._on_write_error(output, error)
        if self.table.incomplete:
            for output in [each for each in self.table.incomplete if each.is_complete]:
                self._on_complete(output)

    def _on_write_error(self, output: OutputSubscription, error: WriteError) -> None:
        match error:
            case WriteError.GAP:
                self._request_resend(output)
            case WriteError.CONFLICT:
                self._reject(output.run, "it sent another token for a known position")
            case WriteError.MALFORMED:
                self._reject(output.run, "it sent a token or logprobs that the request can't have")

    def _reject(self, run: RunSubscription, detail: str) -> None:
        _log.error("invalid message from a worker", worker=self._worker_id, run=run.key, reason=detail)
        self._cancel(run)
        self._fail(run, wire.CAUSE_CORRUPT, detail)

    def _request_resend(self, output: OutputSubscription) -> None:
        """Request a resend once for each position: the connection loses nothing."""
        resume = output.resume_position
        if output.last_resend_position != resume.position:
            output.last_resend_position = resume.position
            self._outgoing.send(wire.RouterMessage(resend=wire.Resend(run=output.run.run, resume=resume)))

    def _on_decode_started(self, message: wire.DecodeStarted) -> None:
        if (run := self.table.mark_reported(message.run)) is not None:
            self.table.assign_slots(run, message.slots)
            run.listener.on_decode_started(message)

    def _on_run_status(self, status: wire.RunStatus) -> None:
        if (run := self.table.mark_reported(status.run)) is not None:
            self.table.assign_slots(run, status.slots)
            run.listener.on_run_status(status)
            for end in status.ended:
                self._on_ended(wire.Ended(run=status.run, end=end))

    def _on_ended(self, ended: wire.Ended) -> None:
        run, end = self.table.get(ended.run), ended.end
        if run is None:
            self._outgoing.forget(ended.run)
            return
        output = run.outputs.get(end.output)
        if output is None:
            return  # it is a repetition
        if end.end_position > output.sink.end_limit:
            self._reject(run, f"it ended at {end.end_position}, after {output.sink.end_limit}")
            return
        output.end = end
        if output.is_complete:
            self._on_complete(output)
        else:
            self.table.incomplete.add(output)
            self._request_resend(output)

    def _on_complete(self, output: OutputSubscription) -> None:
        assert output.end is not None
        is_last = self.table.remove_output(output)
        if is_last:
            self._outgoing.forget(output.run.run)
        output.run.listener.on_ended(output.end, is_last=is_last)

    def _cancel(self, run: RunSubscription) -> None:
        self._outgoing.cancel(wire.Cancel(run=run.run, reason=wire.Cancel.REASON_ATTEMPT))

    def _fail(self, run: RunSubscription, cause: wire.Cause, detail: str) -> None:
        self.table.remove(run)
        run.listener.on_failed(wire.Failed(run=run.run, failure=wire.Failure(cause=cause, detail=detail)))
