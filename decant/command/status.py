from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.json_format import MessageToDict
from rich.console import Console
from rich.table import Table
from rich.text import Text

from decant.command.deployment import deployments
from decant.command.deployment.deployments import Deployment
from decant.command.deployment.processes import DRAINING, READY, Process, lost_ago
from decant.command.errors import CommandFailed
from decant.protos.state_pb2 import RouterRegistration, WorkerRegistration
from decant.protos.worker_pb2 import Load, Role
from decant.runtime.enum_names import enum_label
from decant.state.directory import DirectoryEntry, Listing
from decant.state.errors import StateError
from decant.state.ids import Incarnation
from decant.state.keys import Ttls
from decant.state.store import Store, StoreSettings

Workers = Listing[WorkerRegistration]
Routers = Listing[RouterRegistration]

WATCH_S = 1.0
SILENT_S = 2 * Ttls().renew_every_s
"""Age of a registration that is no longer renewed."""

_NO_TERMINAL = 240  # columns


def run(redis_url: str, *, as_json: bool, deployment: Deployment | None = None, watch: bool = False) -> None:
    console = new_console()
    while True:
        workers, routers = directory(redis_url)
        if deployment is not None:
            deployment = deployments.of(deployment.pid)
        rows = rows_of(workers, routers, deployment)
        if as_json:
            print(json.dumps(document(rows, deployment)), flush=True)
        else:
            if watch and console.is_terminal:
                console.clear()
            show(rows, console, deployment)
        if not watch:
            return
        time.sleep(WATCH_S)


def directory(redis_url: str) -> tuple[Workers, Routers]:
    try:
        return asyncio.run(_directory(redis_url))
    except (StateError, ValueError) as error:
        raise CommandFailed(f"Redis: {error}") from None


async def _directory(redis_url: str) -> tuple[Workers, Routers]:
    async with Store(StoreSettings(redis_url, deadline_s=5.0)) as store:
        return await store.workers.listing(), await store.routers.listing()


@dataclass(frozen=True)
class Row:
    name: str
    role: str
    state: str
    registration: WorkerRegistration | RouterRegistration | None = None
    load: Load | None = None
    unused_by: Mapping[str, str] = field(default_factory=dict)
    """Reasons by router that can't use this worker."""


def unused_workers(routers: Routers) -> dict[Incarnation, dict[str, str]]:
    """Reasons by worker and by the id of the router that can't use it."""
    unused: dict[Incarnation, dict[str, str]] = {}
    for router in routers.present:
        for one in router.registration.unused_workers:
            by_router = unused.setdefault(Incarnation(one.id, one.incarnation), {})
            by_router[router.registration.peer.id] = one.reason
    return unused


def describe_unused(reasons: Mapping[str, str]) -> str:
    routers: dict[str, list[str]] = {}
    for router, reason in sorted(reasons.items()):
        routers.setdefault(reason, []).append(router)
    return "; ".join(f"not used by {', '.join(ids)}: {reason}" for reason, ids in routers.items())


def rows_of(workers: Workers, routers: Routers, deployment: Deployment | None) -> list[Row]:
    processes = dict(deployment.processes) if deployment is not None else {}
    unused = unused_workers(routers)
    listed: list[tuple[str, DirectoryEntry[Any]]] = [("router", one) for one in routers.present]
    listed += [(enum_label(Role, one.registration.role), one) for one in workers.present]
    rows = []
    for role, one in sorted(listed, key=lambda pair: (pair[0] != "router", pair[1].registration.peer.id)):
        id = one.registration.peer.id
        name = id.removesuffix(f"@{_host_of(deployment)}")  # ids have a suffix on a Redis that deployments share
        state = _state(one, processes.pop(name, None))
        reasons = unused.get(one.incarnation, {}) if role != "router" else {}
        if state == READY and reasons:
            state = f"{READY}, {describe_unused(reasons)}"
        rows.append(Row(id, role, state, one.registration, one.load, reasons))
    for name, process in processes.items():
        state = "not registered" if process.is_ready else process.describe()
        rows.append(Row(name, name.rpartition("-")[0], state))
    return rows


def _host_of(deployment: Deployment | None) -> str:
    return f"{os.uname().nodename}:{deployment.pid}" if deployment is not None else ""


def _state(one: DirectoryEntry[Any], process: Process | None) -> str:
    """Return a state: `decant up` reports ends first, but only a registration shows that a process hangs."""
    if process is not None and process.lost_at is not None:
        return process.describe()
    if one.renewed_ago_s > SILENT_S:
        return lost_ago(one.renewed_ago_s)
    is_draining = one.load.draining or (process is not None and process.state == DRAINING)
    return DRAINING if is_draining else READY


def document(rows: list[Row], deployment: Deployment | None) -> dict[str, Any]:
    registered = [
        (row, {**_plain(row.registration), "load": _plain(row.load), "state": row.state})
        for row in rows
        if row.registration
    ]
    for row, plain in registered:
        if row.role != "router":
            plain["unused_by"] = dict(row.unused_by)
    others = [{"name": row.name, "role": row.role, "state": row.state} for row in rows if row.registration is None]
    return {
        "has_started": deployment.has_started if deployment is not None else None,
        "is_ending": deployment.is_ending if deployment is not None else None,
        "routers": [plain for row, plain in registered if row.role == "router"],
        "workers": [plain for row, plain in registered if row.role != "router"],
        "not_registered": others,
    }


def show(rows: list[Row], console: Console, deployment: Deployment | None = None) -> None:
    if deployment is not None and (deployment.is_ending or not deployment.has_started):
        console.print(f"`decant up` (process {deployment.pid}) is {'ending' if deployment.is_ending else 'starting'}")
    table = new_table("name", "role", "state", "running", "waiting", "queued", "free blocks", "model", "address")
    for row in rows:
        if row.registration is None or row.load is None:
            table.add_row(row.name, row.role, row.state)
            continue
        load = row.load
        counts = [str(load.running), str(load.waiting)]
        if isinstance(row.registration, WorkerRegistration):
            free = f"{load.free_blocks + load.cached_blocks}/{load.total_blocks}"
            counts += [str(load.queued_tokens), free, row.registration.model]
        else:
            counts += ["", "", ""]
        table.add_row(row.name, row.role, row.state, *counts, row.registration.address)
    if rows:
        console.print(table)
    else:
        console.print("no router and no worker is registered")


def new_console() -> Console:
    """Make a console on which text such as "[fe80::1]:9090" is no markup; without a terminal no line is wrapped."""
    return Console(width=None if sys.stdout.isatty() else _NO_TERMINAL, markup=False, emoji=False)


def new_table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in names:
        table.add_column(name, overflow="fold")
    return table


def safe_text(text: str, style: str = "") -> Text:
    """Make text that may be another program's, without markup and control sequences."""
    return Text("".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text), style)


def _plain(message: Any) -> dict[str, Any]:
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
