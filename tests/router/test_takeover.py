from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import Any

import pytest

from decant.protos import worker_pb2 as wire
from decant.protos.inference_pb2 import Generation
from decant.router.request.reader_lease import ReaderLease
from decant.router.request.stored import new_record
from decant.router.timings import TakeoverTimings
from decant.runtime.error_details import Reason
from decant.runtime.errors import Cancelled, Unavailable
from decant.state.errors import StoreUnavailable
from decant.state.ids import Incarnation, RequestKey
from decant.state.owned import StoredRequest
from decant.state.store import Store
from tests.router.abandoned_requests import KEY, PROMPT, has_state, left_behind, watching
from tests.router.fake_script import MODEL, answer
from tests.router.fake_worker import fleet
from tests.router.harness import core, make_request, tokens_of, until, until_ended, until_written
from tests.state.factories import router_registration
from tests.worker.waiting import eventually

P, D = ("p", wire.ROLE_PREFILL), ("d", wire.ROLE_DECODE)
GONE = Incarnation("gone", 1)


def record_lookups(store: Store, patch: pytest.MonkeyPatch) -> list[float]:
    orphaned, lookups = store.open.orphaned, list[float]()

    async def look_up() -> set[Incarnation]:
        lookups.append(asyncio.get_running_loop().time())
        return await orphaned()

    patch.setattr(store.open, "orphaned", look_up)
    return lookups


# ------------------------------------------------------------------------------------------------- dead routers


