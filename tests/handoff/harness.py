from __future__ import annotations

import asyncio
import ctypes
import importlib.util
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager

import grpc
import pytest

from decant.engine.plan import BlockMemory
from decant.engine.request import Request
from decant.handoff.memory_reads import MemoryAgent, MemoryReads
from decant.handoff.nixl_agent import NixlAgent
from decant.handoff.service import KvSourceService
from decant.handoff.transport import GrpcTransport, KvSource
from decant.protos import worker_pb2 as wire
from tests.handoff.factories import Tamper, Wire, Worker

Transport = Callable[[Worker], AbstractAsyncContextManager[KvSource]]


async def hand_over(sender: Worker, receiver: Worker, request: Request, tamper: Tamper | None = None) -> Wire:
    ticket = await sender.offer(request)
    arrival = await receiver.reserve(request)
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


class LocalAgent:
    def __init__(self, blocks: BlockMemory) -> None:
        self.memory = wire.BlockMemory(agent=b"local", address=blocks.address, bytes=blocks.nbytes)
        self.readers: list[LocalReader] = []

    def reader(self) -> LocalReader:
        self.readers.append(LocalReader())
        return self.readers[-1]


class LocalReader:
    """Reader whose reads wait for ``gate``; ``count`` sums their bytes."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.count = 0
        self.closed = False
        self._address = 0

    def connect(self, memory: wire.BlockMemory) -> None:
        self._address = memory.address

    async def read(self, parts: Sequence[range]) -> memoryview:
        assert not self.closed
        await self.gate.wait()
        data = b"".join(ctypes.string_at(self._address + part.start, len(part)) for part in parts)
        self.count += len(data)
        return memoryview(data)

    def close(self) -> None:
        self.closed = True


class Messages:
    memory = None

    def __init__(self, source: Wire) -> None:
        self._source = source

    def source(self, _: str) -> Wire:
        return self._source


def reads(sender: Worker, agent: MemoryAgent, tamper: Tamper = lambda message: [message]) -> MemoryReads:
    return MemoryReads(Messages(Wire(sender.sender, tamper)), agent, sender.transfer_layout)


@asynccontextmanager
async def local_memory(sender: Worker) -> AsyncIterator[KvSource]:
    agent = LocalAgent(sender.engine.device.block_memory)
    sender.sender.memory = agent.memory
    yield reads(sender, agent).source("p")


@asynccontextmanager
async def nixl_memory(sender: Worker) -> AsyncIterator[KvSource]:
    blocks = sender.engine.device.block_memory
    async with aclosing(NixlAgent("p", blocks, 1)) as owner, aclosing(NixlAgent("d", blocks, 1 << 20)) as reader:
        sender.sender.memory = owner.memory
        yield reads(sender, reader).source("p")


NEEDS_NIXL = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="the package nixl is not installed")
TRANSPORTS = pytest.mark.parametrize(
    "transport", [direct, grpc_source, local_memory, pytest.param(nixl_memory, marks=NEEDS_NIXL)]
)
