from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

LAST = 55_000  # the bus of a Redis cluster takes the port 10,000 above


@contextmanager
def reserved_port() -> Iterator[int]:
    """Reserve a port until the end of the block: the kernel gives it to no socket that binds to port 0.

    Only a server that names it, with SO_REUSEADDR as Redis does, can listen on it; until then it refuses connections.
    """
    while True:
        with socket.socket() as holder:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(("127.0.0.1", 0))
            port: int = holder.getsockname()[1]
            if port < LAST:
                yield port
                return


@contextmanager
def kept(address: str) -> Iterator[None]:
    """Reserve the port of a server that listens with SO_REUSEPORT, also after its end.

    Its clients must not reach another test's server.
    """
    host, _, port = address.rpartition(":")
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind((host, int(port)))
        yield
