from __future__ import annotations

import asyncio
import time

from decant.client.channel import Tls
from decant.command.errors import CommandFailed
from decant.command.worker_calls import CALL_SECONDS, call_worker
from decant.protos import worker_pb2 as wire
from decant.protos.state_pb2 import WorkerRegistration
from decant.protos.worker_pb2_grpc import AdminStub

POLL_S = 0.25


def drain(redis_url: str, tls: Tls | None, name: str, timeout_s: float) -> None:
    """Drain a worker and wait until it has no runs. Raises CommandFailed when it still has some."""

    async def wait(worker: WorkerRegistration, stub: AdminStub) -> None:
        ends = time.monotonic() + timeout_s
        while runs := (await stub.Drain(wire.DrainRequest(worker=worker.peer), timeout=CALL_SECONDS)).runs:
            if time.monotonic() >= ends:
                left = f"{runs} run{'s' if runs > 1 else ''}"
                raise CommandFailed(f"{worker.peer.id} still has {left} after {timeout_s:g} s; it remains drained")
            await asyncio.sleep(POLL_S)
        print(f"{worker.peer.id} has no runs and takes none; `decant drain --undo {name}` puts it back")

    call_worker(redis_url, tls, name, wait)


def undo(redis_url: str, tls: Tls | None, name: str) -> None:
    async def put_back(worker: WorkerRegistration, stub: AdminStub) -> None:
        await stub.Undrain(wire.UndrainRequest(worker=worker.peer), timeout=CALL_SECONDS)
        print(f"{worker.peer.id} takes runs again")

    call_worker(redis_url, tls, name, put_back)
