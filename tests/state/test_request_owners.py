from __future__ import annotations

import asyncio

import pytest
import redis as sync_redis

from decant.state.errors import AlreadyExists, OwnerRegistered, Superseded
from decant.state.keys import Ttls
from decant.state.owned import OwnedRequest
from decant.state.store import Store
from tests.state.factories import (
    CANCELLED,
    DECODING,
    FAILED,
    KEY,
    NOW,
    QUEUED,
    SUCCEEDED,
    continued,
    make_request,
    pass_time,
    router,
    router_registration,
    write_request,
    written,
)


async def test_the_newest_stream_owns_the_request_and_the_previous_owner_is_superseded(store: Store) -> None:
    old = make_request(tokens=[1, 2])
    await store.requests.accept(old)
    await write_request(store, old)
    found = await store.requests.adopt(KEY, router(2))
    assert (found.epoch, found.owner, found.entries) == (2, router(2), written(1, 2))

    old.append(written(99))
    old.transition(FAILED, NOW)
    with pytest.raises(Superseded) as caught:
        await write_request(store, old)
    assert (caught.value.epoch, caught.value.owner) == (2, router(2))
    assert await store.open.of(router(1)) == set()
    assert await store.open.of(router(2)) == {KEY}

    new = OwnedRequest.from_stored(found)
    new.append(written(3))
    await write_request(store, new)
    found = await store.requests.read(KEY)
    assert (found.state, found.entries) == (QUEUED, written(1, 2, 3))


@pytest.mark.parametrize("epoch", [1, 2])
async def test_an_id_belongs_to_the_payload_that_was_stored_first(store: Store, epoch: int) -> None:
    first, second = make_request(tokens=[1]), make_request(owner=router(2), prompt="another", tokens=[2])
    second.epoch = epoch
    await write_request(store, first)
    with pytest.raises(AlreadyExists):
        await write_request(store, second)
    assert await store.open.of(router(2)) == set()
    assert await store.open.of(router(1)) == {KEY}
    continued(first, 3)
    await write_request(store, first)
    found = await store.requests.read(KEY)
    assert (found.payload.prompt, found.entries) == ("once", written(1, 3))


async def test_a_superseded_owner_learns_whether_a_clients_stream_took_the_request(store: Store) -> None:
    first = make_request(tokens=[1])
    await store.requests.accept(first)
    for epoch, stream_epoch, by_client in ((2, 0, False), (3, 3, True), (4, 3, False)):
        found = await store.requests.adopt(KEY, router(epoch), None if by_client else epoch - 1)
        assert (found.epoch, found.stream_epoch) == (epoch, stream_epoch)
        continued(first, epoch)
        with pytest.raises(Superseded) as written_late:
            await write_request(store, first)
        with pytest.raises(Superseded) as adopted_late:
            await store.requests.adopt(KEY, router(9), epoch - 1)
        for error in (written_late.value, adopted_late.value):
            assert (error.epoch, error.stream_epoch) == (epoch, stream_epoch)


@pytest.mark.rule("former-owner-ends-its-stream", "state/lua/request_adopt.lua")
async def test_an_owner_superseded_by_a_cancel_is_notified_at_once(store: Store) -> None:
    old = make_request(tokens=[1, 2])
    await store.requests.accept(old)
    old.transition(DECODING, NOW)
    await write_request(store, old)
    found = await store.requests.cancel(KEY, router(2))
    assert (found.epoch, found.owner, found.state) == (2, router(2), DECODING)
    continued(old, 3)
    with pytest.raises(Superseded) as caught:
        await write_request(store, old)
    assert caught.value.state == CANCELLED
    seen = await store.requests.read(KEY)
    assert (seen.state, seen.entries) == (CANCELLED, written(1, 2))
    assert seen.expires_in_s <= Ttls().ended_s
    again = await store.requests.cancel(KEY, router(3))
    assert (again.epoch, again.owner, again.state) == (2, router(2), CANCELLED)

    new = OwnedRequest.from_stored(found)
    new.record.usage.completion_tokens = 2
    new.transition(CANCELLED, NOW)
    await write_request(store, new)
    assert (await store.requests.read(KEY)).record.usage.completion_tokens == 2
    assert await store.open.of(router(2)) == set()


async def test_an_ended_request_is_not_cancelled(store: Store) -> None:
    request = make_request(tokens=[1])
    await store.requests.accept(request)
    request.transition(SUCCEEDED, NOW)
    await write_request(store, request)
    found = await store.requests.cancel(KEY, router(2))
    assert (found.epoch, found.state) == (1, SUCCEEDED)
    assert (await store.requests.read(KEY)).state == SUCCEEDED


@pytest.mark.rule("one-adoption-of-an-epoch", "state/lua/request_adopt.lua")
async def test_of_many_that_race_for_one_epoch_one_wins(store: Store) -> None:
    await store.requests.accept(make_request())
    races = [store.requests.adopt(KEY, router(n), epoch=1) for n in range(2, 12)]
    results = await asyncio.gather(*races, return_exceptions=True)
    won = [result for result in results if not isinstance(result, BaseException)]
    assert len(won) == 1
    assert all(isinstance(result, Superseded) for result in results if result not in won)
    holders = [n for n in range(1, 12) if await store.open.of(router(n)) and n != 1]
    assert [router(n) for n in holders] == [won[0].owner]


async def test_an_ended_request_is_shown_and_not_adopted(store: Store) -> None:
    request = make_request(tokens=[1])
    await store.requests.accept(request)
    request.transition(SUCCEEDED, NOW)
    await write_request(store, request)
    found = await store.requests.adopt(KEY, router(2))
    assert (found.epoch, found.owner, found.state) == (1, router(1), SUCCEEDED)
    assert await store.open.of(router(2)) == set()
    with pytest.raises(ValueError, match="unfinished"):
        OwnedRequest.from_stored(found)


async def test_an_orphan_is_adopted_only_when_its_owner_is_gone(store: Store, bare: sync_redis.Redis) -> None:
    await store.requests.accept(make_request())
    await store.routers.register(router_registration(router(1)))
    with pytest.raises(OwnerRegistered):
        await store.requests.adopt_orphan(KEY, router(2))
    assert await store.open.of(router(2)) == set()
    assert (await store.requests.read(KEY)).epoch == 1

    pass_time(bare, Ttls().registration_s)
    assert (await store.requests.adopt_orphan(KEY, router(2))).owner == router(2)


async def test_a_repeated_adoption_changes_nothing(store: Store) -> None:
    await store.requests.accept(make_request())
    for epoch in (1, 1, None):
        found = await store.requests.adopt(KEY, router(2), epoch)
        assert (found.epoch, found.owner) == (2, router(2))
