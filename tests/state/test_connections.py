from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import redis as sync_redis
import uvloop

from decant.state import scripts
from decant.state.client import Client
from decant.state.connections import MAX_AGE_S, ConnectionAges
from decant.state.errors import StoreFault, StoreUnavailable
from decant.state.private_redis import PrivateRedis
from decant.state.store import Store
from tests.runtime.certificates import Certificates
from tests.state.factories import KEY, make_request, make_store, router, worker_registration, write_request
from tests.state.redis_proxy import redis_proxy

DEADLINE_S = 30.0
WRAPPED = "ERR Error running script (call to f_9a): @user_script:12: @user_script: 12: -"
"""Redis before 7 puts it before the error of a script's command."""


async def resets_between_calls(server: PrivateRedis) -> None:
    async with redis_proxy(server) as proxy, make_store(proxy.address) as store:
        for number in range(5):
            await store.ping()
            await store.routers.listing()
            opened = proxy.num_opened
            proxy.reset()
            await asyncio.sleep(0.02)  # the client's event loop receives the resets
            await store.ping()
            await store.routers.listing()
            assert proxy.num_opened > opened, f"no connection was reset in round {number}"
        proxy.reset()
        await asyncio.sleep(0.02)


@pytest.mark.rule("reset-of-idle-connections", "state/connections.py:ConnectionPool.of_url")
@pytest.mark.parametrize("run", [uvloop.run, asyncio.run], ids=["uvloop", "asyncio"])
def test_a_reset_of_idle_connections_costs_no_call(
    server: PrivateRedis, run: Callable[[Coroutine[Any, Any, None]], None]
) -> None:
    run(resets_between_calls(server))


@pytest.mark.parametrize("error", [RuntimeError("the handler is closed"), AttributeError("writelines"), EOFError()])
async def test_whatever_the_library_raises_is_an_unavailable_store(
    store: Store, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    async def fail(*_: object) -> None:
        raise error

    for client in store._clients:
        monkeypatch.setattr(client, "_send", fail)
    with pytest.raises(StoreUnavailable, match=str(error) or "EOFError"):
        await store.ping()
    with pytest.raises(StoreUnavailable):
        await write_request(store, make_request(tokens=[1]))
    with pytest.raises(StoreUnavailable):
        await store.routers.listing()


class ErrorServer:
    """Server that replies to commands with an error, and to the start of a connection as Redis does."""

    def __init__(self) -> None:
        self.error = ""
        self.slots = 0  # port of the node that has all slots; 0: it is no node of a Cluster
        self.num_opened = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_opened += 1
        while line := await reader.readline():
            words = []
            for _ in range(int(line[1:])):
                await reader.readline()
                words.append((await reader.readline()).strip())
            if words[0] == b"CLUSTER" and self.slots:
                writer.write(f"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$9\r\n127.0.0.1\r\n:{self.slots}\r\n".encode())
                continue
            is_start = words[0] == b"CLIENT" or not self.error
            writer.write(b"+OK\r\n" if is_start else f"-{self.error}\r\n".encode())
        writer.close()


@asynccontextmanager
async def error_server(tls: ssl.SSLContext | None = None) -> AsyncIterator[tuple[ErrorServer, str]]:
    server = ErrorServer()
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=tls)
    async with listening:
        yield server, f"redis://127.0.0.1:{listening.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize(
    "error",
    [
        "READONLY You can't write against a read only replica.",
        WRAPPED + "READONLY You can't write against a read only replica.",
        "LOADING Redis is loading the dataset in memory",
        "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
        "CLUSTERDOWN The cluster is down",
        "UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)",
    ],
)
async def test_a_server_that_is_no_primary_loses_its_connections(error: str) -> None:
    ages = ConnectionAges()
    async with error_server() as (server, url):
        writing, reading = (Client(url, DEADLINE_S, 4, ages) for _ in range(2))
        for client in (writing, reading):
            await client.execute("PING")
        server.error = error
        with pytest.raises(StoreUnavailable):
            await writing.execute("SET", "key", "value")
        server.error, before = "", server.num_opened
        await reading.execute("GET", "key")
        assert server.num_opened == before + 1, "a reader would never see the error"
        await writing.execute("SET", "key", "value")
        await writing.execute("SET", "key", "value")
        assert server.num_opened <= before + 2, "connections opened since are kept"
        for client in (writing, reading):
            await client.close()


