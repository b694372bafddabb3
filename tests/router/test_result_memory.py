"""A router keeps the results in Redis within their limit, so that all else has room."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import grpc
import pytest
import redis as sync_redis
from structlog.testing import capture_logs

from decant.protos import inference_pb2_grpc as services
from decant.router.execution.result_memory import DEFAULT_BYTES, ResultMemory, choose_max_bytes
from decant.router.settings import RouterSettings
from decant.runtime.settings import InvalidSettings
from decant.runtime.settings_sources import load
from decant.runtime.telemetry.metrics import Registry, ResultMetrics
from decant.state.keys import Ttls
from decant.state.private_redis import PrivateRedis
from decant.state.results import StoreMemory
from decant.state.store import Store
from tests.ports import reserved_port
from tests.router.fake_script import answer as scripted_answer
from tests.router.fake_worker import fleet
from tests.router.harness import PATIENCE, until
from tests.router.test_router_process import MODEL, D, P, Running, become_ready, generate_request, router, usable
from tests.state.factories import make_request, make_store
from tests.state.test_results import end, retained

MIB = 1 << 20
RESULTS, AT_ONCE = 600, 30
"""A Redis of 4 MiB is full after less than 450."""


@pytest.fixture
def small() -> Iterator[PrivateRedis]:
    options = ("--maxmemory", "4mb", "--maxmemory-policy", "noeviction")
    with reserved_port() as port, PrivateRedis(port=port, options=options) as server:
        yield server


async def is_served(running: Running, id: str) -> bool:
    request = generate_request()
    request.request_id = id
    async with asyncio.timeout(PATIENCE), grpc.aio.insecure_channel(running.address) as channel:
        answer = await services.InferenceServiceStub(channel).Generate(request)
    return list(answer.outputs[0].token_ids) == scripted_answer([1, 2, 3], 5)


@pytest.mark.slow
async def test_results_that_would_fill_redis_take_no_worker_and_a_new_router_serves(small: PrivateRedis) -> None:
    async with fleet(P, D) as workers, make_store(small.url, registration_s=600.0) as store:
        handles = [await store.workers.register(worker.registration) for worker in usable(workers)]
        async with router(small) as running:
            await become_ready(running)
            for first in range(0, RESULTS, AT_ONCE):
                await end(store, *map(str, range(first, first + AT_ONCE)))
                assert await is_served(running, f"r{first}")
            for handle in handles:
                await handle.renew()
            async with router(small) as another:
                await become_ready(another)
                assert await is_served(another, "another")
            with sync_redis.Redis.from_url(small.url, protocol=2) as bare:
                assert 50 < len(bare.keys("*:request")) < 400


@asynccontextmanager
async def watched(store: Store, max_bytes: int | None) -> AsyncIterator[ResultMetrics]:
    metrics = ResultMetrics(Registry(process=False))
    memory = ResultMemory(store.results, max_bytes, metrics, check_s=600.0, retry_s=0.01)
    task = asyncio.create_task(memory.run())
    try:
        yield metrics
    finally:
        task.cancel()
        await asyncio.wait([task])


async def until_discarded(metrics: ResultMetrics, count: int) -> None:
    await until(lambda: metrics.discarded._value.get() >= count)


async def test_a_result_beyond_the_limit_is_answered_by_a_deletion_at_once(store: Store) -> None:
    (first,) = await end(store, "0")
    size = (await store.results.trim(1 << 40)).bytes
    async with watched(store, int(3.5 * size)) as metrics:
        await end(store, *"123")
        await until_discarded(metrics, 1)
        assert (metrics.count._value.get(), metrics.max_bytes._value.get()) == (3, int(3.5 * size))
        assert 2 * size < metrics.bytes._value.get() <= 3.5 * size
        assert metrics.store_used._value.get() > size
    assert await retained(store, first) == []


async def test_a_limit_that_is_lowered_deletes_what_is_there(store: Store) -> None:
    await end(store, *"abcd")
    async with watched(store, 1) as metrics:
        await until_discarded(metrics, 4)


async def test_deletions_go_on_after_an_outage(store: Store, bare: sync_redis.Redis) -> None:
    """The limit is exceeded while Redis refuses every command."""
    async with watched(store, 1) as metrics:
        await end(store, "a")
        await until_discarded(metrics, 1)
        await end(store, "b")
        bare.config_set("maxmemory", 1)
        try:
            await until_discarded(metrics, 2)
        finally:
            bare.config_set("maxmemory", 0)


async def test_requests_that_run_are_never_deleted(store: Store) -> None:
    running = make_request(tokens=range(1600))
    await store.requests.accept(running)
    async with watched(store, 1) as metrics:
        await end(store, "a")
        await until_discarded(metrics, 1)
    assert await retained(store, running) == [running.key.id]


@pytest.mark.parametrize(
    ("setting", "maximum", "chosen"),
    [
        (None, None, DEFAULT_BYTES),
        (None, 0, DEFAULT_BYTES),
        (None, 8 * MIB, 4 * MIB),
        (5 * MIB, 0, 5 * MIB),
        (5 * MIB, None, 5 * MIB),
        (5 * MIB, 8 * MIB, 5 * MIB),
        (64 * MIB, 8 * MIB, 6 * MIB),
    ],
)
def test_a_quarter_of_redis_is_left_for_all_else(setting: int | None, maximum: int | None, chosen: int) -> None:
    memory = None if maximum is None else StoreMemory(1, maximum, "noeviction")
    assert choose_max_bytes(setting, memory) == chosen


async def test_a_redis_that_would_take_live_keys_is_warned_about_once(small: PrivateRedis) -> None:
    with sync_redis.Redis.from_url(small.url, protocol=2) as bare:
        bare.config_set("maxmemory-policy", "allkeys-lru")
    with capture_logs() as logged:
        async with make_store(small.url, ended_s=Ttls().ended_s) as store:
            memory = ResultMemory(store.results, 4 * MIB, ResultMetrics(Registry(process=False)), 600.0, 0.01)
            await memory._check_memory()
            await memory._check_memory()
    evicts, share = sorted((line["event"], line) for line in logged if line["log_level"] == "warning")
    assert (evicts[0][:9], share[0][:15]) == ("--result-", "a full Redis wo")
    assert evicts[1]["used_bytes"] == 4 * MIB * 3 // 4
    assert share[1]["maxmemory_policy"] == "allkeys-lru"


@pytest.mark.parametrize(("text", "size"), [("512M", 512 * MIB), ("384mb", 384 * MIB), ("1.5 GiB", 1536 * MIB)])
def test_the_setting_has_units(text: str, size: int) -> None:
    assert load(RouterSettings, ("--models", MODEL, "--result-memory", text), {}).result_bytes == size


@pytest.mark.parametrize("text", ["0", "much", "-1M", ""])
def test_a_size_that_can_not_be_read_is_refused_by_its_flag(text: str) -> None:
    with pytest.raises(InvalidSettings, match="--result-memory: a size above 0, such as 512M or 2G"):
        load(RouterSettings, ("--models", MODEL, f"--result-memory={text}"), {})
