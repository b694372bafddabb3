from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis.crc import key_slot

from decant.state.client import Client
from decant.state.cluster import parse_ranges
from decant.state.errors import StoreFault, StoreUnavailable
from decant.state.scripts import on_key
from decant.state.urls import parse_cluster_url, split_key_prefix
from tests.runtime.certificates import Certificates
from tests.state.every_operation import walk
from tests.state.factories import KEY, make_store
from tests.state.redis_cluster import PASSWORD, SLOTS, RedisCluster, connect, redis_cluster, until
from tests.state.test_connections import error_server
from tests.state.test_every_operation import RULES
from tests.state.test_sentinel import detach, write_on

NODE_TIMEOUT_MS = 500
LAST_THIRD = "key_prefix=a"
"""Its hash tag is in a slot of the last of three primaries, which has the replica."""


def test_a_url_names_some_nodes_and_credentials(tmp_path: Path) -> None:
    ca = str(Certificates(tmp_path).ca)
    url = parse_cluster_url(f"rediss+cluster://me:p%40ss@one,two:5000,[::1]:5001?ssl_ca_certs={ca}")
    assert url.addresses == (("one", 6379), ("two", 5000), ("::1", 5001))
    assert (url.connection["username"], url.connection["password"]) == ("me", "p@ss")
    assert (url.connection["ssl"], url.connection["ssl_ca_certs"]) == (True, ca)
    assert parse_cluster_url("redis+cluster://one").connection == {"ssl": False}


@pytest.mark.parametrize(
    ("node", "host"),
    [
        ([b"10.0.0.1", 7000, b"id"], "10.0.0.1"),
        ([b"", 7000, b"id"], "asked"),
        ([None, 7000, b"id", [b"ip", b"10.0.0.1"]], "asked"),
        ([b"?", 7000, b"id", [b"ip", b"10.0.0.1"]], "10.0.0.1"),
        ([b"?", 7000, b"id", [b"ip", b""]], "asked"),
        ([b"?", 7000, b"id"], "asked"),
    ],
)
def test_a_node_without_a_host_name_is_found_by_its_address(node: list[object], host: str) -> None:
    (only,) = parse_ranges([[0, SLOTS - 1, node, node]], "asked")
    assert only == (0, SLOTS - 1, [(host, 7000)] * 2)


def test_all_keys_of_a_deployment_have_one_hash_tag() -> None:
    assert split_key_prefix("redis+cluster://one") == ("redis+cluster://one", "{decant}")
    url, prefix = split_key_prefix("redis+cluster://one?key_prefix=team-a")
    assert (url, prefix) == ("redis+cluster://one", "{team-a}")
    names = [on_key("GET", key).with_prefix(prefix)[1] for key in ("decant:{a/b}:request", "decant:{workers}:peers")]
    assert {key_slot(str(name).encode()) for name in names} == {key_slot(b"team-a")}


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    with redis_cluster(3) as cluster:
        yield cluster


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["decant", "team-b"])
async def test_every_operation_runs_in_the_slot_of_its_prefix(cluster: RedisCluster, prefix: str) -> None:
    """With the permissions that docs/guides/deploy.md has."""
    rules = f"on >p@ss {RULES.replace('~', f'~{{{prefix}}}')} +cluster|slots"
    for node in cluster.nodes:
        with connect(node) as bare:
            bare.execute_command("ACL", "SETUSER", "decant", *rules.split())
    url = cluster.url.replace(f":{PASSWORD}", "decant:p%40ss")
    async with make_store(url if prefix == "decant" else f"{url}?key_prefix={prefix}") as store:
        for step in await walk(store):
            await step.run()
            await step.run()
        await store.workers.wait_for_change(await store.workers.listing(), 0.01)
        sizes = []
        for node in cluster.nodes:
            with connect(node) as bare:
                sizes.append(bare.dbsize())
                bare.flushall()
        assert sum(size > 0 for size in sizes) == 1


