from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import redis as sync_redis

from decant.protos.worker_pb2 import ROLE_PREFILL, Load
from decant.state import keys
from decant.state.errors import IncarnationReplaced
from decant.state.ids import Incarnation
from decant.state.private_redis import PrivateRedis
from decant.state.store import Store
from tests.state.factories import make_store, pass_time, router, router_registration, worker_registration

PATIENCE_S = 300.0
"""Ends a test that hangs, long before a waiter returns by itself."""
OLD, NEW = Incarnation("worker", (1 << 64) - 1), Incarnation("worker", 7)


async def incarnations(store: Store) -> set[Incarnation]:
    return {present.incarnation for present in (await store.workers.listing()).present}


async def test_a_registration_reads_back_with_its_load(store: Store) -> None:
    registration = worker_registration(OLD)
    registered = await store.workers.register(registration, Load(free_blocks=3))
    (present,) = (await store.workers.listing()).present
    assert (present.registration, present.load, present.incarnation) == (registration, Load(free_blocks=3), OLD)
    await registered.renew(Load(free_blocks=2))
    (present,) = (await store.workers.listing()).present
    assert present.load == Load(free_blocks=2)


async def test_a_registration_that_cannot_be_read_hides_no_other(store: Store, bare: sync_redis.Redis) -> None:
    for number in range(2):
        await store.workers.register(worker_registration(Incarnation(f"w{number}", number)))
    bare.hset(keys.peers("workers"), "f:w1", b"\xff")
    assert await incarnations(store) == {Incarnation("w0", 0)}
    bare.hdel(keys.peers("workers"), "f:w1", "l:w1")
    assert await incarnations(store) == {Incarnation("w0", 0)}


async def test_workers_and_routers_are_apart(store: Store) -> None:
    await store.workers.register(worker_registration(OLD))
    await store.routers.register(router_registration(router()))
    assert await incarnations(store) == {OLD}
    assert [present.incarnation for present in (await store.routers.listing()).present] == [router()]


async def test_a_registration_that_is_not_renewed_expires(server: PrivateRedis, bare: sync_redis.Redis) -> None:
    async with make_store(server.url, registration_s=60) as store:
        await store.workers.register(worker_registration(OLD))
        other = await store.workers.register(worker_registration(Incarnation("other", 1)))
        assert await incarnations(store) == {OLD, Incarnation("other", 1)}
        pass_time(bare, 40)
        await other.renew()
        pass_time(bare, 30)
        assert not await store.workers.is_registered(OLD)
        assert await incarnations(store) == {Incarnation("other", 1)}
        assert await store.workers.is_registered(Incarnation("other", 1))
        assert not bare.hexists(keys.peers("workers"), f"f:{OLD.id}"), "it left something behind"


async def test_a_listing_has_the_time_since_each_renewal(server: PrivateRedis, bare: sync_redis.Redis) -> None:
    async with make_store(server.url, registration_s=60) as store:
        registered = await store.workers.register(worker_registration(OLD))
        pass_time(bare, 40)
        (present,) = (await store.workers.listing()).present
        assert 40 <= present.renewed_ago_s < 60
        await registered.renew()
        (present,) = (await store.workers.listing()).present
        assert present.renewed_ago_s < 40


async def test_an_expired_registration_returns_when_it_is_renewed(store: Store, bare: sync_redis.Redis) -> None:
    registered = await store.workers.register(worker_registration(OLD))
    for listed in (True, False):
        pass_time(bare, 60)
        if listed:
            assert await incarnations(store) == set()
        await registered.renew()
        assert await incarnations(store) == {OLD}


async def test_an_earlier_incarnation_has_no_effect_on_the_new_one(store: Store) -> None:
    old = await store.workers.register(worker_registration(OLD))
    new = await store.workers.register(worker_registration(NEW))
    with pytest.raises(IncarnationReplaced):
        await old.renew()
    await old.remove()
    assert await incarnations(store) == {NEW}
    assert not await store.workers.is_registered(OLD)
    await new.renew()
    await new.remove()
    assert await incarnations(store) == set()


async def test_the_order_of_incarnations_survives_an_emptied_redis(store: Store, bare: sync_redis.Redis) -> None:
    old = await store.workers.register(worker_registration(OLD))
    new = await store.workers.register(worker_registration(NEW))
    bare.flushall()
    await old.renew()
    await new.renew()
    with pytest.raises(IncarnationReplaced):
        await old.renew()
    assert await incarnations(store) == {NEW}


async def test_registering_twice_keeps_the_order(store: Store) -> None:
    first = await store.workers.register(worker_registration(OLD))
    again = await store.workers.register(worker_registration(OLD))
    await first.renew()
    await again.renew()
    assert await incarnations(store) == {OLD}


async def test_a_change_wakes_waiters(store: Store) -> None:
    seen = await store.workers.listing()
    waiting = asyncio.create_task(store.workers.wait_for_change(seen, timeout_s=600))
    await asyncio.sleep(0.05)
    registered = await store.workers.register(worker_registration(OLD))
    seen = await asyncio.wait_for(waiting, PATIENCE_S)
    assert [present.incarnation for present in seen.present] == [OLD]

    waiting = asyncio.create_task(store.workers.wait_for_change(seen, timeout_s=600))
    registered.registration.role = ROLE_PREFILL
    await registered.renew()
    seen = await asyncio.wait_for(waiting, PATIENCE_S)
    assert [present.registration.role for present in seen.present] == [ROLE_PREFILL]

    waiting = asyncio.create_task(store.workers.wait_for_change(seen, timeout_s=600))
    await asyncio.sleep(0.05)
    await registered.remove()
    assert (await asyncio.wait_for(waiting, PATIENCE_S)).present == ()


async def test_a_change_of_load_alone_wakes_no_waiter(store: Store) -> None:
    registered = await store.workers.register(worker_registration(OLD))
    seen = await store.workers.listing()
    await registered.renew(Load(running=5))
    assert (await store.workers.wait_for_change(seen, timeout_s=0.1)).version == seen.version


@pytest.mark.slow
async def test_an_expiry_wakes_waiters(server: PrivateRedis, bare: sync_redis.Redis) -> None:
    async with make_store(server.url, registration_s=60) as store:
        await store.workers.register(worker_registration(OLD))
        seen = await store.workers.listing()
        assert seen.present
        assert seen.next_end_s
        pass_time(bare, 59)
        seen = replace(seen, next_end_s=max(0.0, seen.next_end_s - 59))
        assert (await asyncio.wait_for(store.workers.wait_for_change(seen, timeout_s=600), PATIENCE_S)).present == ()


async def test_a_registration_in_an_emptied_redis_wakes_waiters(store: Store, bare: sync_redis.Redis) -> None:
    registered = await store.workers.register(worker_registration(OLD))
    seen = await store.workers.listing()
    waiting = asyncio.create_task(store.workers.wait_for_change(seen, timeout_s=600))
    await asyncio.sleep(0.05)
    bare.flushall()
    await registered.renew()
    seen = await asyncio.wait_for(waiting, PATIENCE_S)
    assert [present.incarnation for present in seen.present] == [OLD]
