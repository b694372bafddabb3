from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
import redis as sync_redis

from decant.protos.inference_pb2 import GenerateRequest, ResponseOptions
from decant.protos.state_pb2 import RequestRecord
from decant.state import keys
from decant.state.errors import AlreadyExists, StoreFault, StoreRefilling, Superseded, UnknownRequest
from decant.state.ids import RequestKey, State
from decant.state.journal import Entry
from decant.state.keys import Ttls
from decant.state.owned import OwnedRequest
from decant.state.private_redis import PrivateRedis
from decant.state.store import Store
from tests.state.factories import (
    CANCELLED,
    DECODING,
    FAILED,
    HANDING_OFF,
    KEY,
    NOW,
    PREFILLING,
    QUEUED,
    SUCCEEDED,
    continued,
    logprobs,
    make_request,
    make_store,
    packed,
    pass_time,
    router,
    router_registration,
    write_request,
    written,
)


async def test_a_request_reads_back_as_it_was_written(store: Store) -> None:
    request = make_request()
    assert await store.requests.accept(request) is None
    request.transition(PREFILLING, NOW + timedelta(seconds=1))
    request.append([Entry(0, 7), Entry(255, (1 << 24) - 1)])
    request.record.usage.completion_tokens = 2
    await write_request(store, request)

    found = await store.requests.read(KEY)
    assert (found.epoch, found.attempt, found.state, found.owner) == (1, 1, PREFILLING, router())
    assert found.payload == GenerateRequest(request_id=KEY.id, prompt="once")
    assert found.record == request.record
    assert [(t.state, t.time.ToSeconds() - int(NOW.timestamp())) for t in found.record.transitions] == [
        (QUEUED, 0),
        (PREFILLING, 1),
    ]
    assert found.entries == [Entry(0, 7), Entry(255, (1 << 24) - 1)]
    assert (await store.requests.read(KEY, first=1)).entries == [Entry(255, (1 << 24) - 1)]


@pytest.mark.parametrize(
    "shown", [ResponseOptions(logprobs=2, prompt_logprobs=3), ResponseOptions(logprobs=0), ResponseOptions()]
)
async def test_logprobs_read_back_beside_their_tokens(store: Store, shown: ResponseOptions) -> None:
    request = make_request(shown=shown)
    request.record.prompt_tokens = 3
    await store.requests.accept(request)
    of_prompt = [logprobs(place, 3) for place in (7, 8)]
    for token in range(4):
        continued(request, token)
        await write_request(store, request)
        if token == 1:
            request.add_prompt_logprobs(packed(of_prompt, shown.prompt_logprobs))
    equal = make_request(owner=router(2), shown=shown)
    for found in (
        await store.requests.read(KEY),
        await store.requests.accept(equal),
        await store.requests.adopt(KEY, router(2)),
    ):
        assert found
        asked = request.logprobs_options.output
        assert found.entries == written(0, 1, 2, 3)
        assert found.logprobs.entries() == ([] if asked is None else [logprobs(token, asked) for token in range(4)])
        assert found.prompt_logprobs.entries() == (of_prompt if shown.prompt_logprobs else [])
    found = await store.requests.read(KEY)
    assert (await store.requests.read(KEY, first=3)).logprobs.entries() == found.logprobs.entries(3)

    new = OwnedRequest.from_stored(found)
    continued(new, 4)
    await write_request(store, new)
    again = await store.requests.read(KEY)
    assert len(again.logprobs) == (0 if asked is None else 5)
    assert again.prompt_logprobs.entries() == (of_prompt if shown.prompt_logprobs else [])


async def test_each_token_has_its_logprobs_or_none_has() -> None:
    request = make_request(shown=ResponseOptions(logprobs=1))
    with pytest.raises(ValueError, match="logprobs of 2 entries are 32 bytes, got 16"):
        request.append(written(1, 2), packed([logprobs(1, 1)], 1))
    assert request.length == 0


