from __future__ import annotations

import asyncio
from collections import defaultdict

import pytest
import redis as sync_redis

from decant.state.errors import OwnerRegistered, Superseded
from decant.state.ids import Incarnation, RequestKey
from decant.state.owned import OwnedRequest
from decant.state.private_redis import PrivateRedis
from decant.state.store import Store
from tests.state.factories import (
    NOW,
    SUCCEEDED,
    list_open,
    make_request,
    make_store,
    pass_time,
    router,
    router_registration,
    write_request,
)


def request_keys(count: int) -> list[RequestKey]:
    return [RequestKey("t", str(n)) for n in range(count)]


async def test_a_living_router_keeps_its_requests(store: Store) -> None:
    await store.routers.register(router_registration(router(1)))
    await list_open(store, router(1), request_keys(2))
    assert await store.open.orphaned() == set()
    with pytest.raises(OwnerRegistered):
        await store.open.take(router(1), router(2))
    assert await store.open.of(router(1)) == set(request_keys(2))


async def test_an_earlier_incarnation_of_a_live_router_is_dead(store: Store) -> None:
    restarted = Incarnation(router(1).id, 5)
    await list_open(store, router(1), request_keys(2))
    await store.routers.register(router_registration(router(1)))
    await store.routers.register(router_registration(restarted))
    assert await store.open.orphaned() == {router(1)}
    assert set(await store.open.take(router(1), restarted)) == set(request_keys(2))
    assert await store.open.orphaned() == set()


async def test_of_several_routers_one_takes_each_request(store: Store) -> None:
    await list_open(store, router(1), request_keys(50))
    adopters = [router(n) for n in range(2, 7)] * 2
    taken = await asyncio.gather(*(store.open.take(router(1), adopter, max_requests=7) for adopter in adopters))
    assert sorted(key for part in taken for key in part) == sorted(request_keys(50))
    open_by_adopter = defaultdict[Incarnation, set[RequestKey]](set)
    for adopter, part in zip(adopters, taken, strict=True):
        open_by_adopter[adopter].update(part)
    for adopter, keys in open_by_adopter.items():
        assert await store.open.of(adopter) == keys
    # Redis runs the calls in any order: both calls of one adopter may be among the last two, which find nothing left.
    with_requests = {adopter for adopter, keys in open_by_adopter.items() if keys}
    assert await store.open.orphaned() == with_requests, "what its adopter doesn't finish is found again"


async def test_more_than_one_command_holds(store: Store) -> None:
    await list_open(store, router(1), request_keys(2500))
    assert len(await store.open.of(router(1))) == 2500
    await store.open.remove(router(1), request_keys(2499))
    assert await store.open.of(router(1)) == {request_keys(2500)[-1]}


async def test_a_dead_routers_requests_go_on_elsewhere(server: PrivateRedis, bare: sync_redis.Redis) -> None:
    async with make_store(server.url, registration_s=60) as store:
        await store.routers.register(router_registration(router(1)))
        held = [make_request(key, tokens=[1]) for key in request_keys(3)]
        for request in held:
            await store.requests.accept(request)
        held[2].transition(SUCCEEDED, NOW)
        await store.requests.flush(held)
        pass_time(bare, 60)

        assert await store.open.orphaned() == {router(1)}
        for key in await store.open.take(router(1), router(2)):
            adopted = OwnedRequest.from_stored(await store.requests.adopt_orphan(key, router(2)))
            assert adopted.epoch == 2
            adopted.start_attempt(NOW)
            adopted.transition(SUCCEEDED, NOW)
            await write_request(store, adopted)
        assert await store.open.of(router(2)) == set()
        lost = await store.requests.flush(held[:2])
        owners = {request: error.owner for request, error in lost.items() if isinstance(error, Superseded)}
        assert owners == dict.fromkeys(held[:2], router(2))
