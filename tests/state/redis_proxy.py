"""A TCP proxy in front of Redis: it cuts, resets and redirects connections, and adds TLS."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from decant.state.private_redis import PrivateRedis


@dataclass
class RedisProxy:
    target: PrivateRedis  # of new connections
    is_cut: bool = False
    address: str = ""
    num_opened: int = 0
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    async def forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.is_cut:
            writer.transport.abort()
            return
        self.num_opened += 1
        there, back = await asyncio.open_unix_connection(self.target.url.removeprefix("unix://"))
        self._writers |= {writer, back}
        await asyncio.gather(self._pass(reader, back), self._pass(there, writer))
        self._writers -= {writer, back}

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    def reset(self) -> None:
        """Reset all open connections, as a load balancer or NAT does with idle ones."""
        for writer in [writer for writer in self._writers if not writer.is_closing()]:
            connection = writer.get_extra_info("socket")
            if connection.family is socket.AF_INET:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

    def cut(self) -> None:
        """Reset all open connections, and each new one until `is_cut` is unset."""
        self.is_cut = True
        self.reset()


@asynccontextmanager
async def redis_proxy(server: PrivateRedis, tls: ssl.SSLContext | None = None) -> AsyncIterator[RedisProxy]:
    made = RedisProxy(server)
    listening = await asyncio.start_server(made.forward, "127.0.0.1", 0, ssl=tls)
    made.address = f"redis{'s' if tls else ''}://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    async with listening:
        yield made
        made.cut()
