"""A transport whose receiver reads blocks from the sender's memory; messages, checksums and leases stay on gRPC.

    receiver                                                sender
    Open(reads_memory) ──────────────────────────────────>  its transport offers memory, else chunks come with data
                       <───────────────────────  memory ──  how to reach it
                       <────────  kv_chunk(block_offsets) ─  no data
    read ····· of registered memory, no message ·········>
    the chunk with its data, as if it had come in it

The commit is sent after the Ack of the last chunk. If the sender frees the blocks during a read, the checksums reject
what was read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Sequence
from contextlib import aclosing, closing
from typing import Protocol

from decant.handoff.codec import Received
from decant.handoff.errors import HandoffFailed
from decant.handoff.packing import TransferLayout, located_parts
from decant.handoff.transport import KvSource, Transport
from decant.protos import worker_pb2 as wire
from decant.runtime.telemetry import logs

RETRY_SECONDS = 60.0
"""Time after a failed read in which chunks from that address come with their data."""

_log = logs.get(__name__)


class NoBuffer(Exception):
    """This process cannot register a buffer to read into."""


class MemoryReader(Protocol):
    """Reader of one sender's memory, for one fetch. ``close`` releases it, also during a read."""

    def connect(self, memory: wire.BlockMemory) -> None:
        """Connect before the first read. Raises ConnectionError."""
        ...

    async def read(self, parts: Sequence[range]) -> memoryview:
        """Return the bytes of these parts, valid until the next read or ``close``. Raises ConnectionError."""
        ...

    def close(self) -> None: ...


class MemoryAgent(Protocol):
    @property
    def memory(self) -> wire.BlockMemory: ...

    def reader(self) -> MemoryReader:
        """Return a reader for one fetch. Raises NoBuffer."""
        ...


class MemoryReads:
    def __init__(self, messages: Transport, agent: MemoryAgent, layout: TransferLayout) -> None:
        self.memory = agent.memory
        self.agent = agent
        self._messages = messages
        self._layout = layout
        self._retry_at: dict[str, float] = {}  # by address: when to try again

    def source(self, address: str) -> KvSource:
        source = self._messages.source(address)
        if self._retry_at.get(address, 0.0) > asyncio.get_running_loop().time():
            return source
        return _ReadingSource(source, self, address)

    def parts(self, memory: wire.BlockMemory, chunk: wire.KvChunk) -> list[range]:
        parts = located_parts(self._layout, chunk)
        if any(part.stop > memory.bytes for part in parts):
            raise HandoffFailed(wire.CAUSE_CORRUPT, f"a block beyond the {memory.bytes} bytes of its sender")
        return parts

    def record_failure(self, address: str, reason: str) -> None:
        _log.warning("cannot read a sender's memory", address=address, reason=reason, seconds=RETRY_SECONDS)
        now = asyncio.get_running_loop().time()
        self._retry_at = {key: until for key, until in self._retry_at.items() if until > now}
        self._retry_at[address] = now + RETRY_SECONDS


class _ReadingSource:
    def __init__(self, source: KvSource, transport: MemoryReads, address: str) -> None:
        self._source = source
        self._transport = transport
        self._address = address
        self._has_read = False

    async def fetch(self, requests: AsyncIterable[wire.FetchRequest]) -> AsyncGenerator[Received, None]:
        try:
            reader = self._transport.agent.reader()
        except NoBuffer as error:  # before Open: the sender sends the data
            self._transport.record_failure(self._address, str(error))
            async with aclosing(self._source.fetch(requests)) as responses:
                async for received in responses:
                    yield received
            return
        memory = None
        with closing(reader):
            async with aclosing(self._source.fetch(_with_memory_reads(requests))) as responses:
                async for received in responses:
                    chunk = received.response.kv_chunk
                    try:
                        if received.response.HasField("memory"):
                            if memory is not None:
                                raise HandoffFailed(wire.CAUSE_CORRUPT, "a second memory in one fetch")
                            memory = received.response.memory
                            reader.connect(memory)
                            continue
                        if memory is not None and chunk.block_offsets:
                            data = await reader.read(self._transport.parts(memory, chunk))
                            received = Received(received.response, data)  # noqa: PLW2901
                            self._has_read = True
                    except (ConnectionError, HandoffFailed) as error:
                        self._transport.record_failure(self._address, str(error))
                        raise
                    yield received

    def record_corruption(self, detail: str) -> None:
        if self._has_read:
            self._transport.record_failure(self._address, detail)

    async def release(self, request: wire.ReleaseRequest, seconds: float) -> None:
        await self._source.release(request, seconds)


async def _with_memory_reads(requests: AsyncIterable[wire.FetchRequest]) -> AsyncIterator[wire.FetchRequest]:
    async for request in requests:
        if request.HasField("open"):
            request.open.reads_memory = True
        yield request
