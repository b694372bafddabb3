"""Workers in a Redis, as the commands of an administrator see them, with a fake Admin service."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager

import grpc
from typer.testing import CliRunner, Result

from decant.command.app import app
from decant.protos import worker_pb2 as wire
from decant.protos import worker_pb2_grpc
from decant.protos.state_pb2 import RouterRegistration, WorkerRegistration
from decant.runtime.connections.peer import new_peer
from decant.runtime.enum_names import enum_label
from tests.state.factories import make_store

WELL = wire.AuditResponse(total_blocks=10, free_blocks=4, cached_blocks=3, owned_blocks=2, leased_blocks=1, sessions=1)


class FakeAdmin(worker_pb2_grpc.AdminServicer):
    def __init__(self) -> None:
        self.answer = WELL
        self.runs_left = 0
        """Runs at the next Drain; each has one fewer."""
        self.calls: list[str] = []
        self.refusing: set[str] = set()
        """Workers that add no adapter."""

    def Audit(self, request: object, context: object) -> wire.AuditResponse:  # noqa: N802
        return self.answer

    def Drain(self, request: wire.DrainRequest, context: object) -> wire.DrainResponse:  # noqa: N802
        self.calls.append(f"drain {request.worker.id}")
        runs, self.runs_left = self.runs_left, max(0, self.runs_left - 1)
        return wire.DrainResponse(runs=runs)

    def Undrain(self, request: wire.UndrainRequest, context: object) -> wire.UndrainResponse:  # noqa: N802
        self.calls.append(f"undrain {request.worker.id}")
        return wire.UndrainResponse()

    def SetRole(self, request: wire.SetRoleRequest, context: object) -> wire.SetRoleResponse:  # noqa: N802
        self.calls.append(f"{enum_label(wire.Role, request.role)} {request.worker.id}")
        return wire.SetRoleResponse(previous=wire.ROLE_DECODE)

    def AddAdapter(self, request: wire.AddAdapterRequest, context: grpc.ServicerContext) -> wire.AddAdapterResponse:  # noqa: N802
        if request.worker.id in self.refusing:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "folder: an adapter that is served: none is there")
        self.calls.append(f"add {request.name} of {request.folder} {request.worker.id}")
        return wire.AddAdapterResponse(adapter=wire.Adapter(name=request.name, digest="abc", rank=8))

    def RemoveAdapter(self, request: wire.RemoveAdapterRequest, context: object) -> wire.RemoveAdapterResponse:  # noqa: N802
        self.calls.append(f"remove {request.name} {request.worker.id}")
        return wire.RemoveAdapterResponse(adapter=wire.Adapter(name=request.name, digest="abc", rank=8))


@contextmanager
def serving_admin() -> Iterator[tuple[FakeAdmin, str]]:
    servicer = FakeAdmin()
    server = grpc.server(futures.ThreadPoolExecutor(1))
    worker_pb2_grpc.add_AdminServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"127.0.0.1:{port}"
    server.stop(None).wait()


def register(url: str, address: str, id: str = "decode-1") -> None:
    async def write() -> None:
        async with make_store(url, registration_s=600.0) as store:
            registration = WorkerRegistration(peer=new_peer(id), address=address, role=wire.ROLE_DECODE, model="m")
            await store.workers.register(
                registration, wire.Load(total_blocks=10, free_blocks=4, running=2, queued_tokens=55)
            )
            load = wire.Load(running=3, waiting=1)
            await store.routers.register(
                RouterRegistration(peer=new_peer("router-1"), address="h:1", version="1"), load
            )

    asyncio.run(write())


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
