from __future__ import annotations

from functools import partial

import pytest

from decant.protos.inference_pb2 import Generation
from decant.state.errors import OwnerRegistered
from decant.state.ids import Incarnation
from decant.state.store import Store
from tests.router.abandoned_requests import KEY, PROMPT, has_state, left_behind, watching
from tests.router.fake_script import answer
from tests.router.fake_worker import FakeWorker, fleet
from tests.router.harness import (
    D,
    P,
    core,
    make_request,
    tokens_of,
    until,
    until_ended,
    until_written,
)
from tests.worker.waiting import eventually


@pytest.mark.rule("dead-routers-requests-continue", "router/recovery/takeover.py:OrphanRecovery._take")
async def test_a_dead_routers_request_continues_at_one_router(store: Store) -> None:
    await left_behind(store, *answer(PROMPT, 2))
    async with fleet(P, D) as workers, core(store, workers, id="one") as one, core(store, workers, id="two") as two:
        workers[1].script.pause_at = 3
        async with watching(store, one), watching(store, two):
            await until(lambda: workers[1].starts)
            owner = one if KEY in one.requests.executions.open else two
            stream = await owner.requests.resume(KEY)
            workers[1].go.set()
            assert tokens_of(await until_ended(stream)) == answer(PROMPT, 5)
            assert len(workers[1].starts) == 1
            await until(lambda: one.store_is_done and two.store_is_done)
        found = await store.requests.read(KEY)
        assert (found.epoch, found.attempt, found.state) == (2, 2, Generation.STATE_SUCCEEDED)
        assert await store.open.of(Incarnation("gone", 1)) == set()


async def test_a_taken_over_request_without_a_reader_ends_after_its_grace(store: Store) -> None:
    await left_behind(store, *answer(PROMPT, 2))
    async with fleet(P, D) as workers, core(store, workers, resume_grace_ms=100) as harness:
        workers[1].script.pause_at = 3
        async with watching(store, harness):
            await eventually(partial(has_state, store, Generation.STATE_CANCELLED))


@pytest.mark.rule("no-router-dead-while-refilling", "router/recovery/takeover.py:OrphanRecovery._take_over_dead")
@pytest.mark.slow
async def test_no_router_counts_as_dead_before_live_routers_had_time_to_register(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    orphaned, lookups = store.open.orphaned, []

    async def look_up() -> set[Incarnation]:
        lookups.append((await store.instance.current()).refill_left_s)
        return await orphaned()

    monkeypatch.setattr(store.open, "orphaned", look_up)
    workers: list[FakeWorker] = []
    async with core(store, workers) as harness, watching(store, harness, refill_s=1.0):
        await until(lambda: lookups)
    assert lookups[0] == 0


@pytest.mark.rule("only-a-client-takes", "state/requests.py:Requests.adopt_orphan")
async def test_a_living_routers_requests_are_its_own(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers) as one, core(store, workers) as two:
        workers[1].script.pause_at = 2
        async with watching(store, one):
            stream = await one.requests.begin(make_request())
            await until_written(stream, 2)
            await until(lambda: one.owned("r").synced_entries == 2)
            with pytest.raises(OwnerRegistered):
                await two.requests.take_over(KEY)
        workers[1].go.set()
        assert tokens_of(await until_ended(stream)) == answer(PROMPT, 5)