@pytest.mark.slow
async def test_a_router_that_a_worker_has_a_session_with_keeps_its_requests(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    await left_behind(store, *answer(PROMPT, 2))
    lookups, connected = record_lookups(store, monkeypatch), {GONE}
    async with (
        fleet(P, D) as workers,
        core(store, workers) as harness,
        watching(store, harness, is_connected=connected.__contains__),
    ):
        await until(lambda: len(lookups) > 3)
        found = await store.requests.read(KEY)
        assert (found.epoch, found.owner) == (1, GONE)
        connected.clear()
        await until(lambda: workers[1].starts)
        await until_ended(await harness.requests.resume(KEY))


async def test_a_router_that_makes_another_prompt_of_a_request_neither_continues_nor_keeps_it(store: Store) -> None:
    await left_behind(store, *answer(PROMPT, 2), prompt_hash=0xABC)
    async with fleet(P, D) as workers, core(store, workers) as harness:
        with pytest.raises(Unavailable, match=r"prompt .* of request r, .* made 0000000000000abc") as refused:
            await harness.requests.resume(KEY)
        assert refused.value.reason is Reason.TOKENIZER_MISMATCH
        with pytest.raises(Unavailable):
            await harness.requests.take_over(KEY)
        found = await store.requests.read(KEY)
        assert (found.epoch, found.owner) == (1, GONE)
        assert not workers[1].starts
        assert isinstance(await harness.requests.cancel(KEY), Cancelled)
        assert await has_state(store, Generation.STATE_CANCELLED)


async def test_a_router_that_makes_the_same_prompt_of_a_request_continues_it(store: Store) -> None:
    recorded = new_record(make_request(), GONE, 1).record.prompt_hash
    assert recorded
    await left_behind(store, *answer(PROMPT, 2), prompt_hash=recorded)
    async with fleet(P, D) as workers, core(store, workers) as harness:
        stream = await until_ended(await harness.requests.resume(KEY))
        assert stream.outputs[0].tokens[:2] == answer(PROMPT, 2)


async def test_a_worker_names_the_routers_that_it_has_sessions_with(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers, id="one") as one:
        async with core(store, workers, id="two") as two:
            incarnation = Incarnation.of(two.router.peer)
            await until(lambda: one.router.pool.is_connected(incarnation))
            assert not one.router.pool.is_connected(GONE)
        await until(lambda: not one.router.pool.is_connected(incarnation))


async def test_every_router_may_be_alive_until_a_reopened_session_names_those_that_are(store: Store) -> None:
    async with fleet(D) as workers, core(store, workers) as harness:
        pool = harness.router.pool
        await until(lambda: not pool.is_connected(GONE))
        (worker,) = pool.of(MODEL)
        worker.session._observer.on_opened(worker.session)
        assert pool.is_connected(GONE)
        await until(lambda: not pool.is_connected(GONE))


@pytest.mark.rule("directory-readable-first", "router/recovery/takeover.py:OrphanRecovery._watch")
@pytest.mark.slow
@pytest.mark.parametrize("fault", ["an error", "a late answer"])
async def test_no_router_is_dead_until_the_directory_was_readable_for_a_whole_registration(
    store: Store, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    lasts = 0.4
    lookups, change, broken = record_lookups(store, monkeypatch), store.routers.wait_for_change, list[float]()
    clock = asyncio.get_running_loop().time

    async def fails_once(*args: Any) -> Any:
        if lookups and not broken:
            if fault == "a late answer":
                await asyncio.sleep(lasts / 4 + 1.0)
            broken.append(clock())
            if fault == "an error":
                raise StoreUnavailable("away")
        return await change(*args)

    monkeypatch.setattr(store.routers, "wait_for_change", fails_once)
    async with core(store, []) as harness:
        began = clock()
        async with watching(store, harness, registration_s=lasts, timings=TakeoverTimings(retry_s=0.01)):
            await until(lambda: broken and lookups[-1] > broken[0])
    assert lookups[0] >= began + lasts
    assert min(look for look in lookups if look > broken[0]) >= broken[0] + lasts


async def test_a_router_that_reaches_no_worker_leaves_requests_to_others(store: Store) -> None:
    await left_behind(store, *answer(PROMPT, 2))
    async with core(store, []) as harness:
        with pytest.raises(Unavailable):
            await harness.requests.take_over(KEY)
    found = await store.requests.read(KEY)
    assert (found.epoch, found.owner) == (1, GONE)


async def test_a_router_that_registers_again_during_its_takeover_keeps_its_entries(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    await left_behind(store, *answer(PROMPT, 2))
    gate = Gate(monkeypatch, store, "adopt_orphan")
    async with fleet(P, D) as workers, core(store, workers) as harness, watching(store, harness):
        await gate.arrived.wait()
        registration = await store.routers.register(router_registration(GONE))
        lookups = record_lookups(store, monkeypatch)
        gate.opened.set()
        await until(lambda: len(lookups) > 1)
        assert (await store.requests.read(KEY)).owner == GONE
        assert await store.open.of(GONE) == {KEY}, "it is found there should that router be lost later"
        await registration.remove()
        workers[1].script.pause_at = 3
        await until(lambda: workers[1].starts)
        stream = await harness.requests.resume(KEY)
        workers[1].go.set()
        await until_ended(stream)


@pytest.mark.slow
async def test_requests_that_no_router_can_run_are_tried_with_backoff(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    await left_behind(store, *answer(PROMPT, 2))
    async with core(store, []) as harness:
        lookups, tries = record_lookups(store, monkeypatch), list[float]()
        take_over = harness.requests.take_over

        async def tried(key: RequestKey) -> None:
            tries.append(asyncio.get_running_loop().time())
            await take_over(key)

        monkeypatch.setattr(harness.requests, "take_over", tried)
        async with watching(store, harness, registration_s=0.2):
            await until(lambda: len(tries) >= 4 and len(lookups) > len(tries) + 1)
        gaps = [after - before for before, after in pairwise(tries)]
        assert gaps[0] >= 0.05
        assert gaps[2] >= 0.2


# ------------------------------------------------------------------------------------- a client comes, or leaves


class Gate:
    def __init__(self, patch: pytest.MonkeyPatch, store: Store, name: str) -> None:
        self.arrived, self.opened = asyncio.Event(), asyncio.Event()
        self.answers = True
        self._real = getattr(store.requests, name)
        patch.setattr(store.requests, name, self._call)

    async def _call(self, *args: Any) -> StoredRequest:
        self.arrived.set()
        await self.opened.wait()
        found: StoredRequest = await self._real(*args)
        if not self.answers:
            raise StoreUnavailable("the answer is lost")
        return found


@pytest.mark.rule("takeover-leaves-resumed-alone", "router/execution/adoption.py:Adoptions._adopt")
async def test_a_takeover_leaves_a_stream_alone_that_a_client_resumed_meanwhile(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    await left_behind(store, *answer(PROMPT, 2))
    async with fleet(P, D) as workers, core(store, workers, resume_grace_ms=1) as harness:
        workers[1].script.pause_at = 3
        gate = Gate(monkeypatch, store, "adopt_orphan")
        taking = asyncio.create_task(harness.requests.take_over(KEY))
        await gate.arrived.wait()
        stream = await harness.requests.resume(KEY)
        with ReaderLease(stream):
            gate.opened.set()
            await taking
            execution = harness.requests.executions.open[KEY]
            assert (execution.stream, execution.disconnect_timer) == (stream, None)
            workers[1].go.set()
            assert tokens_of(await until_ended(stream)) == answer(PROMPT, 5)


async def test_a_client_that_resumes_a_request_just_taken_over_keeps_it(store: Store) -> None:
    await left_behind(store, *answer(PROMPT, 2))
    async with fleet(P, D) as workers, core(store, workers, resume_grace_ms=60_000) as harness:
        workers[1].script.pause_at = 3
        await harness.requests.take_over(KEY)
        assert harness.requests.executions.open[KEY].disconnect_timer is not None
        stream = await harness.requests.resume(KEY)
        assert harness.requests.executions.open[KEY].disconnect_timer is None
        workers[1].go.set()
        assert tokens_of(await until_ended(stream)) == answer(PROMPT, 5)


@pytest.mark.rule(
    "adoption-without-client",
    "router/execution/adoption.py:Adoptions.adopt",
    "router/execution/adoption.py:Adoptions._on_caller_gone",
)
@pytest.mark.parametrize("call", ["resume", "cancel"])
async def test_a_client_that_leaves_during_an_adoption_loses_no_request(
    store: Store, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    await left_behind(store, *answer(PROMPT, 2))
    async with fleet(P, D) as workers, core(store, workers, resume_grace_ms=50) as harness:
        workers[1].script.pause_at = 3
        gate = Gate(monkeypatch, store, "adopt" if call == "resume" else "cancel")
        calling = asyncio.create_task(getattr(harness.requests, call)(KEY))
        await gate.arrived.wait()
        calling.cancel()
        with suppress(asyncio.CancelledError):
            await calling
        assert harness.requests.has_request(KEY)
        gate.opened.set()
        await until(lambda: not harness.requests.has_request(KEY))
        found = await store.requests.read(KEY)
        assert found.state == Generation.STATE_CANCELLED
        assert found.record.finished, "its owner writes its end"
        assert await store.open.of(Incarnation.of(harness.router.peer)) == set()


async def test_an_adoption_whose_reply_is_lost_is_completed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    await left_behind(store, *answer(PROMPT, 2))
    async with fleet(P, D) as workers, core(store, workers) as harness:
        workers[1].script.pause_at = 3
        with monkeypatch.context() as patch:
            gate = Gate(patch, store, "adopt")
            gate.answers = False
            gate.opened.set()
            with pytest.raises(Unavailable):
                await harness.requests.resume(KEY)
        assert (await store.requests.read(KEY)).owner == Incarnation.of(harness.router.peer)
        async with watching(store, harness, timings=TakeoverTimings(reclaim_every_s=0.02)):
            await until(lambda: harness.requests.executions.running)
            stream = await harness.requests.resume(KEY)
            workers[1].go.set()
            assert tokens_of(await until_ended(stream)) == answer(PROMPT, 5)


async def test_an_acceptance_whose_answer_is_lost_does_not_stay_open(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        fleet(P, D) as workers,
        core(store, workers, serve_without_redis=False, resume_grace_ms=50) as harness,
        watching(store, harness),
    ):
        workers[1].script.pause_at = 2
        with monkeypatch.context() as patch:
            gate = Gate(patch, store, "accept")
            gate.answers = False
            gate.opened.set()
            with pytest.raises(Unavailable):
                await harness.requests.begin(make_request())
        async with watching(store, harness, timings=TakeoverTimings(reclaim_every_s=0.02)):
            await eventually(partial(has_state, store, Generation.STATE_CANCELLED))
        workers[1].go.set()


async def test_a_drain_waits_for_an_adoption_and_leaves_the_request_to_others(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    await left_behind(store, *answer(PROMPT, 2))
    async with fleet(P, D) as workers, core(store, workers) as harness:
        workers[1].script.pause_at = 3
        gate = Gate(monkeypatch, store, "adopt")
        calling = asyncio.create_task(harness.requests.resume(KEY))
        await gate.arrived.wait()
        draining = asyncio.create_task(harness.requests.drain())
        await until(lambda: harness.requests.is_draining)
        assert not draining.done()
        gate.opened.set()
        stream = await calling
        await until_written(stream, 2)
        await harness.requests.close()
        await draining
        assert isinstance(stream.end, Exception)
        assert await store.open.of(Incarnation.of(harness.router.peer)) == {KEY}, "routers that are left find it there"
