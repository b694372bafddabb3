from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import pytest
import redis as sync_redis
from structlog.testing import capture_logs

from decant.protos.state_pb2 import WorkerRegistration
from decant.protos.worker_pb2 import ROLE_DECODE, ROLE_PREFILL, Load, Peer
from decant.runtime.background import RestartPolicy
from decant.runtime.backoff import Backoff
from decant.runtime.protocol import PROTOCOL
from decant.state.directory import DirectoryEntry
from decant.state.keys import Ttls
from decant.state.private_redis import PrivateRedis
from decant.state.store import Store, StoreSettings
from decant.worker.startup.registration import Registrar
from tests.ports import reserved_port
from tests.worker.waiting import PATIENCE, eventually

EVERY_S = 0.05


@pytest.fixture
def server() -> Iterator[PrivateRedis]:
    with reserved_port() as port, PrivateRedis(port=port) as server:
        yield server


@pytest.fixture
async def store(server: PrivateRedis) -> AsyncIterator[Store]:
    async with Store(StoreSettings(server.url, ttls=Ttls(registration_s=30))) as store:
        yield store


class Harness:
    def __init__(self, store: Store, incarnation: int = 1) -> None:
        self.load = Load(running=1)
        self.lost: list[str] = []
        registration = WorkerRegistration(
            peer=Peer(id="w", incarnation=incarnation, protocol=PROTOCOL), address="127.0.0.1:1", role=ROLE_DECODE
        )
        restarts = RestartPolicy(pause=Backoff(EVERY_S, EVERY_S))
        self.registrar = Registrar(store.workers, registration, lambda: self.load, EVERY_S, self.lost.append, restarts)


async def present(store: Store, running: int) -> DirectoryEntry[WorkerRegistration]:
    async with asyncio.timeout(PATIENCE):
        while True:
            found = (await store.workers.listing()).present
            if found and found[0].load.running == running:
                return found[0]
            await asyncio.sleep(0.02)


async def test_a_worker_is_registered_with_its_load_until_it_leaves(store: Store) -> None:
    harness = Harness(store)
    async with harness.registrar:
        assert (await store.workers.listing()).present[0].load.running == 1, "from the first instant on"
        harness.load = Load(running=2)
        assert (await present(store, 2)).registration.address == "127.0.0.1:1"
        await harness.registrar.close()
        assert not (await store.workers.listing()).present
    assert not (await store.workers.listing()).present


async def test_an_important_change_is_registered_at_once(store: Store) -> None:
    harness = Harness(store)
    harness.registrar._every_s = 3600
    async with harness.registrar:
        harness.load = Load(running=2, draining=True)
        harness.registrar.renew_now()
        assert (await present(store, 2)).load.draining


async def test_a_changed_role_is_registered_at_once_and_again_in_an_emptied_redis(
    server: PrivateRedis, store: Store
) -> None:
    harness = Harness(store)
    harness.registrar._every_s = 3600
    async with harness.registrar:
        harness.load = Load(running=2)
        harness.registrar.set_role(ROLE_PREFILL)
        assert (await present(store, 2)).registration.role == ROLE_PREFILL
        with sync_redis.Redis.from_url(server.url) as bare:
            bare.flushall()
        harness.load = Load(running=3)
        harness.registrar.renew_now()
        assert (await present(store, 3)).registration.role == ROLE_PREFILL


async def test_a_new_incarnation_ends_the_registration(store: Store) -> None:
    old, new = Harness(store), Harness(store, 2)
    async with old.registrar, new.registrar:
        await eventually(lambda: len(old.lost) == 1)
        await old.registrar.close()
        (found,) = (await store.workers.listing()).present
        assert found.registration.peer.incarnation == 2
    assert not new.lost


async def test_an_exception_that_passes_ends_no_registration(store: Store) -> None:
    harness = Harness(store)
    failed = list[int]()

    def fail_once() -> Load:
        if not failed:
            failed.append(1)
            raise ZeroDivisionError("a bug")
        return Load(running=3)

    async with harness.registrar:
        harness.registrar._load = fail_once
        await present(store, 3)
    assert failed
    assert not harness.lost


async def test_an_exception_that_stays_ends_the_worker_and_its_registration(store: Store) -> None:
    harness = Harness(store)

    def fail() -> Load:
        raise ZeroDivisionError("a bug")

    async with harness.registrar:
        harness.registrar._load = fail
        await eventually(lambda: harness.lost == ["ZeroDivisionError('a bug')"])
    assert not (await store.workers.listing()).present


async def test_a_worker_that_starts_while_redis_is_full_registers_when_it_is_not(
    server: PrivateRedis, store: Store
) -> None:
    harness = Harness(store)
    with sync_redis.Redis.from_url(server.url) as bare:
        bare.config_set("maxmemory", 1)
        async with harness.registrar:
            assert not (await store.workers.listing()).present
            bare.config_set("maxmemory", 0)
            await present(store, 1)
    assert not harness.lost


@pytest.mark.slow
async def test_an_outage_is_logged_once_and_the_worker_registers_again_after_it(server: PrivateRedis) -> None:
    url = server.url
    with capture_logs() as lines:
        async with Store(StoreSettings(url, deadline_s=PATIENCE)) as store:
            harness = Harness(store)
            async with harness.registrar:
                server.stop()
                await eventually(lambda: bool(events(lines, "is unavailable")))
                await asyncio.sleep(10 * EVERY_S)
                with server:
                    harness.load = Load(running=7)
                    async with Store(StoreSettings(url, deadline_s=10)) as looking:
                        await present(looking, 7)
                    await eventually(lambda: bool(events(lines, "available again")))
                    await harness.registrar.close()
    assert len(events(lines, "is unavailable")) == 1
    assert not harness.lost


def events(lines: Sequence[Any], word: str) -> list[Any]:
    return [line for line in lines if word in line["event"]]


async def test_a_worker_that_starts_without_redis_registers_when_it_is_available(server: PrivateRedis) -> None:
    url = server.url
    server.stop()
    async with Store(StoreSettings(url, deadline_s=PATIENCE)) as store:
        harness = Harness(store)
        async with harness.registrar:
            with server:
                async with Store(StoreSettings(url, deadline_s=10)) as looking:
                    await present(looking, 1)
                await harness.registrar.close()
