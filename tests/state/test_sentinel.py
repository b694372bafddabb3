from __future__ import annotations

import asyncio
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import pytest
import redis as sync_redis

from decant.state.client import Client
from decant.state.errors import StoreUnavailable
from decant.state.private_redis import PrivateRedis, find_redis_server
from decant.state.store import Store
from decant.state.urls import BadUrl, check_url, parse_sentinel_url, split_key_prefix
from tests.ports import reserved_port
from tests.runtime.certificates import Certificates
from tests.state.factories import KEY, make_request, make_store, router, worker_registration, write_request, written

PATIENCE_S = 300.0
SERVICE = "decant"
PASSWORD = "secret"
DOWN_AFTER_MS = 500


@dataclass
class Watched:
    """A primary with a replica, and the sentinel that watches them.

    The sentinel waits for half a minute, its default: a busy machine must not promote the replica too early.
    """

    primary: PrivateRedis
    replica: PrivateRedis
    sentinel_port: int

    @property
    def url(self) -> str:
        """Its first sentinel does not exist."""
        return f"redis+sentinel://:{quote(PASSWORD)}@127.0.0.1:1,127.0.0.1:{self.sentinel_port}/{SERVICE}"


@pytest.fixture
def watched() -> Iterator[Watched]:
    with ExitStack() as stack:
        ports = [stack.enter_context(reserved_port()) for _ in range(3)]
        primary, replica = (stack.enter_context(PrivateRedis(port=port)) for port in ports[:2])
        for one in (primary, replica):
            with sync_redis.Redis.from_url(one.url) as bare:
                bare.config_set("masterauth", PASSWORD)
                bare.config_set("requirepass", PASSWORD)
        with connect(replica) as bare:
            bare.replicaof("127.0.0.1", str(ports[0]))
            until(lambda: bare.info("replication")["master_link_status"] == "up")
        stack.enter_context(sentinel(ports[2], ports[0]))
        with sync_redis.Redis(port=ports[2]) as bare:
            until(lambda: bare.sentinel_masters()[SERVICE]["num-slaves"] == 1)
        yield Watched(primary, replica, ports[2])


@contextmanager
def sentinel(port: int, primary_port: int) -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="t") as folder:
        file = Path(folder) / "sentinel.conf"
        file.write_text(
            f"port {port}\nbind 127.0.0.1\ndir {folder}\nsentinel monitor {SERVICE} 127.0.0.1 {primary_port} 1\n"
            f"sentinel auth-pass {SERVICE} {PASSWORD}\nsentinel failover-timeout {SERVICE} 5000\n"
        )
        process = subprocess.Popen([find_redis_server(), str(file), "--sentinel"], stdout=subprocess.DEVNULL)
        try:
            with sync_redis.Redis(port=port) as bare:
                until(lambda: answers(bare))
            yield
        finally:
            process.kill()
            process.wait()


def answers(bare: sync_redis.Redis) -> bool:
    try:
        return bool(bare.ping())
    except sync_redis.ConnectionError:
        return False


def until(holds: Callable[[], object]) -> None:
    ends = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.05)


