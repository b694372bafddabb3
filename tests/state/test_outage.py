from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis as sync_redis

from decant.state.errors import StoreFault, StoreUnavailable
from decant.state.ids import RequestKey
from decant.state.keys import OWNERS
from decant.state.private_redis import PrivateRedis
from decant.state.store import Store, StoreSettings
from tests.ports import reserved_port
from tests.state.factories import (
    KEY,
    make_request,
    make_store,
    router,
    router_registration,
    worker_registration,
    write_request,
    written,
)
from tests.worker.waiting import eventually

DEADLINE_S = 0.3
PATIENCE_S = 60.0  # ends a test that hangs

ASKS: list[Callable[[Store], Coroutine[Any, Any, object]]] = [
    lambda store: store.ping(),
    lambda store: store.requests.accept(make_request()),
    lambda store: write_request(store, make_request(tokens=[1])),
    lambda store: store.requests.read(KEY),
    lambda store: store.requests.adopt_orphan(KEY, router(2)),
    lambda store: store.workers.register(worker_registration(router())),
    lambda store: store.routers.listing(),
    lambda store: store.open.orphaned(),
    lambda store: store.instance.current(),
]


async def all_unavailable(store: Store, deadline_s: float | None = None) -> None:
    """Require that every operation fails: at the deadline, or by a connection error if it is None."""
    async with asyncio.timeout(PATIENCE_S):
        results = await asyncio.gather(*(ask(store) for ask in ASKS * 3), return_exceptions=True)
    assert [type(result) for result in results] == [StoreUnavailable] * len(results)
    at_deadline = f"no answer within {deadline_s} s"
    assert {str(result) == at_deadline for result in results} == {deadline_s is not None}, results


async def all_well(store: Store) -> None:
    held = [make_request(RequestKey("t", str(n)), tokens=[n]) for n in range(30)]
    await asyncio.gather(*(write_request(store, request) for request in held))
    found = await asyncio.gather(*(store.requests.read(request.key) for request in held))
    assert [one.entries for one in found] == [written(n) for n in range(30)]


@pytest.fixture
def port() -> Iterator[int]:
    with reserved_port() as port:
        yield port


@contextmanager
def stopped(bare: sync_redis.Redis) -> Iterator[None]:
    info: Any = bare.info("server")
    os.kill(info["process_id"], signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(info["process_id"], signal.SIGCONT)


async def test_an_unreachable_redis_raises_at_once(port: int) -> None:
    for url in ("unix:///nowhere/redis.sock", f"redis://127.0.0.1:{port}"):
        async with make_store(url, deadline_s=2 * PATIENCE_S) as store:
            await all_unavailable(store)


@pytest.mark.slow
async def test_a_silent_redis_raises_within_the_deadline(server: PrivateRedis, bare: sync_redis.Redis) -> None:
    async with make_store(server.url, DEADLINE_S, connections=4) as store:
        with stopped(bare):
            await all_unavailable(store, DEADLINE_S)
    async with make_store(server.url, connections=4) as store:
        await store.ping()
        for client in store._clients:
            client._deadline_s = DEADLINE_S
        with stopped(bare):
            await all_unavailable(store, DEADLINE_S)
        for client in store._clients:
            client._deadline_s = 30
        await all_well(store)


async def test_a_caller_that_gives_up_leaves_no_answer_behind(server: PrivateRedis, bare: sync_redis.Redis) -> None:
    async with make_store(server.url, deadline_s=30, connections=2) as store:
        await store.ping()
        with stopped(bare):
            asking = [asyncio.create_task(ask(store)) for ask in ASKS]
            await asyncio.sleep(0.05)
            for task in asking:
                task.cancel()
            await asyncio.wait(asking)
        assert all(task.cancelled() for task in asking)
        await all_well(store)


def blocked_clients(bare: sync_redis.Redis) -> int:
    info: Any = bare.info("clients")
    return int(info["blocked_clients"])


async def test_a_flood_of_reads_delays_no_renewal_and_no_write(server: PrivateRedis, bare: sync_redis.Redis) -> None:
    async with make_store(server.url, deadline_s=30, connections=2) as store:
        registered = await store.routers.register(router_registration(router()))
        reads = store.requests._reads
        flood = [asyncio.create_task(reads.wait_for_entry("nothing", b"0-0", 60)) for _ in range(50)]
        await eventually(lambda: blocked_clients(bare) == 2)  # all connections for reads
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await store.requests.read(KEY)
        async with asyncio.timeout(PATIENCE_S):
            await registered.renew()
            await write_request(store, make_request(tokens=[1]))
            assert await store.requests.accept(make_request(RequestKey("t", "other"))) is None
        for task in flood:
            task.cancel()
        await asyncio.wait(flood)
        assert (await store.requests.read(KEY)).entries == written(1)


async def test_a_redis_that_comes_back_is_used_again(port: int) -> None:
    with PrivateRedis(port=port) as server:
        store = make_store(server.url)
        await all_well(store)
        request = make_request(tokens=[1, 2])
        await store.requests.accept(request)
        await write_request(store, request)
        watching = asyncio.create_task(store.routers.wait_for_change(await store.routers.listing(), timeout_s=60))
        await asyncio.sleep(0.05)
    with pytest.raises(StoreUnavailable):
        await asyncio.wait_for(watching, PATIENCE_S)
    await all_unavailable(store)
    request.append(written(3))
    with PrivateRedis(port=port):
        await write_request(store, request)
        assert (await store.requests.read(KEY)).entries == written(1, 2, 3)
        await all_well(store)
        await store.close()


async def test_lost_scripts_are_loaded_again(store: Store, bare: sync_redis.Redis) -> None:
    await all_well(store)
    bare.script_flush()
    await all_well(store)
    bare.script_flush()
    await store.routers.register(router_registration(router()))


async def test_permanent_errors_are_not_outages(store: Store, bare: sync_redis.Redis) -> None:
    bare.set(OWNERS, "something of another program")
    with pytest.raises(StoreFault, match="WRONGTYPE"):
        await store.requests.accept(make_request())


async def test_a_wrong_password_is_another_error(server: PrivateRedis, bare: sync_redis.Redis) -> None:
    bare.config_set("requirepass", "secret")
    try:
        async with make_store(server.url) as store:
            with pytest.raises(StoreFault):
                await store.ping()
        async with make_store(server.url.replace("unix://", "unix://:secret@")) as store:
            await store.ping()
    finally:
        bare.config_set("requirepass", "")


@pytest.mark.parametrize(
    "settings",
    [{"url": "sentinel://a"}, {"url": "localhost"}, {"url": "redis://a", "deadline_s": 0.0}],
)
def test_settings_that_cannot_be_honoured_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="got"):
        StoreSettings(**settings)
