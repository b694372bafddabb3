"""Who is there, by the directory in Redis."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from google.protobuf.json_format import MessageToDict
from rich.console import Console
from rich.table import Table

from decant.command.errors import CommandFailed
from protos.state_pb2 import RouterRegistration, WorkerRegistration
from protos.worker_pb2 import Role
from state.directory import Listing
from state.errors import StateError
from state.store import Store, StoreSettings

Workers = Listing[WorkerRegistration]
Routers = Listing[RouterRegistration]

_NO_TERMINAL = 240  # columns


def run(redis_url: str, *, as_json: bool) -> None:
    """Raises CommandFailed where Redis can't be asked."""
    workers, routers = directory(redis_url)
    if as_json:
        print(json.dumps(document(workers, routers)))
    else:
        show(workers, routers, new_console())


def directory(redis_url: str) -> tuple[Workers, Routers]:
    """All workers and routers that are registered. Raises CommandFailed."""
    try:
        return asyncio.run(_directory(redis_url))
    except (StateError, ValueError) as error:
        raise CommandFailed(f"Redis: {error}") from None


async def _directory(redis_url: str) -> tuple[Workers, Routers]:
    async with Store(StoreSettings(redis_url, deadline_s=5.0)) as store:
        return await store.workers.listing(), await store.routers.listing()


def document(workers: Workers, routers: Routers) -> dict[str, list[dict[str, Any]]]:
    """What ``--json`` prints."""
    return {
        "routers": [_plain(one.facts) for one in routers.present],
        "workers": [{**_plain(one.facts), "load": _plain(one.load)} for one in workers.present],
    }


def show(workers: Workers, routers: Routers, console: Console) -> None:
    table = new_table("name", "role", "address", "model", "running", "waiting", "queued", "free blocks", "state")
    for router in sorted(routers.present, key=lambda one: one.facts.peer.id):
        table.add_row(router.facts.peer.id, "router", router.facts.address, "", "", "", "", "", "")
    for worker in sorted(workers.present, key=lambda one: one.facts.peer.id):
        facts, load = worker.facts, worker.load
        table.add_row(
            facts.peer.id,
            role_name(facts.role),
            facts.address,
            facts.model,
            str(load.running),
            str(load.waiting),
            str(load.queued_tokens),
            f"{load.free_blocks + load.cached_blocks}/{load.total_blocks}",
            "draining" if load.draining else "",
        )
    console.print(table)


def new_console() -> Console:
    """Where nobody looks at it directly, lines are as long as they are."""
    return Console() if sys.stdout.isatty() else Console(width=_NO_TERMINAL)


def new_table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in names:
        table.add_column(name, overflow="fold")
    return table


def role_name(role: Role) -> str:
    return Role.Name(role).removeprefix("ROLE_").lower()


def _plain(message: Any) -> dict[str, Any]:
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
