from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import grpc
import pytest

from decant.engine.request import Request
from decant.handoff.service import KvSourceService
from decant.handoff.transport import GrpcTransport, KvSource
from tests.handoff.factories import Tamper, Wire, Worker

Transport = Callable[[Worker], AbstractAsyncContextManager[KvSource]]


async def hand_over(sender: Worker, receiver: Worker, request: Request, tamper: Tamper | None = None) -> Wire:
    ticket = await sender.offer(request)
    arrival = await receiver.room(request)
    source = Wire(sender.sender, tamper) if tamper else Wire(sender.sender)
    await receiver.receiver.receive(source, ticket, arrival)
    return source


@asynccontextmanager
async def direct(sender: Worker) -> AsyncIterator[KvSource]:
    yield Wire(sender.sender)


@asynccontextmanager
async def grpc_source(sender: Worker) -> AsyncIterator[KvSource]:
    server = grpc.aio.server()
    KvSourceService(sender.sender).add_to(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    transport = GrpcTransport(connect)
    try:
        yield transport.source(f"127.0.0.1:{port}")
    finally:
        await transport.close()
        await server.stop(None)


def connect(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address)


TRANSPORTS = pytest.mark.parametrize("transport", [direct, grpc_source])