async def test_the_same_id_and_payload_shows_what_is_there(store: Store) -> None:
    first = make_request(tokens=[5])
    await store.requests.accept(first)
    await write_request(store, first)

    found = await store.requests.accept(make_request(owner=router(2)))
    assert found
    assert (found.owner, found.entries) == (router(1), written(5))
    assert await store.open.of(router(1)) == {KEY}
    assert await store.open.of(router(2)) == set(), "the request isn't its own"


async def test_equal_payloads_are_equal_in_whatever_order_they_were_filled(store: Store) -> None:
    for tokens in ([1, 2, 3], [3, 2, 1]):
        payload = GenerateRequest()
        for token in tokens:
            payload.sampling.logit_bias[token] = 1.0
        request = OwnedRequest.begin(KEY, router(), payload, RequestRecord(), NOW)
        await store.requests.accept(request)


async def failed(store: Store, *tokens: int) -> OwnedRequest:
    request = make_request(tokens=tokens, shown=ResponseOptions(prompt_logprobs=0))
    await store.requests.accept(request)
    request.record.prompt_tokens = 2
    request.add_prompt_logprobs(packed([logprobs(1, 0)], 0))
    request.transition(FAILED, NOW)
    await write_request(store, request)
    return request


def equal_request(owner: int) -> OwnedRequest:
    return make_request(owner=router(owner), shown=ResponseOptions(prompt_logprobs=0))


async def test_a_request_that_failed_without_a_token_is_replaced_by_an_equal_one(store: Store) -> None:
    old = await failed(store)
    assert (await store.requests.read(KEY)).state == FAILED
    with pytest.raises(AlreadyExists):
        await store.requests.accept(make_request(prompt="another"))
    again = equal_request(2)
    assert await store.requests.accept(again) is None
    assert again.epoch == 2
    found = await store.requests.read(KEY)
    assert (found.epoch, found.attempt, found.state, found.owner) == (2, 1, QUEUED, router(2))
    assert not found.prompt_logprobs.entries()
    assert found.expires_in_s > Ttls().ended_s
    assert await store.open.of(router(2)) == {KEY}

    old.synced_state = None
    with pytest.raises(Superseded):
        await write_request(store, old)
    again.transition(DECODING, NOW)
    await write_request(store, again)
    assert (await store.requests.read(KEY)).state == DECODING


@pytest.mark.parametrize(("state", "tokens"), [(FAILED, 1), (CANCELLED, 0), (SUCCEEDED, 0), (DECODING, 0)])
async def test_whatever_else_has_the_id_keeps_it(store: Store, state: State, tokens: int) -> None:
    request = make_request(tokens=range(tokens))
    await store.requests.accept(request)
    request.transition(state, NOW)
    await write_request(store, request)
    found = await store.requests.accept(make_request(owner=router(2)))
    assert found
    assert (found.epoch, found.owner, found.state) == (1, router(1), state)


async def test_one_of_many_concurrent_restarts_of_a_failed_request_wins(store: Store) -> None:
    await failed(store)
    asking = [equal_request(n) for n in range(2, 12)]
    found = await asyncio.gather(*map(store.requests.accept, asking))
    assert found.count(None) == 1
    winner = asking[found.index(None)]
    assert all((one.epoch, one.owner) == (2, winner.owner) for one in found if one)
    assert [n for n in range(2, 12) if await store.open.of(router(n))] == [asking.index(winner) + 2]


async def test_a_request_after_an_unrecorded_failure_has_the_greater_epoch(store: Store) -> None:
    old = await failed(store)
    await store._client.execute("FLUSHALL")
    again = equal_request(1)
    again.epoch = 2
    assert await store.requests.accept(again) is None
    assert again.epoch == 2
    old.synced_state = None
    assert list(await store.requests.flush([old])) == [old]
    assert (await store.requests.read(KEY)).state == QUEUED
    assert await store.open.of(router(1)) == {KEY}, "the entry is the newer one's"


