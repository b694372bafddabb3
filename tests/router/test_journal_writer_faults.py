from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import redis as sync_redis
from redis.exceptions import OutOfMemoryError, ResponseError
from structlog.testing import capture_logs

from decant.protos import worker_pb2 as wire
from decant.router.execution.journal_writer import JournalWriter
from decant.router.request.output import Finish
from decant.router.request.token_stream import TokenStream
from decant.router.timings import JournalTimings
from decant.runtime.background import BackgroundTask
from decant.runtime.backoff import Backoff
from decant.state import keys
from decant.state.client import Client
from decant.state.errors import StoreFault, StoreUnavailable
from decant.state.ids import RequestKey
from decant.state.journal import TOKEN_LIMIT
from decant.state.owned import OwnedRequest
from decant.state.requests import BATCH_BYTES, BATCH_WRITES, Displaced
from decant.state.scripts import Command
from decant.state.store import Store
from tests.router.fake_worker import fleet
from tests.router.harness import PATIENCE, begin_paused, core, make_request, until, until_ended
from tests.state.factories import NOW, SUCCEEDED, router, write_request
from tests.state.factories import make_request as make_owned
from tests.state.factories import written as entries

TIMINGS = JournalTimings()
P, D = ("p", wire.ROLE_PREFILL), ("d", wire.ROLE_DECODE)
Patch = pytest.MonkeyPatch


class Held:
    def __init__(self, owned: OwnedRequest) -> None:
        self.owned = owned
        self.stream = TokenStream(make_request())
        self.persisted = False

    def on_superseded(self, error: Displaced) -> None:
        raise AssertionError

    def mark_persisted(self) -> None:
        self.persisted = True


def many(count: int, prompt: str = "once") -> list[OwnedRequest]:
    return [make_owned(RequestKey("t", str(n)), prompt=prompt, tokens=[n]) for n in range(count)]


@asynccontextmanager
async def flushing(
    store: Store, requests: Sequence[OwnedRequest], timings: JournalTimings = TIMINGS
) -> AsyncIterator[tuple[JournalWriter, list[Held]]]:
    journal_writer, held = (
        JournalWriter(store.requests, flush_ms=10, timings=timings),
        [Held(request) for request in requests],
    )
    for each in held:
        journal_writer.begin(each)
    try:
        async with BackgroundTask("journal_writer", journal_writer.run):
            yield journal_writer, held
    finally:
        await journal_writer.close()


class Trips:
    def __init__(self, patch: Patch, away_from: int | None = None) -> None:
        self.sizes: list[int] = []
        self.writes: list[int] = []
        self.away_from = away_from
        original = Client._send

        async def send(client: Client, commands: Sequence[Command]) -> list[Any]:
            if self.away_from is not None and len(self.sizes) >= self.away_from:
                raise TimeoutError
            self.sizes.append(
                sum(len(word) for command in commands for word in command.args if isinstance(word, bytes))
            )
            self.writes.append(sum(command.script is not None for command in commands))
            return await original(client, commands)

        patch.setattr(Client, "_send", send)


async def test_an_outage_after_the_last_write_does_not_outlast_it(store: Store, monkeypatch: Patch) -> None:
    flush, lost = store.requests.flush, list[Sequence[OwnedRequest]]()

    async def lose_first_answer(requests: Sequence[OwnedRequest]) -> Any:
        result = await flush(requests)
        if not lost:
            lost.append(requests)
            raise StoreUnavailable("no answer")
        return result

    monkeypatch.setattr(store.requests, "flush", lose_first_answer)
    async with flushing(store, many(1)) as (journal_writer, held):
        journal_writer.finish(held[0])
        await until(lambda: held[0].persisted)
        assert lost
        await until(lambda: not journal_writer.is_unavailable)


