from __future__ import annotations

from decant.client.channel import Tls
from decant.command.options import NewRole
from decant.command.worker_calls import CALL_SECONDS, call_worker
from decant.protos import worker_pb2 as wire
from decant.protos.state_pb2 import WorkerRegistration
from decant.protos.worker_pb2_grpc import AdminStub
from decant.runtime.enum_names import enum_label

_ROLES = {NewRole.PREFILL: wire.ROLE_PREFILL, NewRole.DECODE: wire.ROLE_DECODE}


def move(redis_url: str, tls: Tls | None, name: str, role: NewRole) -> None:
    async def set_role(worker: WorkerRegistration, stub: AdminStub) -> None:
        request = wire.SetRoleRequest(worker=worker.peer, role=_ROLES[role])
        previous = enum_label(wire.Role, (await stub.SetRole(request, timeout=CALL_SECONDS)).previous)
        was = f"it was one of {previous}" if previous != role else "as it was before"
        print(f"{worker.peer.id} is in the pool of {role} now, {was}")

    call_worker(redis_url, tls, name, set_role)
