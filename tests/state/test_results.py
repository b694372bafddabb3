"""Retained results: their index, their bytes, and what is deleted when they exceed a limit."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis as sync_redis

from decant.protos.worker_pb2 import Load
from decant.state import keys
from decant.state.client import Client
from decant.state.errors import StateError, StoreUnavailable
from decant.state.ids import Incarnation, RequestKey
from decant.state.keys import Ttls
from decant.state.owned import OwnedRequest
from decant.state.private_redis import PrivateRedis
from decant.state.quota import TenantLimits
from decant.state.results import StoreMemory
from decant.state.scripts import Command
from decant.state.store import Store
from tests.ports import reserved_port
from tests.state.factories import (
    CANCELLED,
    FAILED,
    NOW,
    SUCCEEDED,
    everything,
    make_request,
    make_store,
    pass_time,
    router,
    router_registration,
    worker_registration,
    write_request,
)

MIB = 1 << 20
PATIENCE = 20.0
LARGE = range(1600)
BYTES = keys.RESULTS[1]


async def end(store: Store, *ids: str, tokens: Any = LARGE, prompt: str = "once") -> list[OwnedRequest]:
    requests = [make_request(RequestKey("tenant", id), prompt=prompt, tokens=tokens) for id in ids]
    for request in requests:
        assert await store.requests.accept(request) is None
        request.transition(SUCCEEDED, NOW)
        await write_request(store, request)
    return requests


async def retained(store: Store, *requests: OwnedRequest) -> list[str]:
    return [request.key.id for request in requests if await store.requests.exists(request.key)]


async def test_the_oldest_results_go_first_and_no_more_than_needed(store: Store) -> None:
    ended = await end(store, *"abcdef")
    total = (await store.results.trim(1 << 40)).bytes
    limit = total * 7 // 12  # of three, whose sizes differ by some bytes, and not of four
    left = await store.results.trim(limit)
    assert (left.count, left.discarded) == (3, 3)
    assert left.bytes <= limit
    assert await retained(store, *ended) == ["d", "e", "f"]
    again = await store.results.trim(limit)
    assert (again.bytes, again.count, again.discarded) == (left.bytes, 3, 0)


async def test_results_that_are_added_while_others_are_counted_are_noticed(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reply that counts the others may be the later one."""
    run = Client.run

    async def run_late(client: Client, command: Command) -> Any:
        reply = await run(client, command)
        monkeypatch.undo()
        await end(store, "late")
        return reply

    await end(store, "a")
    monkeypatch.setattr(Client, "run", run_late)
    counted = await store.results.trim(1 << 40)
    assert counted.count == 1
    async with asyncio.timeout(PATIENCE):
        await store.results.wait_above(counted.bytes)


async def test_unfinished_requests_registrations_and_quotas_stay(store: Store, bare: sync_redis.Redis) -> None:
    limits = TenantLimits(in_flight=10, tokens_per_minute=20)
    running = make_request(RequestKey("tenant", "running"), tokens=LARGE)
    await store.requests.accept(running)
    await write_request(store, running)
    await store.quotas.acquire(running.key, 10, limits)
    await store.workers.register(worker_registration(Incarnation("w", 3)))
    await store.routers.register(router_registration(router(1)), Load(running=1))
    before = everything(bare)
    await end(store, *"abc")
    assert (await store.results.trim(0)).discarded == 3
    assert everything(bare) == before | {BYTES.encode(): {b"total": b"0"}}


async def test_an_unfinished_request_under_the_id_of_a_result_stays(store: Store) -> None:
    failed, again = make_request(), make_request()
    failed.transition(FAILED, NOW)
    await write_request(store, failed)
    await store.requests.accept(again)
    assert (await store.results.trim(0)).count == 0
    assert await store.requests.exists(again.key)

    again.transition(SUCCEEDED, NOW)
    await write_request(store, again)
    assert (await store.results.trim(1 << 40)).count == 1


async def test_a_cancelled_request_counts_once_its_new_owner_has_written_it(store: Store) -> None:
    request = make_request(tokens=LARGE)
    await store.requests.accept(request)
    adopted = OwnedRequest.from_stored(await store.requests.cancel(request.key, router(2)))
    adopted.transition(CANCELLED, NOW)
    await write_request(store, adopted)
    assert (await store.results.trim(1 << 40)).count == 1