@pytest.mark.parametrize("wrapper", ["", WRAPPED], ids=["plain", "wrapped"])
@pytest.mark.parametrize(
    "error",
    [
        "OOM command not allowed when used memory > 'maxmemory'.",
        "MISCONF Redis is configured to save RDB snapshots, but it is currently not able to persist on disk.",
        "NOREPLICAS Not enough good replicas to write.",
        "BUSY Redis is busy running a script.",
        "TRYAGAIN Multiple keys request during rehashing of slot",
    ],
)
async def test_a_server_that_takes_no_writes_now_is_unavailable_and_keeps_its_connections(
    error: str, wrapper: str
) -> None:
    async with error_server() as (server, url):
        client = Client(url, DEADLINE_S, 4)
        server.error = wrapper + error
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match=error.split()[-1]):
                await client.execute("SET", "key", "value")
        assert server.num_opened == 1
        await client.close()


@pytest.mark.parametrize("wrapper", ["", WRAPPED], ids=["plain", "wrapped"])
@pytest.mark.parametrize("error", ["WRONGTYPE Operation against a key", "NOPERM this user has no permissions"])
async def test_a_permanent_error_stays_one_inside_a_script(error: str, wrapper: str) -> None:
    async with error_server() as (server, url):
        client = Client(url, DEADLINE_S, 4)
        server.error = wrapper + error
        with pytest.raises(StoreFault):
            await client.execute("SET", "key", "value")
        await client.close()


async def test_a_connection_has_a_longest_age() -> None:
    now = 100.0
    async with error_server() as (server, url):
        client = Client(url, DEADLINE_S, 4, ConnectionAges(clock=lambda: now))
        await client.execute("PING")
        now += MAX_AGE_S - 1
        await client.execute("PING")
        assert server.num_opened == 1
        now += 2
        await client.execute("PING")
        await client.execute("PING")
        assert server.num_opened == 2
        await client.close()


@pytest.mark.rule("new-primary", "state/connections.py:ConnectionAges.replace_all", "state/client.py:Client._translate")
async def test_writes_and_reads_reach_the_new_primary_after_one_refusal(server: PrivateRedis) -> None:
    """As after a failover behind one address that cuts no connection."""
    with PrivateRedis() as other:
        async with redis_proxy(server) as proxy, make_store(proxy.address) as store:
            await asyncio.gather(*(write_request(store, make_request(tokens=[1])) for _ in range(4)))
            await asyncio.gather(*(store.requests.read(KEY) for _ in range(4)))
            await asyncio.gather(*(store.workers.listing() for _ in range(4)))
            with sync_redis.Redis.from_url(server.url) as former, sync_redis.Redis.from_url(other.url) as new:
                proxy.target = other
                former.replicaof("127.0.0.1", "1")
                try:
                    with pytest.raises(StoreUnavailable, match="read only"):
                        await store.workers.register(worker_registration(router()))
                    request = make_request(tokens=[1, 2])
                    await write_request(store, request)
                    assert (await store.requests.read(KEY)).length == 2
                    await store.workers.register(worker_registration(router()))
                    assert new.dbsize() > 0
                finally:
                    former.replicaof("NO", "ONE")


async def test_tls_is_used_and_its_certificate_is_verified(server: PrivateRedis, tmp_path: Path) -> None:
    """The server's certificate is for 127.0.0.1."""
    files = Certificates(tmp_path)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(files.certificate, files.key)
    async with redis_proxy(server, tls) as proxy, make_store(f"{proxy.address}?ssl_ca_certs={files.ca}") as store:
        await store.ping()
        async with make_store(proxy.address) as unverified:
            with pytest.raises(StoreUnavailable, match="certificate verify failed"):
                await unverified.ping()
    async with error_server(tls) as (node, url):
        node.slots = int(url.rpartition(":")[2])
        async with make_store(f"rediss+cluster://127.0.0.1:{node.slots}?ssl_ca_certs={files.ca}") as store:
            await store.ping()


async def test_a_full_redis_is_unavailable_for_writes_and_readable(store: Store, bare: sync_redis.Redis) -> None:
    request = make_request(tokens=[1])
    await write_request(store, request)
    bare.config_set("maxmemory", 1)
    try:
        request.append([*make_request(tokens=[2]).entries()])
        writes: list[Coroutine[Any, Any, object]] = [
            write_request(store, request),
            store.requests.accept(make_request()),
            store.workers.register(worker_registration(router())),
            store.requests.adopt(KEY, router(2)),
        ]
        for write in writes:
            with pytest.raises(StoreUnavailable):
                await write
        assert (await store.requests.read(KEY)).length == 1
    finally:
        bare.config_set("maxmemory", 0)
    await write_request(store, request)
    assert (await store.requests.read(KEY)).length == 2


async def test_a_redis_that_refuses_scripts_names_the_reason(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = scripts.script("missing", "return 1")
    monkeypatch.setattr(Client, "_load", lambda *_: asyncio.sleep(0))
    with pytest.raises(StoreUnavailable, match="No matching script"):
        await store._client.run(missing.call([]))
