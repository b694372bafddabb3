from __future__ import annotations

import asyncio
import json
from typing import Any

from google.protobuf.json_format import MessageToDict
from rich.console import Console

from decant.client.channel import Tls
from decant.command import status
from decant.command.errors import CommandFailed
from decant.command.worker_calls import CALL_SECONDS, connector_of, stub_of
from decant.protos import worker_pb2 as wire
from decant.protos.state_pb2 import WorkerRegistration
from decant.runtime.connections.channel import Connector
from decant.runtime.enum_names import enum_label
from decant.runtime.errors import ServiceError


class Audited:
    def __init__(self, worker: str, answer: wire.AuditResponse | None, error: str = "") -> None:
        self.worker = worker
        self.answer = answer
        self.error = error

    @property
    def faults(self) -> list[str]:
        if self.answer is None:
            return [self.error]
        one = self.answer
        counted = one.free_blocks + one.cached_blocks + one.owned_blocks + one.leased_blocks
        lost = [f"{one.total_blocks} blocks, {counted} accounted for"] if counted != one.total_blocks else []
        return [*one.violations, *lost]


def run(redis_url: str, tls: Tls | None, *, as_json: bool) -> bool:
    """Print the audit of each worker; return whether all answered and every block has an owner."""
    connector = connector_of(tls)
    workers, _ = status.directory(redis_url)
    if not workers.present:
        raise CommandFailed("no worker is registered: there is nothing to audit", status=2)
    audits = asyncio.run(_audit_all([one.registration for one in workers.present], connector))
    if as_json:
        print(json.dumps({"workers": [_document(one) for one in audits]}))
    else:
        show(audits, status.new_console())
    return not any(one.faults for one in audits)


def show(audits: list[Audited], console: Console) -> None:
    names = ("blocks", "free", "cached", "owned", "leased", "sessions", "fetches")
    table = status.new_table("worker", "role", *names, "verdict")
    for one in audits:
        verdict = "; ".join(one.faults) or "adds up"
        if (answer := one.answer) is None:
            table.add_row(one.worker, *[""] * 8, verdict)
            continue
        counts = (answer.total_blocks, answer.free_blocks, answer.cached_blocks, answer.owned_blocks)
        rest = (answer.leased_blocks, answer.sessions, answer.fetches)
        table.add_row(one.worker, enum_label(wire.Role, answer.role), *map(str, (*counts, *rest)), verdict)
    console.print(table)


async def _audit_all(workers: list[WorkerRegistration], connector: Connector) -> list[Audited]:
    workers.sort(key=lambda worker: worker.peer.id)
    return list(await asyncio.gather(*(_audit_worker(worker, connector) for worker in workers)))


async def _audit_worker(worker: WorkerRegistration, connector: Connector) -> Audited:
    try:
        async with stub_of(worker, connector) as stub:
            return Audited(worker.peer.id, await stub.Audit(wire.AuditRequest(), timeout=CALL_SECONDS))
    except ServiceError as error:
        return Audited(worker.peer.id, None, f"{worker.address}: {error}")


def _document(one: Audited) -> dict[str, Any]:
    answer = one.answer or wire.AuditResponse()
    counted = MessageToDict(answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return {"id": one.worker, **counted, "faults": one.faults}