async def test_an_id_with_another_payload_is_refused(store: Store) -> None:
    await store.requests.accept(make_request())
    with pytest.raises(AlreadyExists):
        await store.requests.accept(make_request(owner=router(2), prompt="twice"))
    assert await store.open.of(router(2)) == set()
    assert (await store.requests.read(KEY)).payload.prompt == "once"


@pytest.mark.rule("other-tenants-id-unknown", "state/ids.py:RequestKey")
async def test_another_tenants_id_is_unknown(server: PrivateRedis, bare: sync_redis.Redis) -> None:
    async with make_store(server.url, refill_s=0) as store:
        await store.requests.accept(make_request(RequestKey("a/b", "c")))
        for other in (RequestKey("a", "b/c"), RequestKey("a", "c"), RequestKey("", "a/b/c"), RequestKey("a%2Fb", "c")):
            with pytest.raises(UnknownRequest):
                await store.requests.read(other)
            with pytest.raises(UnknownRequest):
                await store.requests.adopt(other, router(2))
            assert await store.requests.accept(make_request(other, prompt="other")) is None


@pytest.mark.parametrize("text", ["}{", "a}b", "", "é/%", "a b\n\0", "{}"])
def test_no_request_id_breaks_the_hash_tag(text: str) -> None:
    key = RequestKey(text, text)
    assert RequestKey.parse(str(key)) == key
    tag = str(key)
    assert not set("{}") & set(tag)
    assert keys.request(key).startswith(f"decant:{{{tag}}}:")
    assert keys.journal(key).startswith(f"decant:{{{tag}}}:")


async def test_the_journal_is_read_from_any_entry_on(store: Store) -> None:
    request = make_request(tokens=range(10))
    await write_request(store, request)
    part = await store.requests.read(KEY, 3)
    assert (part.entries, part.length) == (written(*range(3, 10)), 10)
    assert (await store.requests.read(KEY, 9)).entries == written(9)
    assert (await store.requests.read(KEY, 10)).entries == []


def test_only_states_that_follow_are_entered() -> None:
    legal = {
        QUEUED: {PREFILLING, DECODING, SUCCEEDED, FAILED, CANCELLED},
        PREFILLING: {HANDING_OFF, SUCCEEDED, FAILED, CANCELLED},
        HANDING_OFF: {DECODING, SUCCEEDED, FAILED, CANCELLED},
        DECODING: {SUCCEEDED, FAILED, CANCELLED},
        SUCCEEDED: set(),
        FAILED: set(),
        CANCELLED: set(),
    }
    for old, following in legal.items():
        for new in legal:
            request = make_request()
            request.state = old
            if new in following:
                request.transition(new, NOW)
            else:
                with pytest.raises(ValueError, match="doesn't follow"):
                    request.transition(new, NOW)
        request = make_request()
        request.state = old
        if following:
            request.start_attempt(NOW)
            assert (request.state, request.attempt) == (QUEUED, 2)
        else:
            with pytest.raises(ValueError, match="doesn't follow"):
                request.start_attempt(NOW)


async def test_an_ended_request_is_kept_for_its_time(server: PrivateRedis, bare: sync_redis.Redis) -> None:
    async with make_store(server.url, ended_s=50, open_s=100, refill_s=0) as store:
        request = make_request(tokens=[1])
        await store.requests.accept(request)
        await write_request(store, request)
        assert (await store.requests.read(KEY)).expires_in_s > 50
        late = store.requests._write_command(request)
        request.transition(SUCCEEDED, NOW)
        await write_request(store, request)
        await store.requests._client.run(late)
        assert (await store.requests.read(KEY)).expires_in_s <= 50, "a late write doesn't prolong it"
        assert await store.open.of(router()) == set()
        pass_time(bare, 20)
        await write_request(store, request)
        assert (await store.requests.read(KEY)).expires_in_s <= 30, "nor does the last write, repeated"
        pass_time(bare, 30)
        with pytest.raises(UnknownRequest):
            await store.requests.read(KEY)
        assert not bare.exists(keys.journal(KEY))


