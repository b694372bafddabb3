from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import redis as sync_redis

from decant.protos import worker_pb2 as wire
from decant.protos.inference_pb2 import Generation
from decant.protos.state_pb2 import RouterRegistration
from decant.router.recovery.registration import RouterRegistrar
from decant.runtime.background import BackgroundTask
from decant.runtime.connections.peer import new_peer
from decant.runtime.error_details import Reason
from decant.runtime.errors import Aborted, Unavailable
from decant.state.errors import StateError
from decant.state.ids import Incarnation, RequestKey
from decant.state.private_redis import PrivateRedis
from decant.state.store import Store
from tests.ports import reserved_port
from tests.router.fake_script import answer
from tests.router.fake_worker import fleet
from tests.router.harness import PATIENCE, begin_paused, core, make_request, pass_on, tokens_of, until, until_ended
from tests.state.factories import make_store

P, D = ("p", wire.ROLE_PREFILL), ("d", wire.ROLE_DECODE)
PROMPT = [1, 2, 3]
KEY = RequestKey("default", "r")


@pytest.fixture
def own() -> Iterator[PrivateRedis]:
    with reserved_port() as port, PrivateRedis(port=port) as server:
        yield server


def writes(bare: sync_redis.Redis) -> int:
    stats: Any = bare.info("commandstats")
    return sum(int(each["calls"]) for name, each in stats.items() if name == "cmdstat_evalsha")


async def test_running_requests_are_written_while_they_run(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers) as harness:
        stream = await begin_paused(harness, workers[1], 3, is_stored=True)
        found = await store.requests.read(KEY)
        assert found.length == 3
        assert found.state == Generation.STATE_DECODING
        workers[1].go.set()
        await until_ended(stream)


async def test_an_end_is_written_long_before_the_next_tick(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers) as harness:
        harness.router.journal_writer._interval = 10 * PATIENCE
        await harness.answer(make_request())
        await until(lambda: harness.store_is_done)
        assert (await store.requests.read(KEY)).state == Generation.STATE_SUCCEEDED


@pytest.mark.rule(
    "recorded-before-a-worker",
    "router/execution/execution.py:Execution._admit",
    "router/execution/journal_writer.py:JournalWriter.run",
)
async def test_commands_do_not_grow_with_tokens(store: Store, bare: sync_redis.Redis) -> None:
    async with fleet(P, D) as workers, core(store, workers, flush_ms=5_000) as harness:
        counts = []
        for id, tokens in (("few", 3), ("many", 300)):
            before = writes(bare)
            await harness.answer(make_request(id, max_tokens=tokens))
            await until(lambda: harness.store_is_done)
            counts.append(writes(bare) - before)
        assert counts[1] <= counts[0] + 4, "the directory's watch may add some"


@pytest.mark.rule("continues-without-redis", "router/execution/journal_writer.py:JournalWriter.run")
async def test_without_redis_requests_go_on_and_are_written_when_it_is_back(own: PrivateRedis) -> None:
    store = make_store(own.url)
    async with store, fleet(P, D) as workers, core(store, workers) as harness:
        begun = await begin_paused(harness, workers[1], 2)
        own.stop()
        pass_on(workers[1], until=3)  # what came before may be written
        await until(lambda: harness.router.journal_writer.is_unavailable)
        meanwhile = await harness.requests.begin(make_request("meanwhile"))
        assert begun.resumable
        assert not meanwhile.resumable
        workers[1].go.set()
        for stream in (begun, meanwhile):
            assert tokens_of(await until_ended(stream)) == answer(PROMPT, 5)
        own.start()
        await until(lambda: harness.store_is_done)
        for id in ("r", "meanwhile"):
            found = await store.requests.read(RequestKey("default", id))
            assert found.state == Generation.STATE_SUCCEEDED
            assert [entry.token for entry in found.entries] == answer(PROMPT, 5)
        assert (await harness.answer(make_request("after"))).resumable


@pytest.mark.rule("accepted-unrecorded", "router/execution/execution.py:Execution._accept_unrecorded")
async def test_a_router_may_refuse_what_it_could_not_record(own: PrivateRedis) -> None:
    store = make_store(own.url)
    async with store, fleet(P, D) as workers, core(store, workers, serve_without_redis=False) as harness:
        own.stop()
        with pytest.raises(Unavailable) as refused:
            await harness.requests.begin(make_request())
        assert refused.value.reason is Reason.STATE_STORE_UNAVAILABLE
        own.start()


async def test_a_request_that_another_router_owns_ends_here(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers) as harness:
        stream = await begin_paused(harness, workers[1], 2)
        await store.requests.adopt(KEY, Incarnation("other", 1))
        pass_on(workers[1], until=3)
        end = (await until_ended(stream)).end
        assert isinstance(end, Aborted)
        assert end.reason is Reason.SUPERSEDED
        await until(lambda: workers[1].cancels)
        assert (await store.requests.read(KEY)).owner == Incarnation("other", 1)


async def test_tokens_that_redis_lost_are_written_again(store: Store, bare: sync_redis.Redis) -> None:
    async with fleet(P, D) as workers, core(store, workers) as harness:
        stream = await begin_paused(harness, workers[1], 2)
        await until(lambda: harness.owned("r").state == Generation.STATE_DECODING)
        registration = RouterRegistration(peer=new_peer("me"), address="x:1")
        calls: list[str] = []
        replaced = lambda: calls.append("replaced")  # noqa: E731
        membership = RouterRegistrar(store, registration, harness.router.journal_writer.resync_all, replaced)
        async with BackgroundTask("renewing", partial(membership.run, 0.02)):
            await until(lambda: membership._instance and not harness.owned("r").needs_write)
            bare.flushall()
            async with asyncio.timeout(PATIENCE):
                while True:
                    try:
                        found = await store.requests.read(KEY)
                    except StateError:  # unknown, or not yet known
                        await asyncio.sleep(0.01)
                    else:
                        break
            assert found.state == Generation.STATE_DECODING
            await store.routers.register(RouterRegistration(peer=new_peer("me"), address="x:2"))
            await until(lambda: calls)
        await membership.close()
        (present,) = (await store.routers.listing()).present
        assert present.registration.address == "x:2"
        workers[1].go.set()
        await until_ended(stream)


async def test_an_invalid_token_affects_its_own_request_only(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers) as harness:
        stream = await begin_paused(harness, workers[1], 3, request=make_request(max_tokens=9))
        run = next(iter(workers[1].runs.values()))
        workers[1]._frame(run, run.base + 3, [1 << 30])
        workers[1].go.set()
        assert tokens_of(await until_ended(stream)) == answer(PROMPT, 9)
        assert stream.trace.attempts == 2