async def repeated(call: Callable[[], Awaitable[object]]) -> None:
    """Call until Redis takes it."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                await call()
            except StoreUnavailable:
                await asyncio.sleep(0.05)
            else:
                return


async def write_on(store: Store, ends: asyncio.Event) -> list[int]:
    """Write a token and a registration again and again; return the tokens."""
    request, tokens = make_request(), list[int]()
    while not ends.is_set():
        tokens.append(len(tokens))
        request.append(written(tokens[-1]))
        await repeated(lambda: write_request(store, request))
        await repeated(lambda: store.workers.register(worker_registration(router())))
        await asyncio.sleep(0.01)
    return tokens


@pytest.mark.slow
async def test_writes_go_on_at_the_promoted_replica_which_lacks_the_last_ones(watched: Watched) -> None:
    async with make_store(watched.url, deadline_s=2.0) as store:
        ends = asyncio.Event()
        writing = asyncio.create_task(write_on(store, ends))
        with (
            connect(watched.replica) as replica,
            connect(watched.primary) as primary,
            sync_redis.Redis(port=watched.sentinel_port) as sentinels,
        ):
            await asyncio.to_thread(until, lambda: replica.exists(f"decant:{{{KEY}}}:request"))
            detach(primary, replica)
            journal = f"decant:{{{KEY}}}:journal"
            await asyncio.to_thread(until, lambda: replica.strlen(journal) < primary.strlen(journal))
            written_before = primary.strlen(journal) // 4
            watched.primary.stop()
            sentinels.sentinel_set(SERVICE, "down-after-milliseconds", DOWN_AFTER_MS)
            await asyncio.to_thread(until, lambda: replica.info("replication")["role"] == "master")
            await asyncio.to_thread(until, lambda: replica.strlen(journal) // 4 > written_before)
            ends.set()
            tokens = await writing
            stored = await store.requests.read(KEY)
            assert [entry.token for entry in stored.entries] == tokens, "the owner has written all of them again"
            assert len((await store.workers.listing()).present) == 1


def connect(server: PrivateRedis) -> sync_redis.Redis:
    return sync_redis.Redis.from_url(server.url, password=PASSWORD)


def detach(primary: sync_redis.Redis, replica: sync_redis.Redis) -> None:
    """Let the replica stay behind: it has a wrong password when its connection is closed."""
    replica.config_set("masterauth", "wrong")
    primary.client_kill_filter(_type="slave")


async def test_without_any_sentinel_the_store_is_unavailable() -> None:
    client = Client(f"redis+sentinel://127.0.0.1:1/{SERVICE}", 10.0, 4)
    with pytest.raises(StoreUnavailable, match="No master found for 'decant'"):
        await client.execute("PING")
    await client.close()


def test_a_url_names_sentinels_service_database_and_credentials(tmp_path: Path) -> None:
    ca = str(Certificates(tmp_path).ca)
    url = parse_sentinel_url(
        f"rediss+sentinel://me:p%40ss@one,two:5000,[::1]:5001/main/3?ssl_ca_certs={ca}&sentinel_password=x"
    )
    assert url.addresses == (("one", 26379), ("two", 5000), ("::1", 5001))
    assert (url.service, url.connection["db"], url.connection["username"]) == ("main", 3, "me")
    assert (url.connection["password"], url.connection["ssl"]) == ("p@ss", True)
    assert url.sentinel == {"password": "x", "ssl_ca_certs": ca, "ssl": True}
    assert split_key_prefix("redis+sentinel://one/main?key_prefix=a%3A&ssl_ca_certs=/ca") == (
        "redis+sentinel://one/main?ssl_ca_certs=%2Fca",
        "a:",
    )
    plain = parse_sentinel_url("redis+sentinel://one/main")
    assert (plain.connection, plain.sentinel) == ({"ssl": False}, {"ssl": False})


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("redis+sentinel://one", "a path with the service that the sentinels watch"),
        ("redis+sentinel://one/main/x", "with the number of a database, got /main/x"),
        ("redis+sentinel://:secret@one:x/main", "host:port with a port from 0 to 65535, got another port"),
        ("redis+sentinel://one,,two/main", "host\\[:port\\] of each server"),
        ("redis+sentinel://one/main?sentinel_db=1", "sentinel_username and sentinel_password"),
        ("redis+sentinel://one/main?health_check_interval=x", "options of redis-py"),
        ("redis+sentinel://one/main?foo=1", "options of redis-py's connections, got 'foo'"),
        ("redis+cluster://one?foo=1", "options of redis-py's connections, got 'foo'"),
        ("redis://one?foo=1", "options of redis-py's connections, got 'foo'"),
        ("redis://one?ssl_ca_certs=/ca", "options of redis-py's connections, got 'ssl_ca_certs'"),
        ("redis://one?health_check_interval=x", "options of redis-py"),
        ("redis://one?decode_responses=true", "no option that Decant decides itself, got decode_responses"),
        ("unix:///x?protocol=3", "no option that Decant decides itself, got protocol"),
        ("redis://one?port=7", "no option that Decant decides itself, got port"),
        ("redis+cluster://one,two?host=three", "no option that Decant decides itself, got host"),
        ("redis+sentinel://one/main?retry=5", "no option that Decant decides itself, got retry"),
        ("rediss://one?credential_provider=x", "no option that Decant decides itself, got credential_provider"),
        ("redis://one/main", "a path with the number of a database, such as /1, got a path '/main'"),
        ("redis+cluster://one/1", "a Cluster has one database, got a path '/1'"),
        ("redis+cluster://one?db=1", "a Cluster has one database"),
        ("redis+cluster://one,:5000", "host\\[:port\\] of each server"),
        ("redis+cluster://one?key_prefix={x}", "one key_prefix, of 1 to 64 letters"),
        ("redis://one?key_prefix={x}", "one key_prefix, of 1 to 64 letters"),
        ("redis://one?key_prefix=", "one key_prefix, of 1 to 64 letters"),
        ("redis://one?key_prefix=a&key_prefix=b", "one key_prefix"),
        ("rediss://one?ssl_ca_certs=/no/ca", r"ssl_ca_certs: a file that can be read \(No such.+\), got /no/ca"),
        ("rediss+cluster://one?ssl_certfile=/no/c", "ssl_certfile: a file that can be read .+ got /no/c"),
        ("rediss+sentinel://one/main?ssl_keyfile=/tmp", r"ssl_keyfile: a file that can be read \(Is a directory\)"),
        (f"rediss://one?ssl_keyfile={__file__}", "ssl_certfile beside ssl_keyfile, got ssl_keyfile alone"),
        ("rediss://one?ssl_ca_path=/no/folder", r"ssl_ca_path: a folder that can be read \(No such.+ got /no/f"),
        (f"rediss+cluster://one?ssl_ca_path={__file__}", r"ssl_ca_path: a folder that can be read \(Not a.+ got /"),
        ("rediss+sentinel://one/main?ssl_ca_path=/proc/self/task", "ssl_ca_path: a folder with certificates .+ got /"),
        (f"rediss://one?ssl_ca_certs={__file__}", "options ssl_\\* that fit together, with PEM files, got"),
        ("http://one", "begins with one of redis://, rediss://, unix://, redis\\+sentinel://"),
    ],
)
def test_an_unusable_url_is_refused_by_the_part_that_is_wrong(url: str, message: str) -> None:
    with pytest.raises(BadUrl, match=message) as caught:
        check_url(url)
    assert "secret" not in str(caught.value)
