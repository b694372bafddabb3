"""Tickets: the right to fetch one cache, once, for as long as somebody renews it.

issued ── renew, renew ──> opened ── acknowledged runs renew ──> sealed ── released ──> closed
   └── lease over ──────────┴──────── lease over ────────────────┴── 3 s over ────────> expired: the giver frees
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from decant.handoff.errors import HandoffFailed
from decant.protos import worker_pb2 as wire

COMMITTED_SECONDS = 3.0
"""After the seal, for the receiver's Release. Nothing is read from the blocks any more, and a receiver that joins later
than that keeps its sequence: the time is short, so that one that was killed costs no whole lease."""


@dataclass(slots=True)
class Lease:
    """A ticket that is alive here, and when it ends unless it is renewed (the event loop's clock)."""

    ticket: wire.Ticket
    sequence: str
    timer: asyncio.TimerHandle
    opened: bool = False
    receiver: wire.Peer | None = None
    committed: bool = False  # the seal was said: the taker may have it
    owned: bool = False  # the taker said that the sequence is its own
    failure: wire.Failure | None = None  # set when it ended otherwise than by its taker's word

    def remaining_ms(self, now: float) -> int:
        return max(0, round((self.timer.when() - now) * 1000))


class LeaseTable:
    """All tickets of one giver. Lives on one event loop.

    ``listeners`` are called with each lease that has ended; its ``failure`` says why, if it was not the taker.
    """

    def __init__(self, lease_ms: int, on_expired: Callable[[Lease], None]) -> None:
        self.lease_ms = lease_ms
        self.listeners: list[Callable[[Lease], None]] = []
        self._on_expired = on_expired
        self._leases: dict[bytes, Lease] = {}

    def issue(self, ticket: wire.Ticket, sequence: str) -> wire.Ticket:
        """Complete a ticket with an id and a lease; ``sequence`` is the engine's name for what it opens."""
        ticket.id = secrets.token_bytes(16)
        ticket.lease_ms = self.lease_ms
        self._leases[ticket.id] = Lease(ticket, sequence, self._timer(ticket.id))
        return ticket

    def renew_unopened(self, id: bytes) -> None:
        """Somebody holds this ticket and has not opened it yet: its time starts again. An open fetch renews by runs."""
        lease = self._leases.get(id)
        if lease is not None and not lease.opened:
            self.renew(id)

    def renew(self, id: bytes) -> bool:
        """Start a lease's time again; False when there is no such lease (any more)."""
        lease = self._leases.get(id)
        if lease is None:
            return False
        lease.timer.cancel()
        lease.timer = self._timer(id, committed=lease.committed)
        return True

    def commit(self, lease: Lease) -> None:
        """Its seal is sent now."""
        lease.committed = True
        self.renew(lease.ticket.id)

    def open(self, message: wire.Open) -> Lease:
        """Use a ticket. Raises HandoffFailed when it is not there, used already, or for somebody else's cache."""
        lease = self._leases.get(message.ticket)
        if lease is None or lease.opened:
            raise HandoffFailed(wire.CAUSE_LEASE_OVER, "no such ticket: its lease is over, or it was used")
        ticket = lease.ticket
        if message.sender.incarnation != ticket.sender.incarnation or message.sender.id != ticket.sender.id:
            raise HandoffFailed(wire.CAUSE_WRONG_PEER, "the ticket is of another life of this worker", ticket.sender)
        if message.run != ticket.run:
            raise HandoffFailed(wire.CAUSE_UNKNOWN_RUN, "the ticket is for another run")
        if message.layout != ticket.layout:
            raise HandoffFailed(wire.CAUSE_LAYOUT_DIFFERS, f"layout {message.layout:x} opens none of {ticket.layout:x}")
        if message.salt != ticket.salt:
            raise HandoffFailed(wire.CAUSE_SALT_DIFFERS, "the salts of the two ends differ")
        lease.opened, lease.receiver = True, message.receiver
        self.renew(message.ticket)
        return lease

    def close(self, id: bytes, failure: wire.Failure | None = None) -> Lease | None:
        """End a ticket, by its taker's word or because of ``failure``; None when it is not there (any more)."""
        lease = self._leases.pop(id, None)
        if lease is not None:
            lease.timer.cancel()
            self._notify(lease, failure)
        return lease

    def find(self, id: bytes) -> Lease | None:
        """The lease of a ticket, while it is alive."""
        return self._leases.get(id)

    def all(self) -> list[Lease]:
        """All that are alive."""
        return list(self._leases.values())

    def _timer(self, id: bytes, *, committed: bool = False) -> asyncio.TimerHandle:
        seconds = min(COMMITTED_SECONDS, self.lease_ms / 1000) if committed else self.lease_ms / 1000
        return asyncio.get_running_loop().call_later(seconds, self._expire, id)

    def _expire(self, id: bytes) -> None:
        lease = self._leases.pop(id, None)
        if lease is not None:
            detail = "not released after its seal" if lease.committed else f"not renewed for {self.lease_ms} ms"
            self._notify(lease, wire.Failure(cause=wire.CAUSE_LEASE_OVER, detail=detail))
            self._on_expired(lease)

    def _notify(self, lease: Lease, failure: wire.Failure | None) -> None:
        lease.failure = failure
        for listener in self.listeners:
            listener(lease)