async def test_a_request_that_no_entry_can_hold_keeps_no_other_from_being_written(store: Store) -> None:
    requests = [make_owned(RequestKey("t", str(n))) for n in range(3)]
    with capture_logs() as logs:
        async with flushing(store, requests) as (_, held):
            for each, token in zip(held, (7, TOKEN_LIMIT, 8), strict=True):
                each.stream.outputs[0].tokens.append(token)
            await until(lambda: [request.length for request in requests] == [1, 0, 1])
            await until(lambda: not (requests[0].needs_write or requests[2].needs_write))
            await asyncio.sleep(0.1)  # ten flushes: one try, and one line
    assert [line["request_id"] for line in logs if line["log_level"] == "error"] == ["1"]


async def test_a_round_trip_has_a_bound_in_bytes_and_in_writes(store: Store, monkeypatch: Patch) -> None:
    await store.requests.flush([make_owned(RequestKey("t", "first"))])  # loads the scripts
    trips = Trips(monkeypatch)
    large, small = many(30, "x" * 50_000), [make_owned(RequestKey("u", str(n))) for n in range(150)]
    assert not await store.requests.flush([*large, *small])
    assert len(trips.sizes) > 6
    assert max(trips.sizes) < 1.2 * BATCH_BYTES
    assert max(trips.writes) <= BATCH_WRITES + 2, "their entries in open sets beside them"
    assert not any(request.needs_write for request in (*large, *small))


async def test_a_request_larger_than_a_round_trip_is_written_by_itself(store: Store) -> None:
    (large,) = many(1, "x" * 3 * BATCH_BYTES)
    await write_request(store, large)
    assert (await store.requests.read(large.key)).payload.prompt == "x" * 3 * BATCH_BYTES


async def test_writes_acknowledged_before_an_outage_are_not_repeated(store: Store, monkeypatch: Patch) -> None:
    await store.requests.flush([make_owned(RequestKey("t", "first"))])
    requests = many(30, "x" * 50_000)
    trips = Trips(monkeypatch, away_from=3)
    with pytest.raises(StoreUnavailable):
        await store.requests.flush(requests)
    left = [request for request in requests if request.needs_write]
    assert 0 < len(left) < len(requests)
    trips.away_from = None
    sent = sum(trips.sizes)
    await store.requests.flush(left)
    assert not any(request.needs_write for request in requests)
    assert sum(trips.sizes) - sent <= 1.2 * sum(len(request.payload) for request in left)


async def test_while_redis_is_away_the_smallest_change_is_tried_and_all_are_written_once_it_is_back(
    store: Store, monkeypatch: Patch
) -> None:
    requests = [*many(60, "x" * 50_000), make_owned(RequestKey("t", "small"))]
    tried: list[int] = []

    async def send(client: Client, commands: Sequence[Command]) -> list[Any]:
        tried.append(sum(len(word) for command in commands for word in command.args if isinstance(word, bytes)))
        raise TimeoutError

    monkeypatch.setattr(Client, "_send", send)
    async with flushing(store, requests, JournalTimings(probe_s=0.01)) as (journal_writer, _):
        await until(lambda: len(tried) >= 4)
        assert journal_writer.is_unavailable
        assert max(tried[1:]) < 1000, "not more than the smallest request"
        monkeypatch.undo()
        await until(lambda: not any(request.needs_write for request in requests))
        await until(lambda: not journal_writer.is_unavailable)


@pytest.mark.rule("written-when-redis-is-back", "router/execution/journal_writer.py:JournalWriter._probe")
async def test_however_long_redis_was_away_what_was_not_written_is_written_at_once(
    store: Store, monkeypatch: Patch
) -> None:
    requests = many(3)
    failures = 0

    async def send(client: Client, commands: Sequence[Command]) -> list[Any]:
        nonlocal failures
        failures += 1
        raise TimeoutError

    longest = JournalTimings().probe_s
    assert longest < 0.5, "a request is lost with its router until then"
    monkeypatch.setattr(Client, "_send", send)
    async with flushing(store, requests) as (journal_writer, _):
        await until(lambda: journal_writer.is_unavailable)
        for away in range(3):
            before = failures
            await until(lambda: failures > before + away)  # noqa: B023 - called here
            pauses = [journal_writer._pause() for _ in range(50)]
            assert all(longest / 2 <= pause <= longest for pause in pauses)
            assert len(set(pauses)) > 40, "routers do not write in step"
        monkeypatch.undo()


