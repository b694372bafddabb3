"""Calls of an administrator to the workers that a Redis lists."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from decant.client.channel import Tls
from decant.client.routers import typed_errors
from decant.command import status
from decant.command.errors import CommandFailed
from decant.protos.state_pb2 import WorkerRegistration
from decant.protos.worker_pb2_grpc import AdminStub
from decant.runtime.connections.channel import Connector
from decant.runtime.connections.tls import PeerTls
from decant.runtime.settings import SettingError, flag_name

T = TypeVar("T")

CALL_SECONDS = 30.0
"""A worker answers between two steps."""


def call_worker(
    redis_url: str, tls: Tls | None, name: str, call: Callable[[WorkerRegistration, AdminStub], Awaitable[T]]
) -> T:
    """Return what ``call`` does with the worker ``name``. Raises CommandFailed, ServiceError."""
    connector = connector_of(tls)
    worker = find(redis_url, name)

    async def run() -> T:
        async with stub_of(worker, connector) as stub:
            return await call(worker, stub)

    return asyncio.run(run())


def find(redis_url: str, name: str) -> WorkerRegistration:
    """The registered worker with this id, or with this name in a deployment that shares its Redis."""
    workers, _ = status.directory(redis_url)
    registrations = sorted((one.registration for one in workers.present), key=lambda one: one.peer.id)
    named = [one for one in registrations if one.peer.id == name]
    named = named or [one for one in registrations if one.peer.id.partition("@")[0] == name]
    if len(named) == 1:
        return named[0]
    known = ", ".join(one.peer.id for one in named or registrations) or "none"
    limit = "the id of one worker" if named else "the id of a registered worker"
    raise CommandFailed(f"WORKER: {limit} ({known}), got {name}", status=2)


@asynccontextmanager
async def stub_of(worker: WorkerRegistration, connector: Connector) -> AsyncIterator[AdminStub]:
    """Stub whose errors are raised as ServiceError."""
    async with connector.open(worker.address) as channel:
        with typed_errors():
            yield AdminStub(channel)


def connector_of(tls: Tls | None) -> Connector:
    if tls is None:
        return Connector(PeerTls())
    if tls.ca is None:
        raise CommandFailed("--certificate and --server-name need --ca", status=2)
    files = {"peer_ca": tls.ca, "peer_certificate": tls.certificate, "peer_key": tls.key}
    paths = {name: Path(file) for name, file in files.items() if file is not None}
    try:
        return Connector(PeerTls(peer_name=tls.name, **paths))
    except SettingError as error:
        flag = flag_name(error.field.removeprefix("peer_"))
        raise CommandFailed(f"{flag}: {error.limit}, got {error.value}", status=2) from None
