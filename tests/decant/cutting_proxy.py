"""A TCP proxy that cuts its connections, as one with an idle limit does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field

from tests.loop_thread import on_a_thread

HEADERS = 1
"""Type of the HTTP/2 frame that begins a response."""


class ResponseCounter:
    """Counts the responses that begin in what a gRPC server sends over one connection."""

    def __init__(self) -> None:
        self.count = 0
        self._rest = b""

    def feed(self, data: bytes) -> None:
        rest = self._rest + data
        while len(rest) >= 9 and len(rest) >= (end := 9 + int.from_bytes(rest[:3], "big")):
            self.count += rest[3] == HEADERS
            rest = rest[end:]
        self._rest = rest


@dataclass
class CuttingProxy:
    target: str
    loop: asyncio.AbstractEventLoop
    address: str = ""
    writers: set[asyncio.StreamWriter] = field(default_factory=set)
    responses: list[ResponseCounter] = field(default_factory=list)
    """Of each connection, once the client was sent them."""

    def cut(self) -> None:
        """Reset all open connections, at both ends."""
        self.loop.call_soon_threadsafe(self._abort)

    def _abort(self) -> None:
        for writer in self.writers:
            writer.transport.abort()

    async def forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self.target.rpartition(":")
        with suppress(OSError):
            there_reader, there_writer = await asyncio.open_connection(host, int(port))
            both = {writer, there_writer}
            self.writers |= both
            self.responses.append(counter := ResponseCounter())
            await asyncio.gather(_copy(reader, there_writer), _copy(there_reader, writer, counter.feed))
            self.writers -= both


async def _copy(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, on_data: Callable[[bytes], None] = lambda _: None
) -> None:
    with suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
            on_data(data)
    writer.close()


@asynccontextmanager
async def _running(target: str) -> AsyncIterator[CuttingProxy]:
    proxy = CuttingProxy(target, asyncio.get_running_loop())
    async with await asyncio.start_server(proxy.forward, "127.0.0.1", 0) as server:
        proxy.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield proxy
        proxy._abort()


@contextmanager
def cutting_proxy(target: str) -> Iterator[CuttingProxy]:
    with on_a_thread(_running(target)) as proxy:
        yield proxy