async def test_the_only_request_that_was_not_written_ends_the_outage(store: Store, monkeypatch: Patch) -> None:
    async def send(client: Client, commands: Sequence[Command]) -> list[Any]:
        raise TimeoutError

    monkeypatch.setattr(Client, "_send", send)
    async with flushing(store, many(1), JournalTimings(probe_s=0.01)) as (journal_writer, held):
        await until(lambda: journal_writer.is_unavailable)
        monkeypatch.undo()
        await until(lambda: not journal_writer.is_unavailable)
        assert not held[0].owned.needs_write


@pytest.mark.rule("full-redis-is-unavailable", "state/client.py:Client._translate", "state/client.py:_is_permanent")
async def test_an_answer_that_ends_while_redis_is_full_is_stored_once_it_is_not(
    store: Store, bare: sync_redis.Redis
) -> None:
    requests = many(5)
    await store.requests.flush(requests)
    bare.config_set("maxmemory", 1)
    try:
        timings = JournalTimings(probe_s=0.01, fault=Backoff(0.001, 0.001))
        async with flushing(store, requests, timings) as (journal_writer, held):
            for each in held:
                each.owned.append(entries(7))
                each.owned.transition(SUCCEEDED, NOW)
                journal_writer.finish(each)
            await until(lambda: journal_writer.is_unavailable)
            await asyncio.sleep(0.1)  # many tries
            assert journal_writer.num_unwritten == 5
            bare.config_set("maxmemory", 0)
            async with asyncio.timeout(PATIENCE):
                await journal_writer.wait_idle()
    finally:
        bare.config_set("maxmemory", 0)
    assert [(await store.requests.read(request.key)).state for request in requests] == [SUCCEEDED] * 5


async def test_a_redis_that_refuses_a_request_for_days_does_not_end_the_journal_writer(store: Store) -> None:
    journal_writer = JournalWriter(store.requests, flush_ms=50)
    held = Held(make_owned(RequestKey("t", "refused")))
    journal_writer.begin(held)
    journal_writer._schedule_retry(held, StoreFault("WRONGTYPE"))
    journal_writer._faults[held.owned].failures = 100_000
    journal_writer._schedule_retry(held, StoreFault("WRONGTYPE"))
    now = asyncio.get_running_loop().time()
    assert 0 < journal_writer._faults[held.owned].retry_at - now <= JournalTimings().fault.longest_s


async def test_the_interval_follows_how_long_flushes_take(store: Store) -> None:
    journal_writer = JournalWriter(store.requests, flush_ms=50)
    pauses = []
    for seconds in (0.0, 0.01, 0.1, 0.2, 5.0):
        journal_writer._flush_seconds = seconds
        pauses.append(round(journal_writer._pause(), 3))
    assert pauses == [0.05, 0.05, 0.4, 0.8, 1.0]
    slow = JournalWriter(store.requests, flush_ms=10_000)
    slow._flush_seconds = 5.0
    assert slow._pause() == 10.0, "never more often than was asked for"


def poison(bare: sync_redis.Redis, key: RequestKey) -> None:
    bare.delete(keys.journal(key))
    bare.hset(keys.journal(key), "x", "1")


