"""Names of routers: a running client uses the addresses that a name has now, and no proxy of web pages."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import decant
from decant.client import channel
from decant.router.settings import RouterSettings
from decant.runtime.serving.server_settings import server_options
from tests.decant.scripted import PATIENCE_S, Script, delta, finished, serving, started
from tests.decant.two_routers import AsyncClient, Client

NAME = "routers.test"
A_RECORD = 1
_FLAGS = 0x8580  # an authoritative answer


@contextmanager
def name_server(addresses: list[str]) -> Iterator[int]:
    """Serve `addresses`, which may change, as those of every name; yield the port."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listening:
        listening.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=_answer, args=(listening, addresses))
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as last:
                last.sendto(b"", listening.getsockname())
            thread.join(PATIENCE_S)


def _answer(listening: socket.socket, addresses: list[str]) -> None:
    while True:
        query, sender = listening.recvfrom(512)
        if not query:
            return
        end = query.index(0, 12)
        (kind,) = struct.unpack(">H", query[end + 1 : end + 3])
        listed = addresses if kind == A_RECORD else []
        records = [b"\xc0\x0c" + struct.pack(">HHIH", A_RECORD, 1, 1, 4) + socket.inet_aton(one) for one in listed]
        head = query[:2] + struct.pack(">HHHHH", _FLAGS, 1, len(records), 0, 0)
        listening.sendto(head + query[12 : end + 5] + b"".join(records), sender)


async def long_answer(request: Any, context: Any, end: asyncio.Event) -> Any:
    yield started(request)
    yield delta(request, 1, "a")
    while not end.is_set():  # noqa: ASYNC110 - another loop sets it
        await asyncio.sleep(0.01)
    yield delta(request, 2, "b")
    yield finished(request, 2)


@pytest.mark.slow
@pytest.mark.parametrize("blocking", [True, False])
async def test_a_running_client_uses_a_router_that_its_name_has_gained(
    blocking: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "_RESOLVE_MS", 100)
    aging = server_options(RouterSettings(models=("m",), connection_seconds=1))
    first, second, addresses, end = Script(), Script(), ["127.0.0.1"], asyncio.Event()
    first.answering = lambda request, context: long_answer(request, context, end)
    with contextlib.ExitStack() as stack:
        port = int(stack.enter_context(serving(first, options=aging)).rpartition(":")[2])
        stack.enter_context(serving(second, port, "127.0.0.2", aging))
        name = f"dns://127.0.0.1:{stack.enter_context(name_server(addresses))}/{NAME}:{port}"
        async with AsyncClient(name) as client:
            called: Any = stack.enter_context(Client(name)) if blocking else client
            stream = client.stream("x")
            reading = aiter(stream)
            assert (await anext(reading)).text == "a"
            await (asyncio.to_thread(called.server_info) if blocking else called.server_info())
            addresses.append("127.0.0.2")
            ends = time.monotonic() + PATIENCE_S
            while not any(method == "GetServerInfo" for method, _ in second.authorized):
                await (asyncio.to_thread(called.server_info) if blocking else called.server_info())
                await asyncio.sleep(0.01)
                assert time.monotonic() < ends
            end.set()
            assert [delta.text async for delta in reading] == ["b"]
            assert stream.resumed_at == []  # its connection has lasted beyond its age


PROXIES = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "grpc_proxy", "no_proxy", "no_grpc_proxy")


@pytest.fixture
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("variable", PROXIES[:4])
@pytest.mark.usefixtures("no_proxies")
async def test_a_proxy_of_web_pages_gets_no_calls(address: str, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "http://127.0.0.1:1")
    for target in (address, address.replace("127.0.0.1", "localhost")):
        with Client(target) as client:
            assert client.server_info().router_id == "r"
        async with AsyncClient(target) as other:
            assert (await other.server_info()).router_id == "r"


@pytest.mark.usefixtures("no_proxies")
def test_calls_go_through_the_proxy_that_grpc_proxy_names(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    connected: list[bytes] = []

    def accept(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection:
            connected.append(connection.recv(4096))

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=accept, args=(listening,))
        thread.start()
        monkeypatch.setenv("grpc_proxy", f"http://127.0.0.1:{listening.getsockname()[1]}")
        with Client("router.test:50051", resume_seconds=0) as client, pytest.raises(decant.Unavailable) as error:
            client.server_info()
        thread.join(PATIENCE_S)
    assert connected[0].startswith(b"CONNECT router.test:50051")
    assert "(through the proxy of grpc_proxy)" in str(error.value)
