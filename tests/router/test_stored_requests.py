from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import redis as sync_redis
from google.protobuf.timestamp_pb2 import Timestamp

from decant.protos import inference_pb2 as pb
from decant.protos import worker_pb2 as wire
from decant.protos.inference_pb2 import Generation
from decant.protos.state_pb2 import RequestRecord
from decant.router.request.output import Finish
from decant.runtime.errors import Internal, ServiceError
from decant.state import keys
from decant.state.errors import StateError, UnreadableRequest
from decant.state.ids import Incarnation, RequestKey
from decant.state.store import Store
from tests.router.abandoned_requests import KEY, PROMPT, left_behind, watching
from tests.router.fake_script import answer
from tests.router.fake_worker import fleet
from tests.router.harness import core, make_request, until, until_ended
from tests.state.factories import list_open

P, D = ("p", wire.ROLE_PREFILL), ("d", wire.ROLE_DECODE)
DEAD = Incarnation("gone", 1)
HASH, JOURNAL = keys.request(KEY), keys.journal(KEY)
NO_TIME = RequestRecord(deadline=Timestamp(seconds=1 << 60)).SerializeToString()
MANY = pb.GenerateRequest(response=pb.ResponseOptions(logprobs=(1 << 32) - 1)).SerializeToString()

FAULTS: dict[str, Callable[[Any], Any]] = {
    "payload": lambda bare: bare.hset(HASH, "payload", b"\xff"),
    "no payload": lambda bare: bare.hdel(HASH, "payload"),
    "alternatives": lambda bare: bare.hset(HASH, "payload", MANY),
    "record": lambda bare: bare.hset(HASH, "record", b"\xff\xff"),
    "deadline": lambda bare: bare.hset(HASH, "record", NO_TIME),
    "state": lambda bare: bare.hset(HASH, "state", 99),
    "no state": lambda bare: bare.hset(HASH, "state", "x"),
    "no end": lambda bare: bare.hset(HASH, "state", Generation.STATE_SUCCEEDED),
    "epoch": lambda bare: bare.hset(HASH, "epoch", 1 << 40),
    "attempt": lambda bare: bare.hset(HASH, "attempt", 1 << 40),
    "owner": lambda bare: bare.hset(HASH, "owner", b"\xff"),
    "half an entry": lambda bare: bare.append(JOURNAL, b"xx"),
    "another output": lambda bare: bare.append(JOURNAL, b"\0\0\0\1"),
}


@pytest.mark.rule(
    "unreadable-request-skipped", "state/stored.py:parse", "router/recovery/takeover.py:OrphanRecovery._take"
)
@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_request_that_cannot_be_read_is_set_aside_and_others_are_taken_over(
    store: Store, bare: sync_redis.Redis, fault: str
) -> None:
    await left_behind(store, *answer(PROMPT, 2))
    fine = RequestKey("default", "fine")
    bare.copy(HASH, keys.request(fine))
    bare.copy(JOURNAL, keys.journal(fine))
    FAULTS[fault](bare)
    await list_open(store, DEAD, [fine])
    async with fleet(P, D) as workers, core(store, workers, resume_grace_ms=60_000) as harness:
        async with watching(store, harness):
            await until(lambda: bare.scard(keys.open_set(DEAD)) == 0)
            await until(lambda: bare.hget(keys.request(fine), "state") == b"5")
        with pytest.raises(Internal):
            await harness.requests.resume(KEY)
        with pytest.raises(Internal):
            await harness.requests.get(KEY)
        with pytest.raises(Internal):
            await harness.requests.cancel(KEY)


async def test_unreadable_names_in_open_sets_are_skipped(store: Store, bare: sync_redis.Redis) -> None:
    await left_behind(store, *answer(PROMPT, 2))
    bare.sadd(keys.OWNERS, "no incarnation", b"\xff")
    bare.sadd(keys.open_set(DEAD), b"\xff")
    async with fleet(P, D) as workers, core(store, workers) as harness, watching(store, harness):
        await until(lambda: workers[1].starts)
        await until_ended(await harness.requests.resume(KEY))
        await until(lambda: not bare.exists(keys.open_set(DEAD)))


@pytest.mark.slow
async def test_an_owner_that_cannot_be_read_does_not_end_the_journal_writer(
    store: Store, bare: sync_redis.Redis
) -> None:
    async with fleet(P, D) as workers, core(store, workers) as harness:
        workers[1].script.pause_at = 2
        stream = await harness.requests.begin(make_request("r", max_tokens=5))
        await until(lambda: harness.owned("r").synced_entries == 2)
        bare.hset(HASH, "owner", b"\xff")
        workers[1].go.set()
        assert isinstance((await until_ended(stream)).end, Finish)
        await until(lambda: harness.router.journal_writer._faults)
        assert isinstance((await harness.answer(make_request("another"))).end, Finish)
        bare.delete(HASH)
        await until(lambda: harness.store_is_done)


async def test_stored_tokens_outside_the_vocabulary_are_never_continued(store: Store) -> None:
    await left_behind(store, 1 << 20)

    async def restore(_: object) -> Any:
        return make_request(vocab_size=1000)

    async with fleet(P, D) as workers, core(store, workers, restore=restore) as harness:
        with pytest.raises(UnreadableRequest):
            await harness.requests.take_over(KEY)
        with pytest.raises(Internal):
            await harness.requests.resume(KEY)
        assert (await store.requests.read(KEY)).owner == DEAD, "it is not adopted"


def spoil(bare: Any, source: random.Random) -> None:
    fields = bare.hkeys(HASH)
    field = source.choice(fields)
    before = bare.hget(HASH, field)
    noise = source.randbytes(source.choice([0, 1, 8, 40]))
    match source.randrange(6):
        case 0:
            bare.hdel(HASH, field)
        case 1:
            bare.hset(HASH, field, noise)
        case 2:
            bare.hset(HASH, field, before[: source.randrange(len(before) + 1)] + noise)
        case 3:
            bare.hset(HASH, field, source.choice([0, -1, 1, 7, 8, 1 << 31, 1 << 62]))
        case 4:
            place = source.randrange(len(before) or 1)
            bare.hset(HASH, field, before[:place] + source.randbytes(1) + before[place + 1 :])
        case _:
            bare.set(source.choice([JOURNAL, keys.logprobs(KEY)]), noise)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
async def test_any_stored_data_is_taken_over_or_refused_with_a_reason(
    store: Store, bare: sync_redis.Redis, seed: int
) -> None:
    source = random.Random(seed)
    async with fleet(P, D) as workers, core(store, workers, resume_grace_ms=1) as harness:
        for _ in range(40):
            await left_behind(store, *answer(PROMPT, 2))
            for _ in range(source.choice([1, 1, 2])):
                spoil(bare, source)
            for ask in (harness.requests.take_over, harness.requests.get, harness.requests.resume):
                with suppress(StateError, ServiceError):
                    await ask(KEY)
            with suppress(StateError, ServiceError):
                await harness.requests.cancel(KEY)
            await until(lambda: harness.store_is_done)
            bare.delete(HASH, JOURNAL, keys.logprobs(KEY))
        stream = await harness.answer(make_request("another"))
        assert isinstance(stream.end, Finish)