@pytest.mark.parametrize("prompt", ["once", "long" * 5000])
async def test_bytes_are_those_that_redis_gets_back(store: Store, bare: sync_redis.Redis, prompt: str) -> None:
    def used() -> int:
        info: Any = bare.info("memory")
        return int(info["used_memory"])

    await end(store, "first", prompt=prompt)
    before, counted = used(), (await store.results.trim(1 << 40)).bytes
    await end(store, *map(str, range(200)), prompt=prompt)
    grown, counted = used() - before, (await store.results.trim(1 << 40)).bytes - counted
    assert counted == pytest.approx(grown, rel=0.1)


async def test_a_write_that_is_repeated_counts_once(store: Store) -> None:
    (request,) = await end(store, "a")
    once = await store.results.trim(1 << 40)
    for _ in range(3):
        request.synced_state, request.is_listed = None, True
        await write_request(store, request)
    again = await store.results.trim(1 << 40)
    assert again.count == 1
    assert again.bytes == pytest.approx(once.bytes, rel=0.1)


async def test_expired_results_leave_the_index(store: Store, bare: sync_redis.Redis) -> None:
    await end(store, *"abc")
    for key in keys.RESULTS:
        bare.persist(key)
    pass_time(bare, Ttls().ended_s + 1)
    (left,) = await end(store, "d")
    found = await store.results.trim(1 << 40)
    assert found.count == 1
    assert found.bytes == int(bare.hget(BYTES, str(left.key)) or 0) == int(bare.hget(BYTES, "total") or 0)


async def test_the_index_expires_with_the_last_result(store: Store, bare: sync_redis.Redis) -> None:
    await end(store, "a")
    assert bare.exists(*keys.RESULTS) == 2
    pass_time(bare, Ttls().ended_s + 1)
    assert bare.exists(*keys.RESULTS) == 0


async def test_a_router_that_ends_while_it_deletes_leaves_nothing_for_good(
    store: Store, bare: sync_redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each half of a deletion is lost once: the entries stay, or Redis runs only the first deletions."""
    ended = await end(store, *"abcd")
    original = Client.try_all

    async def cut(client: Client, commands: list[Command], deadlines: float = 1.0) -> list[Any]:
        replies = await original(client, commands[:2], deadlines)
        if len(commands) > 1:
            raise StoreUnavailable("cut")
        return replies

    monkeypatch.setattr(Client, "try_all", cut)
    with pytest.raises(StoreUnavailable):
        await store.results.trim(0)
    monkeypatch.undo()
    assert await retained(store, *ended) == ["c", "d"]
    assert (await store.results.trim(0)).count == 0
    assert await retained(store, *ended) == []
    assert bare.hgetall(BYTES) == {b"total": b"0"}


async def test_routers_that_delete_at_the_same_time_count_every_result_once(store: Store, server: PrivateRedis) -> None:
    ended = await end(store, *map(str, range(30)))
    async with make_store(server.url) as other:
        total = (await store.results.trim(1 << 40)).bytes
        found = await asyncio.gather(*(one.results.trim(total // 2) for one in (store, other) * 4))
        left = await store.results.trim(total // 2)
    kept = await retained(store, *ended)
    assert sum(one.discarded for one in found) == len(ended) - len(kept) == pytest.approx(15, abs=1)
    assert left.count == len(kept)
    assert total * 0.45 < left.bytes <= total // 2


async def test_an_unreadable_result_does_not_stop_the_deletion(store: Store, bare: sync_redis.Redis) -> None:
    ended = await end(store, *"abc")
    bare.delete(keys.request(ended[0].key))
    bare.set(keys.request(ended[0].key), "of another program")
    assert (await store.results.trim(0)).count == 0
    assert await retained(store, *ended[1:]) == []


async def test_results_are_deleted_while_redis_is_full() -> None:
    with reserved_port() as port, PrivateRedis(port=port) as server, sync_redis.Redis.from_url(server.url) as bare:
        async with make_store(server.url) as store:
            ended = await end(store, *map(str, range(50)))
            bare.config_set("maxmemory", 1)
            with pytest.raises(StateError):
                await end(store, "another")
            left = await store.results.trim(0)
            assert (left.count, left.discarded) == (0, 50)
            assert await retained(store, *ended) == []
            memory = await store.results.memory()
            assert (memory.maximum, memory.policy) == (1, "noeviction")
            assert memory.used > 100_000


@pytest.mark.parametrize(
    ("maximum", "policy", "evicts"),
    [(MIB, "noeviction", False), (MIB, "allkeys-lru", True), (MIB, "volatile-ttl", True), (0, "allkeys-lru", False)],
)
def test_every_policy_but_one_takes_live_keys(maximum: int, policy: str, evicts: bool) -> None:
    assert StoreMemory(used=1, maximum=maximum, policy=policy).evicts is evicts
