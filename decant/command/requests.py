"""Requests in flight on every router that a Redis lists, for an administrator."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass

import grpc
from rich.console import Console

from decant.client.channel import Tls
from decant.client.routers import typed_errors
from decant.command import status
from decant.command.errors import CommandFailed
from decant.command.worker_calls import CALL_SECONDS, connector_of
from decant.protos import router_admin_pb2 as wire
from decant.protos.router_admin_pb2_grpc import RouterAdminStub
from decant.protos.state_pb2 import RouterRegistration
from decant.router.execution.request_list import document
from decant.runtime.connections.channel import Connector
from decant.runtime.errors import ServiceError


@dataclass(frozen=True)
class RouterRequests:
    router: str
    listed: wire.ListRequestsResponse
    error: str = ""


def run(redis_url: str, tls: Tls | None, *, as_json: bool) -> bool:
    """Print the requests of each router, and return whether all routers answered."""
    connector = connector_of(tls)
    _, routers = status.directory(redis_url)
    if not routers.present:
        raise CommandFailed("no router is registered: there are no requests to list", status=2)
    answers = asyncio.run(_list_all([one.registration for one in routers.present], connector))
    if as_json:
        print(json.dumps({"routers": [_router_document(one) for one in answers]}))
    else:
        show(answers, status.new_console())
    return not any(one.error for one in answers)


def show(answers: list[RouterRequests], console: Console) -> None:
    table = status.new_table(
        "age", "state", "prompt", "output", "attempt", "prefill worker", "decode worker", "router", "tenant", "id"
    )
    requests = [(document(one), answer.router) for answer in answers for one in answer.listed.requests]
    for one, router in sorted(requests, key=lambda pair: -pair[0]["age_s"]):
        counts = (one["prompt_tokens"], one["output_tokens"], one["attempt"])
        workers = (one["prefill_worker"], one["decode_worker"])
        cells = (f"{one['age_s']:.1f} s", one["state"], *map(str, counts), *workers, router, one["tenant"], one["id"])
        table.add_row(*map(status.safe_text, cells))  # a client chose the id
    if table.row_count:
        console.print(table)
    for answer in answers:
        console.print(f"{answer.router}: {answer.error or _count(answer.listed)}")


def _count(listed: wire.ListRequestsResponse) -> str:
    hidden = listed.total - len(listed.requests)
    return f"{listed.total} in flight" + (f", of which the {hidden} youngest are not shown" if hidden else "")


async def _list_all(routers: list[RouterRegistration], connector: Connector) -> list[RouterRequests]:
    routers.sort(key=lambda router: router.peer.id)
    return list(await asyncio.gather(*(_list_of(router, connector) for router in routers)))


async def _list_of(router: RouterRegistration, connector: Connector) -> RouterRequests:
    try:
        async with connector.open(router.address) as channel:
            with typed_errors():
                stub = RouterAdminStub(channel)
                listed = await stub.ListRequests(wire.ListRequestsRequest(), timeout=CALL_SECONDS)
    except ServiceError as error:
        is_without = error.code is grpc.StatusCode.UNIMPLEMENTED
        reason = "it names no administrators: set --admin-name" if is_without else str(error)
        return RouterRequests(router.peer.id, wire.ListRequestsResponse(), f"{router.address}: {reason}")
    return RouterRequests(router.peer.id, listed)


def _router_document(one: RouterRequests) -> dict[str, object]:
    requests = [document(request) for request in one.listed.requests]
    return {"id": one.router, "total": one.listed.total, "requests": requests, "error": one.error}
