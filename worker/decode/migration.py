"""The source's side of a migration: a run continues here until its commit is sent to the target.

If the target is lost after the commit, the run fails.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from decant.engine.transfer import TransferCommit
from decant.handoff.leases import Lease
from decant.handoff.outgoing_sequence import committed_tokens
from decant.protos import worker_pb2 as wire
from decant.runtime.packed import pack
from decant.worker.decode.output import end_of
from decant.worker.decode.run import DecodeRun
from decant.worker.decode.run_table import RunTable
from decant.worker.engine_host import EngineHost
from decant.worker.wire_codec import logprobs_to_wire


class MigrationSource:
    def __init__(self, host: EngineHost, runs: RunTable, fail: Callable[[DecodeRun, wire.Failure], None]) -> None:
        self._host = host
        self._runs = runs
        self._fail = fail

    def issue_ticket(self, run: DecodeRun) -> None:
        """Send the owner a ticket: the same one while it is live and unopened."""
        if run.offer.ticket is None:
            outputs = run.unfinished
            requests = [output.request for output in outputs]
            run.offer.ticket = self._host.sender.issue(
                self._host.new_ticket(run.ref, requests, outputs[0].position),
                [request.id for request in requests],
                requests[0].prompt_len,
                partial(_committed_outputs, run),
                is_live=True,
            )
            run.span.event("migration offered")
        lease = self._host.sender.leases.find(run.offer.ticket.id)
        if run.owner.session is not None and lease is not None and not lease.is_opened:
            run.owner.session.send(wire.WorkerMessage(ticket=run.offer.ticket))

    def cancel(self, run: DecodeRun) -> None:
        run.offer.is_requested = False
        if run.offer.ticket is None:
            return
        if self._host.sender.leases.find(run.offer.ticket.id) is None:
            self._fail(run, _migration_failure("the target was lost"))
            return
        failure = wire.Failure(cause=wire.CAUSE_RECLAIMED, detail="the owner withdrew the ticket")
        self._host.sender.cancel(run.offer.ticket.id, failure)

    def is_committed(self, run: DecodeRun) -> bool:
        if run.offer.ticket is None:
            return False
        lease = self._host.sender.leases.find(run.offer.ticket.id)
        return lease is None or lease.is_committed

    def release(self, run: DecodeRun, *, is_finished: bool) -> None:
        """End the offer of a run; if its output ``is_finished``, an open fetch reports that nothing is left."""
        lease = None if run.offer.ticket is None else self._host.sender.leases.find(run.offer.ticket.id)
        if lease is not None and not (is_finished and lease.is_opened):
            failure = wire.Failure(cause=wire.CAUSE_RECLAIMED, detail="the run has ended at its source")
            self._host.sender.cancel(lease.ticket.id, failure)

    def on_lease_end(self, lease: Lease) -> None:
        run = self._runs.get(lease.ticket.run)
        if run is None or run.offer.ticket is None or run.offer.ticket.id != lease.ticket.id:
            return
        if not lease.is_committed:
            run.offer.ticket = None
        elif not lease.is_owned and run.cancel_reason is None:
            self._fail(run, _migration_failure(lease.failure.detail if lease.failure else "the target released it"))


def _migration_failure(detail: str) -> wire.Failure:
    return wire.Failure(cause=wire.CAUSE_OWNER_LOST, detail=f"migrated, and no worker has it: {detail}")


def _committed_outputs(run: DecodeRun, commit: TransferCommit) -> list[wire.TransferCommit.Output]:
    """Outputs of a commit, with log-probabilities, and those that have ended here."""
    outputs = committed_tokens(commit)
    moved = {each.output for each in outputs}
    for output in run.outputs:
        if output.index not in moved:
            end = output.end or end_of(output)
            outputs.append(wire.TransferCommit.Output(output=output.index, tokens=pack(output.tokens), finished=end))
    for each in outputs:
        source = run.output(each.output)
        if source is not None:
            each.logprobs.extend(logprobs_to_wire(index, one) for index, one in source.logprobs.items())
    return outputs
