"""Renewals of tickets at their issuers; once a decode worker has a ticket, its renewals are passed on."""

from __future__ import annotations

from collections.abc import Iterable

from decant.protos import worker_pb2 as wire
from decant.router.workers.session import WorkerSession
from decant.router.workers.worker_handle import WorkerHandle


class TicketRenewals:
    def __init__(self) -> None:
        self._issuers: dict[bytes, WorkerSession] = {}

    def __len__(self) -> int:
        return len(self._issuers)

    def renew(self, ticket: wire.Ticket, issuer: WorkerHandle) -> None:
        self._issuers[ticket.id] = issuer.session
        issuer.session.unclaimed.add(ticket.id)

    def stop_renewing(self, ticket: wire.Ticket) -> None:
        if (issuer := self._issuers.get(ticket.id)) is not None:
            issuer.unclaimed.discard(ticket.id)

    def on_renewed(self, tickets: Iterable[bytes]) -> None:
        for ticket in tickets:
            if (issuer := self._issuers.get(ticket)) is not None:
                issuer.renewed.add(ticket)

    def forget(self, ticket: wire.Ticket) -> None:
        if (issuer := self._issuers.pop(ticket.id, None)) is not None:
            issuer.unclaimed.discard(ticket.id)
            issuer.renewed.discard(ticket.id)
