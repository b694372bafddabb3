"""uvicorn with the process's own signals and drain.

listening -> ready -> SIGTERM -> no new connections, running requests end -> the others are ended -> ended
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from decant.gateway.app import Gateway
from decant.gateway.connections import Connection
from decant.gateway.settings import GatewaySettings
from decant.runtime.serving.server_settings import is_every_address, join_address
from decant.runtime.serving.shutdown import Shutdown
from decant.runtime.settings import SettingError
from decant.runtime.telemetry import logs

BACKLOG = 2048
KEEP_ALIVE_S = 75
"""For which an idle connection is kept: longer than the usual 60 s of a proxy, which would else use a closed one."""
LAST_S = 5
"""Time for the errors of requests that did not end within the drain."""

_log = logs.get(__name__)


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # the process has its own handlers


def listen(settings: GatewaySettings) -> socket.socket:
    """Raises SettingError."""
    host = settings.host.strip("[]")
    try:
        info = socket.getaddrinfo(host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listening = socket.create_server(info[4][:2], family=info[0], backlog=BACKLOG)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        limit = f"an address that can be listened on ({why})"
        raise SettingError("port", limit, join_address(settings.host, settings.port)) from None
    return listening


async def serve(gateway: Gateway, settings: GatewaySettings, listening: socket.socket) -> bool:
    """Serve until SIGTERM and its drain; return whether all requests ended by themselves. Raises OSError for files of
    HTTPS that can't be used.
    """
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    shutdown = Shutdown()
    shutdown.on_signals()
    config = _config(gateway, settings)
    config.load()
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    reached_at = "127.0.0.1" if is_every_address(settings.host) else settings.host
    _log.info("serving", address=join_address(reached_at, listening.getsockname()[1]))
    _log.info("readiness", state="ready")
    ending = asyncio.create_task(shutdown.wait_requested())
    await asyncio.wait({serving, ending}, return_when=asyncio.FIRST_COMPLETED)
    ending.cancel()
    gateway.is_draining = True
    _log.info("readiness", state="draining")
    server.should_exit = True
    forced = asyncio.create_task(shutdown.wait_forced())
    await asyncio.wait({serving, forced}, timeout=settings.drain_seconds, return_when=asyncio.FIRST_COMPLETED)
    has_ended, server.force_exit = not gateway.num_open, forced.done()
    forced.cancel()
    await gateway.end_calls()
    await asyncio.wait({serving}, timeout=0 if has_ended else LAST_S)
    for connection in list(server.server_state.connections):
        connection.transport.abort()  # what its client has not read would keep it open
    await serving
    _log.info("ended")
    return has_ended


def _config(gateway: Gateway, settings: GatewaySettings) -> uvicorn.Config:
    return uvicorn.Config(
        gateway,
        http=Connection,
        ws="none",
        lifespan="off",
        loop="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=round(settings.drain_seconds) + 2 * LAST_S,
        ssl_certfile=settings.https_certificate,
        ssl_keyfile=settings.https_key,
    )
