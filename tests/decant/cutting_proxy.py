"""A TCP proxy that cuts its connections, as one with an idle limit does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field

from tests.loop_thread import on_a_thread


@dataclass
class CuttingProxy:
    target: str
    loop: asyncio.AbstractEventLoop
    address: str = ""
    writers: set[asyncio.StreamWriter] = field(default_factory=set)

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
            await asyncio.gather(_copy(reader, there_writer), _copy(there_reader, writer))
            self.writers -= both


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
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
