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
from decant.worker.decode.runs import DecodeRun, RunTable
from decant.worker.engine_host import EngineHost
from decant.worker.wire_codec import token_logprobs


class MigrationSource:
    """The gifts of one worker. ``fail`` hears of a run that was sealed, and that nobody took."""

    def __init__(self, hub: EngineHost, runs: RunTable, fail: Callable[[DecodeRun, wire.Failure], None]) -> None:
        self._hub = hub
        self._runs = runs
        self._fail = fail
        hub.sender.office.listeners.append(self._on_lease_end)

    def offer(self, held: DecodeRun) -> None:
        """Tell the owner of a running sequence the ticket for its cache; the same one until that ends."""
        if held.offered is None:
            ticket = wire.Ticket(
                run=held.run,
                sender=self._hub.peer,
                address=self._hub.address,
                layout=self._hub.layout,
                salt=held.request.salt,
                tokens=held.position,
                outputs=[held.output],
            )
            logprobs = partial(_logprobs, held)
            name, prompt = held.request.id, held.request.prompt_len
            held.offered = self._hub.sender.issue(ticket, name, prompt, logprobs, is_live=True)
        lease = self._hub.sender.office.find(held.offered.id)
        if held.session is not None and lease is not None and not lease.opened:
            held.session.tell(wire.WorkerMessage(ticket=held.offered))

    def withdraw(self, held: DecodeRun) -> None:
        """The owner has no use for the ticket: the run goes on, or has failed where it was sealed."""
        held.is_asked_for = False
        if held.offered is None:
            return
        if self._hub.sender.office.find(held.offered.id) is None:
            self._fail(held, _nobody("its taker was lost"))
            return
        failure = wire.Failure(cause=wire.CAUSE_RECLAIMED, detail="its owner withdrew the ticket")
        self._hub.sender.reclaim(held.offered.id, failure)

    def is_sealed(self, held: DecodeRun) -> bool:
        """Whether its seal was sent: another worker may run it now."""
        if held.offered is None:
            return False
        lease = self._hub.sender.office.find(held.offered.id)
        return lease is None or lease.sealed

    def end(self, held: DecodeRun, *, by_itself: bool) -> None:
        """The run is over here. Who fetches one that ended by itself is told so by its fetch."""
        lease = None if held.offered is None else self._hub.sender.office.find(held.offered.id)
        if lease is not None and not (by_itself and lease.opened):
            failure = wire.Failure(cause=wire.CAUSE_RECLAIMED, detail="the run is over where it was given")
            self._hub.sender.reclaim(lease.ticket.id, failure)

    def _on_lease_end(self, lease: Lease) -> None:
        held = self._runs.by_sequence.get(lease.sequence)
        if held is None or held.offered is None or held.offered.id != lease.ticket.id:
            return
        if not lease.sealed:
            held.offered = None
        elif not lease.owned and held.ending is None:
            self._fail(held, _nobody(lease.failure.detail if lease.failure else "its taker let go of it"))


def _nobody(detail: str) -> wire.Failure:
    return wire.Failure(cause=wire.CAUSE_OWNER_LOST, detail=f"given away, and nobody has it: {detail}")


def _logprobs(held: DecodeRun) -> Iterable[wire.TokenLogprobs]:
    """Of all its output that has some."""
    return [token_logprobs(index, logprobs) for index, logprobs in held.logprobs.items()]
