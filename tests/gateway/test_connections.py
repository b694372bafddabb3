"""Connections: what a client may send before it is refused, and how it is noticed that it has left or does not read."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from decant.gateway import connections, server
from decant.gateway.connections import MAX_HEAD_BYTES, Connection
from decant.gateway.responses import PIECE_BYTES, JsonResponse
from decant.gateway.settings import GatewaySettings
from decant.runtime.serving.shutdown import Shutdown
from tests.gateway.asgi import PATIENCE_S

POST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"
LARGE = 32 * 1024 * 1024
"""More than the kernel's buffers of a connection hold."""


async def wait_for_disconnect(scope: Scope, receive: Receive, send: Send) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def connection(app: Any, state: ServerState) -> Connection:
    config = uvicorn.Config(app, lifespan="off", log_config=None, ws="none")
    return Connection(config, state, {})


@asynccontextmanager
async def serving(app: Any) -> AsyncIterator[tuple[socket.socket, ServerState]]:
    """A connected client that receives little, and the state of the server."""
    state = ServerState()
    loop = asyncio.get_running_loop()
    listening = await loop.create_server(lambda: connection(app, state), "127.0.0.1", 0)
    with socket.socket() as client:
        client.setblocking(False)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        async with asyncio.timeout(PATIENCE_S):
            await loop.sock_connect(client, listening.sockets[0].getsockname())
            yield client, state
    listening.close()
    for one in state.connections:
        one.transport.abort()


class _Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.has_closed = False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def write(self, data: Any) -> None:
        self.written += data

    def close(self) -> None:
        self.has_closed = True

    def is_closing(self) -> bool:
        return self.has_closed


@pytest.mark.parametrize(
    ("start", "more"),
    [
        (b"GET / HTTP/1.1\r\n", b"X-Name: value\r\n" * 100),
        (b"GET / HTTP/1.1\r\nX-Name: ", b"a" * 1000),
        (b"GET /", b"a" * 1000),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n", b"X-Name: value\r\n" * 100),
    ],
    ids=["headers", "header", "url", "trailers"],
)
@pytest.mark.parametrize("num_at_once", [1, 1000])
async def test_what_surrounds_a_body_has_a_limit(start: bytes, more: bytes, num_at_once: int) -> None:
    transport = _Transport()
    reading = connection(wait_for_disconnect, ServerState())
    reading.connection_made(transport)
    reading.data_received(start)
    num_sent = 0
    while not transport.has_closed and num_sent < 10 * MAX_HEAD_BYTES:
        reading.data_received(more * num_at_once)
        num_sent += len(more) * num_at_once
    reading.connection_lost(None)
    head, _, body = transport.written.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 ")
    assert json.loads(body)["error"]["code"] == "headers_too_large"
    assert num_at_once > 1 or MAX_HEAD_BYTES <= num_sent + len(start) <= MAX_HEAD_BYTES + 2000


@pytest.mark.parametrize("num_received", [1000, 10_000_000])
async def test_a_large_body_is_no_head(num_received: int) -> None:
    transport = _Transport()
    reading = connection(wait_for_disconnect, ServerState())
    reading.connection_made(transport)
    sent = b"POST / HTTP/1.1\r\nContent-Length: 300000\r\n\r\n" + b"a" * 300_000
    for start in range(0, len(sent), num_received):
        reading.flow.read_paused = True  # the transport here can't pause
        reading.data_received(sent[start : start + num_received])
    assert len(reading.cycle.body) == 300_000
    reading.connection_lost(None)
    assert transport.written == b""


async def test_an_unread_answer_is_held_in_pieces_and_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "UNREAD_S", 0.1)
    waiting: list[int] = []
    has_ended = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_piece(message: Any) -> None:
            await send(message)
            waiting.extend(one.transport.get_write_buffer_size() for one in state.connections)

        await JsonResponse("x" * LARGE)(scope, receive, send_piece)
        has_ended.set()

    async with serving(app) as (client, state):
        await asyncio.get_running_loop().sock_sendall(client, POST)
        await has_ended.wait()
        assert not state.connections
    assert 0 < max(waiting) <= PIECE_BYTES


async def test_a_client_that_has_left_is_noticed_behind_a_second_request() -> None:
    has_begun, has_left = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        has_begun.set()
        await wait_for_disconnect(scope, receive, send)
        has_left.set()

    async with serving(app) as (client, _):
        await asyncio.get_running_loop().sock_sendall(client, POST * 3)
        await has_begun.wait()
        client.close()
        await has_left.wait()


@pytest.mark.parametrize("second", [POST, b"no HTTP\r\n\r\n"])
async def test_what_follows_a_running_request_is_left_to_a_new_connection(second: bytes) -> None:
    num_calls, has_seen = 0, asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal num_calls
        num_calls += 1
        await has_seen.wait()
        await JsonResponse("first")(scope, receive, send)

    async with serving(app) as (client, _):
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(client, POST + second)
        has_seen.set()
        received = b""
        while more := await loop.sock_recv(client, 65536):
            received += more
    assert num_calls == received.count(b"HTTP/1.1 200 OK") == received.count(b"HTTP/1.1") == 1
    assert b"\r\nconnection: close\r\n" in received
    assert received.endswith(b'"first"')


class _SentApp:
    """An application whose request has ended, and whose answer is not read."""

    num_open = 0
    is_draining = False

    def __init__(self) -> None:
        self.has_sent = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * LARGE})
        self.has_sent.set()

    async def end_calls(self) -> None:
        pass


@pytest.mark.slow
async def test_an_unread_answer_does_not_keep_the_process_or_fail_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    shutdown, app = Shutdown(), _SentApp()
    monkeypatch.setattr(shutdown, "on_signals", lambda: None)
    monkeypatch.setattr(server, "Shutdown", lambda: shutdown)
    monkeypatch.setattr(server, "LAST_S", PATIENCE_S)
    settings = GatewaySettings(drain_seconds=0.1)
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket() as client:
        running = asyncio.create_task(server.serve(app, settings, listening))  # type: ignore[arg-type]
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, listening.getsockname())
        await asyncio.get_running_loop().sock_sendall(client, POST)
        await app.has_sent.wait()
        shutdown.request("test")
        async with asyncio.timeout(PATIENCE_S / 2):
            assert await running
