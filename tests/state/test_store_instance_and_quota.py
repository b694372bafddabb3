from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
import redis as sync_redis

from decant.state import keys
from decant.state.errors import QuotaExceeded
from decant.state.ids import RequestKey
from decant.state.private_redis import PrivateRedis
from decant.state.quota import TenantLimits
from decant.state.store import Store
from tests.state.factories import make_store, pass_time


def key(number: int, tenant: str = "t") -> RequestKey:
    return RequestKey(tenant, str(number))


async def test_a_store_instance_is_created_once_and_ends_with_the_data(store: Store, bare: sync_redis.Redis) -> None:
    found = await asyncio.gather(*(store.instance.current() for _ in range(8)))
    assert len({instance.id for instance in found}) == 1
    assert found[0].refill_left_s > 0
    bare.flushall()
    assert (await store.instance.current()).id != found[0].id


async def test_the_age_of_a_store_instance_grows(server: PrivateRedis, bare: sync_redis.Redis) -> None:
    async with make_store(server.url, refill_s=60) as store:
        assert (await store.instance.current()).refill_left_s > 0
        pass_time(bare, 60)
        now = await store.instance.current()
        assert now.refill_left_s == 0
        assert now.age_s >= 60


async def test_no_more_than_the_limit_is_in_flight(store: Store, bare: sync_redis.Redis) -> None:
    limits = TenantLimits(in_flight=3)
    results = await asyncio.gather(
        *(store.quotas.acquire(key(n), 1, limits) for n in range(10)), return_exceptions=True
    )
    refused = [result for result in results if isinstance(result, QuotaExceeded)]
    assert len(refused) == 7
    assert (refused[0].quota, refused[0].limit, refused[0].value) == ("in_flight", 3, 4)
    await store.quotas.acquire(key(0, "other"), 1, limits)
    assert bare.zcard(keys.quota("t")[0]) == 3


async def test_a_repeated_release_frees_one_slot(store: Store) -> None:
    limits = TenantLimits(in_flight=1)
    assert await store.quotas.acquire(key(1), 1, limits)
    assert not await store.quotas.acquire(key(1), 1, limits), "it was acquired before"
    await store.quotas.release(key(1), 1, limits)
    await store.quotas.acquire(key(2), 1, limits)
    await store.quotas.release(key(1), 1, limits)
    with pytest.raises(QuotaExceeded):
        await store.quotas.acquire(key(3), 1, limits)


async def test_the_quota_leases_of_a_dead_router_expire(server: PrivateRedis, bare: sync_redis.Redis) -> None:
    limits = TenantLimits(in_flight=2, tokens_per_minute=1000)
    async with make_store(server.url, quota_lease_s=60) as store:
        await store.quotas.acquire(key(1), 10, limits)
        await store.quotas.acquire(key(2), 10, limits)
        pass_time(bare, 40)
        await store.quotas.renew([key(2)])
        pass_time(bare, 30)
        await store.quotas.acquire(key(3), 10, limits)
        with pytest.raises(QuotaExceeded):
            await store.quotas.acquire(key(4), 10, limits)
        assert set(bare.hkeys(keys.quota("t")[1])) == {b"2", b"3"}
        pass_time(bare, 60)
        assert not bare.exists(*keys.quota("t")[:2])


async def test_running_requests_are_counted_again_in_an_emptied_redis(store: Store, bare: sync_redis.Redis) -> None:
    limits = TenantLimits(in_flight=2)
    await store.quotas.acquire(key(1), 1, limits)
    bare.flushall()
    await store.quotas.renew([key(1), key(2), key(1, "other")])
    with pytest.raises(QuotaExceeded):
        await store.quotas.acquire(key(3), 1, limits)


async def test_tokens_are_charged_once_and_settled_by_what_was_used(store: Store, bare: sync_redis.Redis) -> None:
    limits = TenantLimits(tokens_per_minute=1000)
    for _ in range(3):
        await store.quotas.acquire(key(1), 900, limits)
    with pytest.raises(QuotaExceeded) as caught:
        await store.quotas.acquire(key(2), 200, limits)
    assert (caught.value.quota, caught.value.limit) == ("tokens_per_minute", 1000)
    assert 1000 < caught.value.value <= 1100
    assert 0 < caught.value.retry_after_s <= 6.1, "100 tokens come back in 6 s"
    assert bare.zcard(keys.quota("t")[0]) == 1, "nothing of a refused request is counted"
    for _ in range(3):
        await store.quotas.release(key(1), 300, limits)
    pass_time(bare, 6)
    await store.quotas.acquire(key(2), 790, limits)
    with pytest.raises(QuotaExceeded):
        await store.quotas.acquire(key(3), 200, limits)


async def test_a_request_larger_than_the_minute_waits_for_a_full_one_and_is_taken(store: Store) -> None:
    limits = TenantLimits(tokens_per_minute=1000)
    await store.quotas.acquire(key(1), 5000, limits)
    with pytest.raises(QuotaExceeded) as caught:
        await store.quotas.acquire(key(2), 5000, limits)
    assert 295 < caught.value.retry_after_s <= 300


async def test_a_full_minute_holds_no_key(store: Store, bare: sync_redis.Redis) -> None:
    began = time.monotonic()
    await store.quotas.acquire(key(1), 100, TenantLimits(tokens_per_minute=200))
    left_ms: Any = bare.pttl(keys.quota("t")[2])
    assert left_ms + (time.monotonic() - began) * 1000 > 29_000
    assert left_ms <= 30_001


@pytest.mark.parametrize("limits", [{"in_flight": -1}, {"tokens_per_minute": 0}])
def test_limits_that_mean_nothing_are_refused(limits: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="from"):
        TenantLimits(**limits)


async def test_no_limit_and_a_limit_of_zero_are_two_things(store: Store) -> None:
    with pytest.raises(QuotaExceeded):
        await store.quotas.acquire(key(1), 1, TenantLimits(in_flight=0))
    await store.quotas.acquire(key(1), 1, TenantLimits())
