"""Tickets: the right to fetch one cache, once, while its lease is renewed.

issued ── renewed ──> opened ── renewed by peer ──> committed ── released ──> closed
   └── lease expires ────┴──── lease expires ──────────┴── 3 s over ───────> expired: the sender frees the blocks
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from decant.handoff.errors import HandoffFailed
from decant.protos import worker_pb2 as wire
from decant.runtime.event_source import EventSource

LEASE_MS = 10_000
"""Default milliseconds without renewal after which a lease expires."""
COMMITTED_SECONDS = 3.0
"""Shorter than a lease, in case the receiver was killed: no block is read any more, and a receiver that joins later
keeps its sequence.
"""


@dataclass(slots=True)
class Lease:
    """A ticket's lease: which sequence it keeps, its timer, and how far its fetch has come.

    The lease table makes and ends it, and the sender marks its progress; others read it.
    """

    ticket: wire.Ticket
    sequence: str
    timer: asyncio.TimerHandle
    is_opened: bool = False
    receiver: wire.Peer | None = None
    is_committed: bool = False  # the commit was sent: the receiver may own the sequence
    is_owned: bool = False  # the receiver released it with OUTCOME_OWNED
    failure: wire.Failure | None = None  # why it ended, unless the receiver released it

    def remaining_ms(self, now: float) -> int:
        return max(0, round((self.timer.when() - now) * 1000))


class LeaseTable:
    def __init__(
        self,
        lease_ms: int,
        on_expired: Callable[[Lease], None],
        committed_seconds: float = COMMITTED_SECONDS,
    ) -> None:
        self.lease_ms = lease_ms
        self._on_expired = on_expired
        self.ends = EventSource[Lease]()
        """A lease that has ended, before the sender frees its blocks."""
        self._committed_seconds = committed_seconds
        self._leases: dict[bytes, Lease] = {}

    def issue(self, ticket: wire.Ticket, sequence: str) -> wire.Ticket:
        ticket.id = secrets.token_bytes(16)
        ticket.lease_ms = self.lease_ms
        self._leases[ticket.id] = Lease(ticket, sequence, self._timer(ticket.id))
        return ticket

    def renew_unopened(self, id: bytes) -> None:
        """Renew a ticket that is not opened; the receiver's messages renew an open fetch."""
        lease = self._leases.get(id)
        if lease is not None and not lease.is_opened:
            self.renew(id)

    def renew(self, id: bytes) -> bool:
        lease = self._leases.get(id)
        if lease is None:
            return False
        lease.timer.cancel()
        lease.timer = self._timer(id, committed=lease.is_committed)
        return True

    def commit(self, lease: Lease) -> None:
        lease.is_committed = True
        self.renew(lease.ticket.id)

    def open(self, message: wire.Open) -> Lease:
        lease = self._leases.get(message.ticket)
        if lease is None or lease.is_opened:
            raise HandoffFailed(wire.CAUSE_LEASE_EXPIRED, "unknown ticket: its lease has expired, or it was used")
        ticket = lease.ticket
        if message.sender.incarnation != ticket.sender.incarnation or message.sender.id != ticket.sender.id:
            raise HandoffFailed(
                wire.CAUSE_WRONG_PEER, "the ticket is of another incarnation of this worker", ticket.sender
            )
        if message.run != ticket.run:
            raise HandoffFailed(wire.CAUSE_UNKNOWN_RUN, "the ticket is for another run")
        if message.layout_hash != ticket.layout_hash:
            raise HandoffFailed(
                wire.CAUSE_LAYOUT_DIFFERS, f"layout hash {message.layout_hash:x}, not {ticket.layout_hash:x}"
            )
        if message.salt != ticket.salt:
            raise HandoffFailed(wire.CAUSE_SALT_DIFFERS, "the salts of sender and receiver differ")
        lease.is_opened, lease.receiver = True, message.receiver
        self.renew(message.ticket)
        return lease

    def close(self, id: bytes, failure: wire.Failure | None = None) -> Lease | None:
        lease = self._leases.pop(id, None)
        if lease is not None:
            lease.timer.cancel()
            self._notify(lease, failure)
        return lease

    def find(self, id: bytes) -> Lease | None:
        return self._leases.get(id)

    def all(self) -> list[Lease]:
        return list(self._leases.values())

    def expire(self, id: bytes) -> None:
        """End a lease, if it exists, as one that was not renewed in time."""
        lease = self._leases.pop(id, None)
        if lease is not None:
            lease.timer.cancel()
            detail = "not released after its commit" if lease.is_committed else f"not renewed for {self.lease_ms} ms"
            self._notify(lease, wire.Failure(cause=wire.CAUSE_LEASE_EXPIRED, detail=detail))
            self._on_expired(lease)

    def _timer(self, id: bytes, *, committed: bool = False) -> asyncio.TimerHandle:
        seconds = min(self._committed_seconds, self.lease_ms / 1000) if committed else self.lease_ms / 1000
        return asyncio.get_running_loop().call_later(seconds, self.expire, id)

    def _notify(self, lease: Lease, failure: wire.Failure | None) -> None:
        lease.failure = failure
        self.ends.publish(lease)
