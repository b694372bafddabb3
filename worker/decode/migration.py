"""Live sequences on their way to another worker: their runs go on here until the seal, the giver's last word.

give ──> ticket ──> its fetch opens, blocks move ──> sealed ──> retired: the taker has joined
           │              │                            └──> failed: nobody has it, the owner begins anew
           └──────────────┴── withdrawn, lease over, fetch broken: the run goes on as if nothing had been asked
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from decant.handoff.leases import Lease
from decant.protos import worker_pb2 as wire
from decant.worker.decode.run import DecodeRun
from decant.worker.decode.run_table import RunTable
from decant.worker.engine_host import EngineHost
from decant.worker.wire_codec import logprobs_to_wire


class MigrationSource:
    """The gifts of one worker. ``fail`` hears of a run that was sealed, and that nobody took."""

    def __init__(self, host: EngineHost, runs: RunTable, fail: Callable[[DecodeRun, wire.Failure], None]) -> None:
        self._host = host
        self._runs = runs
        self._fail = fail

    def issue_ticket(self, run: DecodeRun) -> None:
        """Tell the owner of a running sequence the ticket for its cache; the same one until that ends."""
        if run.offered is None:
            ticket = wire.Ticket(
                run=run.ref,
                sender=self._host.peer,
                address=self._host.address,
                layout=self._host.layout,
                salt=run.request.salt,
                tokens=run.position,
                outputs=[run.output],
            )
            logprobs = partial(_logprobs, run)
            name, prompt = run.request.id, run.request.prompt_len
            run.offered = self._host.sender.issue(ticket, name, prompt, logprobs, is_live=True)
        lease = self._host.sender.leases.find(run.offered.id)
        if run.session is not None and lease is not None and not lease.opened:
            run.session.send(wire.WorkerMessage(ticket=run.offered))

    def withdraw(self, run: DecodeRun) -> None:
        """The owner has no use for the ticket: the run goes on, or has failed where it was sealed."""
        run.migration_requested = False
        if run.offered is None:
            return
        if self._host.sender.leases.find(run.offered.id) is None:
            self._fail(run, _abandoned("its taker was lost"))
            return
        failure = wire.Failure(cause=wire.CAUSE_RECLAIMED, detail="its owner withdrew the ticket")
        self._host.sender.reclaim(run.offered.id, failure)

    def is_committed(self, run: DecodeRun) -> bool:
        """Whether its seal was sent: another worker may run it now."""
        if run.offered is None:
            return False
        lease = self._host.sender.leases.find(run.offered.id)
        return lease is None or lease.committed

    def end(self, run: DecodeRun, *, by_itself: bool) -> None:
        """The run is over here. Who fetches one that ended by itself is told so by its fetch."""
        lease = None if run.offered is None else self._host.sender.leases.find(run.offered.id)
        if lease is not None and not (by_itself and lease.opened):
            failure = wire.Failure(cause=wire.CAUSE_RECLAIMED, detail="the run is over where it was given")
            self._host.sender.reclaim(lease.ticket.id, failure)

    def on_lease_end(self, lease: Lease) -> None:
        run = self._runs.by_sequence.get(lease.sequence)
        if run is None or run.offered is None or run.offered.id != lease.ticket.id:
            return
        if not lease.committed:
            run.offered = None
        elif not lease.owned and run.ending is None:
            self._fail(run, _abandoned(lease.failure.detail if lease.failure else "its taker let go of it"))


def _abandoned(detail: str) -> wire.Failure:
    return wire.Failure(cause=wire.CAUSE_OWNER_LOST, detail=f"given away, and nobody has it: {detail}")


def _logprobs(run: DecodeRun) -> Iterable[wire.TokenLogprobs]:
    """Of all its output that has some."""
    return [logprobs_to_wire(index, logprobs) for index, logprobs in run.logprobs.items()]