async def test_every_key_but_the_store_instance_has_a_lifetime(store: Store, bare: sync_redis.Redis) -> None:
    await store.requests.accept(make_request())
    await write_request(store, make_request(RequestKey("t", "whole"), tokens=[1]))
    await store.routers.register(router_registration(router()))
    await store.instance.current()
    lasting = {key for key in bare.keys("*") if bare.pttl(key) < 0}
    assert lasting == {keys.STORE_INSTANCE.encode()}


async def test_nothing_that_owners_hold_is_lost_with_the_data(store: Store, bare: sync_redis.Redis) -> None:
    held = [make_request(RequestKey("t", str(n)), tokens=range(n)) for n in range(6)]
    for request in held:
        await store.requests.accept(request)
    await store.requests.flush(held)
    bare.flushall()
    for request in held:
        request.append(written(77))
    held[5].transition(SUCCEEDED, NOW)
    assert await store.requests.flush(held) == {}

    for n, request in enumerate(held):
        found = await store.requests.read(request.key)
        assert found.entries == written(*range(n), 77)
        assert (found.payload.request_id, found.state) == (str(n), SUCCEEDED if n == 5 else QUEUED)
        assert not request.needs_write
    assert await store.open.of(router()) == {request.key for request in held[:5]}
    assert await store.requests.accept(make_request(held[1].key)), "the id is still taken by its payload"


async def test_a_journal_that_lost_its_end_is_repaired(store: Store, bare: sync_redis.Redis) -> None:
    request = make_request(tokens=range(10))
    await write_request(store, request)
    bare.set(keys.journal(KEY), bare.getrange(keys.journal(KEY), 0, 11))
    request.append(written(10))
    await write_request(store, request)
    assert (await store.requests.read(KEY)).entries == written(*range(11))


async def test_logprobs_that_lost_their_end_are_repaired(store: Store, bare: sync_redis.Redis) -> None:
    request = make_request(tokens=range(10), shown=ResponseOptions(logprobs=1))
    await write_request(store, request)
    for left in (0, 3, 9):
        bare.set(keys.logprobs(KEY), bare.getrange(keys.logprobs(KEY), 0, left * 16 - 1) if left else b"")
        with pytest.raises(StoreFault, match="missing"):
            await store.requests.read(KEY)
        continued(request, 10 + left)
        await write_request(store, request)
        assert (await store.requests.read(KEY)).logprobs.entries() == [logprobs(e.token, 1) for e in request.entries()]


async def test_a_request_taken_while_redis_was_away_is_written_later(store: Store) -> None:
    request = make_request(tokens=[1, 2])
    assert request.needs_write
    await write_request(store, request)
    assert (await store.requests.read(KEY)).entries == written(1, 2)
    assert await store.open.of(router()) == {KEY}


@pytest.mark.rule(
    "written-again-after-data-loss",
    "state/store_instance.py:StoreInstance.unknown_error",
    "router/recovery/registration.py:RouterRegistrar._renew",
)
async def test_unknown_ids_are_not_yet_known_until_owners_had_their_time(store: Store, bare: sync_redis.Redis) -> None:
    refill_s = Ttls().refill_s
    with pytest.raises(StoreRefilling) as caught:
        await store.requests.read(KEY)
    assert 0 < caught.value.retry_after_s <= refill_s
    pass_time(bare, refill_s)
    with pytest.raises(UnknownRequest):
        await store.requests.read(KEY)

    bare.flushall()
    for ask in (store.requests.read(KEY), store.requests.adopt_orphan(KEY, router())):
        with pytest.raises(StoreRefilling):
            await ask
