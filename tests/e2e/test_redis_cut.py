from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import pytest
import redis as sync_redis

from decant.protos import worker_pb2 as wire
from decant.protos.state_pb2 import RouterRegistration
from decant.router.recovery.registration import RouterRegistrar
from decant.router.recovery.takeover import OrphanRecovery
from decant.runtime.background import BackgroundTask
from decant.state.ids import Incarnation
from decant.state.keys import Ttls
from decant.state.private_redis import PrivateRedis
from decant.state.store import Store
from tests.router.harness import PATIENCE, Core, core, tokens_of, until_ended, until_written
from tests.router.migration_harness import valid_request
from tests.state.conftest import bare, server
from tests.state.factories import make_store
from tests.state.redis_proxy import redis_proxy
from tests.worker.harness import WorkerHarness, registered, run_alone, worker
from tests.worker.waiting import eventually

__all__ = ["bare", "server"]

LIFETIMES = Ttls(registration_s=0.6, refill_s=0.0)
STREAMS = 4
"""Per router."""
WANTED = 200
"""Tokens of each: steps for longer than the fault lasts on a busy machine."""


@asynccontextmanager
async def member(store: Store, id: str) -> AsyncIterator[Core]:
    async with core(store, [], id=id) as harness:
        peer = harness.router.peer
        membership = RouterRegistrar(
            store, RouterRegistration(peer=peer), harness.router.journal_writer.resync_all, lambda: None
        )
        takeover = OrphanRecovery(
            store, harness.requests, Incarnation.of(peer), harness.router.pool.is_connected, LIFETIMES
        )
        renewing = BackgroundTask("renewing", partial(membership.run, LIFETIMES.renew_every_s))
        try:
            async with renewing, BackgroundTask("takeover", takeover.run):
                yield harness
        finally:
            await membership.close()


async def stepping(worker_harness: WorkerHarness) -> None:
    """Step the worker less often than any stream needs: none ends during the fault."""
    for _ in range(WANTED - 10):
        worker_harness.device.let(1)
        await asyncio.sleep(0.2)


async def registered_are(store: Store, incarnations: list[Incarnation], expected: bool) -> bool:
    return all([await store.routers.is_registered(incarnation) is expected for incarnation in incarnations])


@pytest.mark.rule(
    "connected-router-not-dead",
    "worker/decode/service.py:DecodeService._make_heartbeat",
    "router/recovery/takeover.py:OrphanRecovery._take_over_dead",
)
@pytest.mark.slow
async def test_streams_go_on_when_their_router_loses_redis_for_longer_than_a_registration(
    server: PrivateRedis, bare: sync_redis.Redis
) -> None:
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        direct = await enter(make_store(server.url, registration_s=600.0, refill_s=0.0))
        worker_harness = await enter(worker("d", role=wire.ROLE_DECODE, blocks=1024, budget=64))
        await direct.workers.register(registered(worker_harness).registration)
        line = await enter(redis_proxy(server))
        quick = partial(make_store, deadline_s=0.5, registration_s=LIFETIMES.registration_s, refill_s=0.0)
        routers = [
            await enter(member(await enter(quick(url)), id)) for id, url in (("a", server.url), ("b", line.address))
        ]
        worker_harness.device.hold()
        steps = asyncio.create_task(stepping(worker_harness))
        begun = []
        for number, harness in enumerate(routers * STREAMS):
            request = valid_request(number, wanted=WANTED)
            begun.append((await harness.requests.begin(request), run_alone(request.engine_request)))
        for stream, _ in begun:
            await until_written(stream, 2)
        incarnations = [Incarnation.of(harness.router.peer) for harness in routers]
        async with asyncio.timeout(PATIENCE):
            line.cut()
            await eventually(partial(registered_are, direct, incarnations[1:], False))
            await asyncio.sleep(2 * LIFETIMES.registration_s)
            line.is_cut = False
            await eventually(partial(registered_are, direct, incarnations, True))
            await asyncio.sleep(2 * LIFETIMES.registration_s)
        assert [stream.end for stream, _ in begun] == [None] * len(begun)
        worker_harness.device.go_on()
        for stream, expected in begun:
            assert tokens_of(await until_ended(stream)) == expected
        steps.cancel()
