"""Adapters of workers that run: add one, replace one, remove one."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence

from decant.client.channel import Tls
from decant.command import status
from decant.command.errors import CommandFailed
from decant.command.worker_calls import CALL_SECONDS, connector_of, find, stub_of
from decant.protos import worker_pb2 as wire
from decant.protos.state_pb2 import WorkerRegistration
from decant.protos.worker_pb2_grpc import AdminStub
from decant.runtime.errors import ServiceError

READ_SECONDS = 300.0
"""For a worker to read a folder, and for adapters before it to leave memory."""

_Call = Callable[[WorkerRegistration, AdminStub], Awaitable[str]]


def add(redis_url: str, tls: Tls | None, entry: str, names: Sequence[str]) -> None:
    """Have workers offer the adapter of an entry NAME=FOLDER. Raises CommandFailed."""
    name, _, folder = entry.partition("=")
    if not name or not folder:
        raise CommandFailed(f"ADAPTER: NAME=FOLDER, got {entry}", status=2)

    async def call(worker: WorkerRegistration, stub: AdminStub) -> str:
        request = wire.AddAdapterRequest(worker=worker.peer, name=name, folder=folder)
        adapter = (await stub.AddAdapter(request, timeout=READ_SECONDS)).adapter
        return f"{worker.peer.id} has {name} now, of rank {adapter.rank} in revision {adapter.digest}"

    _call_each(redis_url, tls, names, call)


def remove(redis_url: str, tls: Tls | None, name: str, names: Sequence[str]) -> None:
    """Have workers offer an adapter no more. Raises CommandFailed."""

    async def call(worker: WorkerRegistration, stub: AdminStub) -> str:
        request = wire.RemoveAdapterRequest(worker=worker.peer, name=name)
        adapter = (await stub.RemoveAdapter(request, timeout=CALL_SECONDS)).adapter
        return f"{worker.peer.id} has {name} no more; it was revision {adapter.digest}"

    _call_each(redis_url, tls, names, call)


def _call_each(redis_url: str, tls: Tls | None, names: Sequence[str], call: _Call) -> None:
    """Call the named workers, or all, one after the other. Raises CommandFailed after the last if any has refused."""
    connector, workers = connector_of(tls), _chosen(redis_url, names)

    async def run() -> int:
        failed = 0
        for worker in workers:
            try:
                async with stub_of(worker, connector) as stub:
                    print(await call(worker, stub))
            except ServiceError as error:
                failed += 1
                print(f"{worker.peer.id}: {error}", file=sys.stderr)
        return failed

    if failed := asyncio.run(run()):
        raise CommandFailed(f"{failed} of {len(workers)} workers did not do it")


def _chosen(redis_url: str, names: Sequence[str]) -> list[WorkerRegistration]:
    if names:
        return [find(redis_url, name) for name in names]
    present, _ = status.directory(redis_url)
    workers = sorted((entry.registration for entry in present.present), key=lambda worker: worker.peer.id)
    models = {worker.model for worker in workers}
    if len(models) > 1:
        raise CommandFailed(f"--worker: needed, as there are workers of {', '.join(sorted(models))}", status=2)
    if not workers:
        raise CommandFailed("no worker is registered")
    return workers