@pytest.mark.rule(
    "failed-write-delays-no-other",
    "state/requests.py:Requests._write_all",
    "router/execution/journal_writer.py:JournalWriter._schedule_retry",
)
async def test_a_request_that_redis_refuses_concerns_no_other(store: Store, bare: sync_redis.Redis) -> None:
    requests = many(5)
    await store.requests.flush(requests)
    for request in requests:
        request.append(entries(9))
    poison(bare, requests[2].key)
    refused = await store.requests.flush(requests)
    assert list(refused) == [requests[2]]
    assert isinstance(refused[requests[2]], StoreFault)
    assert [request.needs_write for request in requests] == [False, False, True, False, False]
    with pytest.raises(StoreFault, match="WRONGTYPE"):
        await write_request(store, requests[2])


@pytest.mark.slow
async def test_a_key_of_another_type_does_not_mark_the_store_as_away(
    store: Store, bare: sync_redis.Redis, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("decant.router.execution.journal_writer.MAX_FAULTS", 1000)
    async with fleet(P, D) as workers, core(store, workers) as harness:
        stream = await begin_paused(harness, workers[1], 3, request=make_request("a", max_tokens=50))
        await until(lambda: harness.owned("a").synced_entries == 3)
        poison(bare, RequestKey("default", "a"))
        workers[1].script.pause_at = None
        workers[1].go.set()
        assert isinstance((await until_ended(stream)).end, Finish)
        await until(lambda: harness.router.journal_writer._faults)
        other = await harness.answer(make_request("b"))
        assert other.resumable
        await until(lambda: bare.hget(keys.request(RequestKey("default", "b")), "state") == b"5")
        assert not harness.router.journal_writer.is_unavailable
        bare.delete(keys.journal(RequestKey("default", "a")))
        await until(lambda: harness.store_is_done)
        assert (await store.requests.read(RequestKey("default", "a"))).length == 50, "it is tried again"


async def test_an_ended_request_that_redis_refuses_is_given_up(
    store: Store, bare: sync_redis.Redis, monkeypatch: Patch
) -> None:
    requests = many(2)
    await store.requests.flush(requests)
    poison(bare, requests[0].key)
    async with flushing(store, requests, JournalTimings(fault=Backoff(0.01, 30.0))) as (journal_writer, held):
        for each in held:
            each.owned.transition(SUCCEEDED, NOW)
            journal_writer.finish(each)
        async with asyncio.timeout(PATIENCE):
            await journal_writer.wait_idle()
        assert all(each.persisted for each in held)
        assert not journal_writer._faults
    assert [request.needs_write for request in requests] == [True, False]


@pytest.mark.parametrize("error", ["BUSY Redis is busy running a script", "MISCONF no snapshot", "OOM no memory"])
async def test_an_error_of_every_write_counts_as_an_outage(store: Store, monkeypatch: Patch, error: str) -> None:
    kind = OutOfMemoryError if error.startswith("OOM") else ResponseError
    original = Client._send

    async def send(client: Client, commands: Sequence[Command]) -> list[Any]:
        replies = await original(client, commands)
        return [*replies[:-1], kind(error)]

    requests = many(3)
    await store.requests.flush(many(1))
    monkeypatch.setattr(Client, "_send", send)
    with pytest.raises(StoreUnavailable):
        await store.requests.flush(requests)
    assert sum(request.needs_write for request in requests) == 1, "the others' replies count"


async def test_an_end_leaves_the_open_set_though_redis_was_away_just_then(store: Store, monkeypatch: Patch) -> None:
    requests = many(3)
    await store.requests.flush(requests)
    async with flushing(store, requests) as (journal_writer, held):
        for each in held:
            each.owned.transition(SUCCEEDED, NOW)
        trips = Trips(monkeypatch, away_from=1)  # the ends are written, and then Redis is away
        for each in held:
            journal_writer.finish(each)
        await until(lambda: journal_writer.is_unavailable)
        assert not any(request.is_unsynced for request in requests)
        trips.away_from = None
        async with asyncio.timeout(PATIENCE):
            await journal_writer.wait_idle()
    assert await store.open.of(router()) == set()