@pytest.mark.slow
async def test_writes_go_on_at_the_promoted_replica_of_a_lost_node() -> None:
    """The replica lacks the last writes."""
    tag = split_key_prefix(f"redis+cluster://x?{LAST_THIRD}")[1]
    assert key_slot(tag.encode()) >= SLOTS * 2 // 3
    journal = f"{tag}decant:{{{KEY}}}:journal"
    with redis_cluster(3, has_replica=True) as cluster:
        lost, promoted = cluster.nodes[2:]
        async with make_store(f"{cluster.url}?{LAST_THIRD}", deadline_s=2.0) as store:
            with connect(promoted) as replica, connect(lost) as primary:
                replica.readonly()
                ends = asyncio.Event()
                writing = asyncio.create_task(write_on(store, ends))
                await asyncio.to_thread(until, lambda: primary.exists(journal, f"{tag}decant:{{workers}}:peers") == 2)
                await asyncio.to_thread(until, lambda: replica.info("replication")["master_link_status"] == "up")
                detach(primary, replica)
                at = replica.info("replication")["slave_repl_offset"]
                await asyncio.to_thread(until, lambda: primary.info("replication")["master_repl_offset"] > at)
                before = primary.strlen(journal) // 4
                lost.stop()
                for node in (*cluster.nodes[:2], promoted):
                    with connect(node) as bare:
                        bare.config_set("cluster-node-timeout", NODE_TIMEOUT_MS)
                await asyncio.to_thread(until, lambda: replica.info("replication")["role"] == "master")
                await asyncio.to_thread(until, lambda: int(replica.strlen(journal)) // 4 > before)
                ends.set()
            tokens = await writing
            stored = await store.requests.read(KEY)
            assert [entry.token for entry in stored.entries] == tokens, "the owner has written all of them again"
            assert len((await store.workers.listing()).present) == 1


@pytest.mark.parametrize(
    "error",
    [
        "MOVED 1234 127.0.0.1:7001",
        "ASK 1234 127.0.0.1:7001",
        "CLUSTERDOWN The cluster is down",
        "TRYAGAIN Multiple keys request during rehashing of slot",
    ],
)
async def test_a_slot_that_moves_is_an_unavailable_store(error: str) -> None:
    """It is no fault of a request, so that its owner writes it again."""
    async with error_server() as (server, url):
        port = int(url.rpartition(":")[2])
        server.slots = port
        client = Client(f"redis+cluster://127.0.0.1:{port}", 10.0, 4)
        await client.execute("PING")
        server.error = error
        with pytest.raises(StoreUnavailable, match=error.split()[-1]):
            await client.execute("SET", "key", "value")
        server.error = ""
        await client.execute("SET", "key", "value")
        await client.close()


async def test_a_redis_that_is_no_cluster_and_a_cluster_without_its_url_are_refused() -> None:
    async with error_server() as (plain, url):
        plain.error = "ERR This instance has cluster support disabled"
        client = Client(url.replace("redis", "redis+cluster", 1), 10.0, 4)
        with pytest.raises(StoreFault, match="cluster support disabled"):
            await client.execute("PING")
        await client.close()
        plain.error = "MOVED 1234 127.0.0.1:7001"
        client = Client(url, 10.0, 4)
        with pytest.raises(StoreFault, match="needs a redis\\+cluster:// URL"):
            await client.execute("GET", "key")
        await client.close()


async def test_a_node_that_does_not_answer_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port: int = silent.getsockname()[1]
        monkeypatch.setattr(random, "shuffle", lambda addresses: addresses.sort(key=lambda each: each[1] == port))
        async with error_server() as (server, url):
            server.slots = int(url.rpartition(":")[2])
            client = Client(f"redis+cluster://127.0.0.1:{port},127.0.0.1:{server.slots}", 60.0, 4)
            await client.execute("PING")
            await client.close()


async def test_without_any_node_the_store_is_unavailable() -> None:
    client = Client("redis+cluster://127.0.0.1:1", 10.0, 4)
    with pytest.raises(StoreUnavailable, match="Connect call failed"):
        await client.execute("PING")
    await client.close()
