from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from structlog.testing import capture_logs

from decant.protos import worker_pb2 as wire
from decant.router.placement.prefix_index import PromptBlocks, reported_hashes
from decant.router.timings import RouterTimings, WorkerTimings
from decant.router.workers.session import WorkerSession
from decant.runtime.backoff import Backoff
from decant.runtime.error_details import Reason
from decant.runtime.errors import Unavailable
from decant.runtime.packed import pack
from decant.runtime.protocol import PROTOCOL
from decant.state.ids import Incarnation
from decant.state.store import Store
from tests.router.fake_script import TOKENIZER, answer
from tests.router.fake_state import Fleet
from tests.router.fake_worker import FakeWorker, fleet
from tests.router.harness import (
    PATIENCE,
    Core,
    begin_paused,
    core,
    make_request,
    tokens_of,
    until,
    until_ended,
    until_written,
)

P, P2 = ("p", wire.ROLE_PREFILL), ("p2", wire.ROLE_PREFILL)
D, D2 = ("d", wire.ROLE_DECODE), ("d2", wire.ROLE_DECODE)
PROMPT = [1, 2, 3]
LONG = tuple(range(1000, 1200))


def names(harness: Core) -> set[str]:
    return {seen.incarnation.id for seen in harness.router.pool.snapshot("m", frozenset())}


async def test_another_tokenizer_or_model_is_not_used(store: Store) -> None:
    async with fleet(P, D, D2) as workers:
        workers[0].registration.tokenizer += 1
        workers[1].registration.model = "another"
        async with core(store, workers) as harness:
            assert names(harness) == {"d2"}
            assert not workers[0].hellos
            (unused,) = harness.router.pool.membership.unused()
            assert (unused.id, unused.incarnation) == ("p", workers[0].registration.peer.incarnation)
            assert "tokenizer" in unused.reason
            stream = await harness.answer(make_request())
            assert stream.trace.decode_worker == "d2"


async def test_a_worker_that_sends_both_hashes_is_judged_by_that_of_its_token_ids(store: Store) -> None:
    async with fleet(P, D) as workers:
        workers[0].registration.token_ids, workers[0].registration.tokenizer = TOKENIZER, 1
        workers[1].registration.token_ids = TOKENIZER + 1
        async with core(store, workers) as harness:
            assert names(harness) == {"p"}


async def test_a_caller_is_given_the_tokenizers_of_a_router_and_workers_that_do_not_fit(store: Store) -> None:
    async with fleet(D) as workers:
        workers[0].registration.token_ids = 0xABC
        async with core(store, workers) as harness:
            with pytest.raises(Unavailable) as refused:
                await harness.answer(make_request())
    assert refused.value.reason is Reason.TOKENIZER_MISMATCH
    assert refused.value.detail.retry_after
    for part in ("worker d has tokenizer 0000000000000abc of m", f"this router {TOKENIZER:016x}"):
        assert part in str(refused.value)


async def test_a_caller_is_given_the_protocols_of_a_router_and_workers_that_do_not_fit(store: Store) -> None:
    async with fleet(D) as workers:
        workers[0].registration.peer.protocol += 2
        async with core(store, workers) as harness:
            with pytest.raises(Unavailable, match=f"worker d of m has protocol {PROTOCOL + 2}") as refused:
                await harness.answer(make_request())
    assert refused.value.reason is Reason.NO_WORKER


@pytest.mark.rule(
    "protocol-versions-neighbours",
    "runtime/protocol.py:is_compatible",
    "router/workers/membership.py:WorkerMembership._incompatibility",
)
@pytest.mark.parametrize("change", [-1, 1])
async def test_workers_of_neighbouring_protocol_versions_are_used(store: Store, change: int) -> None:
    async with fleet(P, D, P2, D2) as workers:
        for worker, by in zip(workers, (change, 0, -2, 2), strict=True):
            worker.registration.peer.protocol += by
        async with core(store, workers[2:] + workers[:2]) as harness:
            assert names(harness) == {"p", "d"}
            stream = await harness.answer(make_request())
            assert (stream.trace.prefill_worker, stream.trace.decode_worker) == ("p", "d")


@pytest.mark.parametrize(
    "fields",
    [{"guide": wire.Guide(answer="start: /a/")}, {"reasoning": wire.ReasoningLimit(max_tokens=1)}],
    ids=["guide", "reasoning"],
)
async def test_fields_that_an_older_worker_would_ignore_go_to_newer_ones(store: Store, fields: dict[str, Any]) -> None:
    async with fleet(P, D, D2) as workers:
        for older in workers[:2]:
            older.registration.peer.protocol = PROTOCOL - 1
        async with core(store, workers) as harness:
            for number in range(4):
                request = make_request(str(number))
                request.engine_request.MergeFrom(wire.EngineRequest(**fields))
                stream = await harness.answer(request)
                assert stream.trace.decode_worker == "d2"
            assert not workers[0].prefills
            assert not workers[1].starts


@pytest.mark.rule("protocol-versions-neighbours", "router/workers/membership.py:WorkerMembership._incompatibility")
@pytest.mark.slow
async def test_no_two_workers_are_used_whose_protocols_are_two_versions_apart(store: Store) -> None:
    async with fleet(P, D) as (old, new):
        old.registration.peer.protocol -= 1
        new.registration.peer.protocol += 1
        timings = RouterTimings(workers=WorkerTimings(watch_s=10 * PATIENCE))  # no listing without a change
        async with core(store, [old], timings=timings) as harness:
            await store.workers.register(new.registration)
            registration = await store.workers.register(old.registration)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(until(lambda: "d" in names(harness)), 0.3)
            await registration.remove()
            await old.stop()
            await until(lambda: names(harness) == {"d"})


AT_ONCE = RouterTimings(workers=WorkerTimings(session_backoff=Backoff(0.001, 0.001)))


async def test_a_worker_whose_session_failed_once_is_used(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    run, failed = WorkerSession.run, list[WorkerSession]()

    async def fail_once(session: WorkerSession, is_wanted: Callable[[], bool]) -> None:
        if not failed:
            failed.append(session)
            raise KeyError("unexpected")
        await run(session, is_wanted)

    monkeypatch.setattr(WorkerSession, "run", fail_once)
    async with fleet(D) as workers, core(store, [], timings=AT_ONCE) as harness:
        await store.workers.register(workers[0].registration)
        await until(lambda: names(harness) == {"d"})
        assert failed


async def test_a_worker_whose_session_keeps_failing_is_logged_removed_and_named(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(session: WorkerSession, is_wanted: object) -> None:
        session.attempted.set()
        raise KeyError("unexpected")

    async with fleet(P, D) as workers, core(store, workers[:1], timings=AT_ONCE) as harness:
        monkeypatch.setattr(WorkerSession, "run", fail)
        with capture_logs() as logs:
            await store.workers.register(workers[1].registration)
            await until(lambda: "a task failed" in [line["event"] for line in logs])
        assert [line["worker"] for line in logs if line["event"] == "a task failed"] == ["d"]
        assert names(harness) == {"p"}
        (unused,) = harness.router.pool.membership.unused()
        assert (unused.id, unused.reason) == ("d", "worker d of m is not used: its session failed")


async def test_workers_that_register_later_are_found_and_removed_ones_forgotten(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers[:1]) as harness:
        assert names(harness) == {"p"}
        registration = await store.workers.register(workers[1].registration)
        await until(lambda: names(harness) == {"p", "d"})
        await registration.remove()
        await workers[1].stop()
        await until(lambda: len(list(harness.router.pool.of("m"))) == 1)
        assert names(harness) == {"p"}
        assert harness.router.pool.membership.prefix_indexes["m"].block_sizes.total() == 1


@pytest.mark.rule(
    "expired-registration",
    "router/workers/membership.py:WorkerMembership._apply",
    "router/workers/worker_handle.py:WorkerHandle.is_wanted",
)
async def test_a_registration_that_ran_out_ends_nothing_while_the_session_lives(store: Store) -> None:
    async with fleet(D) as workers, core(store, workers) as harness:
        stream = await begin_paused(harness, workers[0], 2)
        await store.workers.remove(Incarnation.of(workers[0].registration.peer))
        (worker,) = harness.router.pool.of("m")
        await until(lambda: not worker.is_registered)
        workers[0].break_session()  # runs are there: it is opened again
        workers[0].go.set()
        assert tokens_of(await until_ended(stream)) == answer(PROMPT, 5)
        assert stream.trace.attempts == 1
        assert tokens_of(await harness.answer(make_request("new"))) == answer(PROMPT, 5)
        workers[0].break_session()  # nothing is there any more
        await until(lambda: not list(harness.router.pool.of("m")))


@pytest.mark.rule(
    "earlier-incarnation-refused",
    "worker/decode/service.py:DecodeService._check",
    "router/workers/session.py:WorkerSession._open",
    "state/lua/directory_register.lua",
)
async def test_a_restarted_worker_on_the_same_address_is_another_one(store: Store) -> None:
    async with fleet(D) as (old,), core(store, [old]) as harness:
        stream = await begin_paused(harness, old, 2)
        await old.stop()
        new = FakeWorker(Fleet(), "d", wire.ROLE_DECODE)
        await new.start(int(old.registration.address.rpartition(":")[2]))
        try:
            await store.workers.register(new.registration)
            assert tokens_of(await until_ended(stream)) == answer(PROMPT, 5)
            assert new.starts[0].run.attempt == 2
            await until(lambda: len(list(harness.router.pool.of("m"))) == 1)
        finally:
            await new.stop()


async def test_a_draining_worker_keeps_what_it_has_and_gets_no_more(store: Store) -> None:
    async with fleet(D, D2) as workers, core(store, workers) as harness:
        for worker in workers:
            worker.script.pause_at = 2
        stream = await harness.requests.begin(make_request())
        await until_written(stream, 2)
        draining, other = sorted(workers, key=lambda worker: not worker.starts)
        draining.load.draining = True
        await until(lambda: names(harness) == {other.registration.peer.id})
        for worker in workers:
            worker.go.set()
        assert tokens_of(await until_ended(stream)) == answer(PROMPT, 5)
        assert stream.trace.attempts == 1
        await harness.answer(make_request("new"))
        assert len(draining.starts) == 1


async def test_a_router_that_leaves_forgets_what_has_just_ended(store: Store) -> None:
    timings = RouterTimings(workers=WorkerTimings(heartbeat_s=60.0, close_s=PATIENCE))
    async with fleet(D) as workers:
        async with core(store, workers, timings=timings) as harness:
            await harness.answer(make_request())
            assert not workers[0].forgotten, "it waits for a heartbeat"
        assert [run.request for run in workers[0].forgotten] == ["default/r"]
        assert not workers[0].runs


async def test_a_router_leaves_soon_though_a_worker_does_not_answer(store: Store) -> None:
    timings = RouterTimings(workers=WorkerTimings(close_s=0.1))
    async with fleet(D) as workers, core(store, workers, timings=timings) as harness:
        workers[0].script.stays = True
        clock = asyncio.get_running_loop().time
        began = clock()
        async with asyncio.timeout(PATIENCE):
            await harness.router.pool.membership.close()
        assert clock() - began >= 0.1
        assert not list(harness.router.pool.of("m"))


async def test_the_context_length_is_the_shortest_of_usable_workers(store: Store) -> None:
    async with fleet(D, D2) as workers:
        workers[0].registration.capacity.max_context_length = 100
        async with core(store, workers) as harness:
            assert harness.requests.max_context_length("m") == 100
            assert harness.requests.max_context_length("another") is None
            await store.workers.remove(Incarnation.of(workers[0].registration.peer))
            await workers[0].stop()
            await until(lambda: harness.requests.max_context_length("m") == 2048)


async def test_the_quantization_is_that_of_all_usable_workers(store: Store) -> None:
    async with fleet(D, D2) as workers:
        for worker in workers:
            worker.registration.quantization = "int4"
        async with core(store, workers) as harness:
            assert harness.requests.quantization("m") == "int4"
            assert harness.requests.quantization("another") == ""
            for handle in harness.router.pool.of("m"):
                handle.registration.quantization = "int8"
                break
            assert harness.requests.quantization("m") == ""


async def test_simultaneous_requests_are_spread_over_workers(store: Store) -> None:
    async with fleet(D, D2) as workers, core(store, workers) as harness:
        for worker in workers:
            worker.script.pause_at = 1
        streams = [await harness.requests.begin(make_request(str(n))) for n in range(10)]
        for stream in streams:
            await until_written(stream, 1)
        assert all(len(worker.starts) > 2 for worker in workers), "all at once, and still spread"
        for worker in workers:
            worker.go.set()
        await asyncio.gather(*[until_ended(stream) for stream in streams])


async def test_a_worker_that_refused_gets_few_requests_before_its_next_heartbeat(store: Store) -> None:
    async with fleet(D) as workers, core(store, workers) as harness:
        (worker,) = harness.router.pool.of("m")
        view = worker.load
        view.mark_full()
        assert not view.snapshot().has_capacity
        view.apply_heartbeat(wire.Heartbeat())
        sent = []
        while view.snapshot().has_capacity:
            sent.append(view.reserve(PromptBlocks(wire.EngineRequest(prompt=bytes(4))), 1, computes_prompt=True))
        assert len(sent) == 16
        for each in sent:
            each.release()
        for _ in range(20):
            view.apply_heartbeat(wire.Heartbeat())
        assert view.snapshot().has_capacity


async def test_a_worker_that_lost_a_request_is_avoided_for_a_while(store: Store) -> None:
    timings = RouterTimings(workers=WorkerTimings(avoidance=Backoff(PATIENCE, PATIENCE)))
    async with fleet(D, D2) as workers, core(store, workers, timings=timings) as harness:
        workers[0].script.fails_at = [0] * 3
        workers[1].script.fails_at = []
        for n in range(8):
            assert tokens_of(await harness.answer(make_request(str(n)))) == answer(PROMPT, 5)
        assert len(workers[0].starts) < 4, "a broken worker, always idle, does not draw all requests"
        assert len(workers[1].starts) >= 5


@pytest.mark.slow
async def test_a_ticket_is_renewed_with_and_without_a_decode_worker(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers) as harness:
        prefill, decode = workers
        prefill.script.first_pause = True
        decode.script.refuse = [wire.CAUSE_BUSY] * 10_000
        stream = await harness.requests.begin(make_request())
        await until(lambda: len(prefill.renewed) > 2)
        decode.script.refuse.clear()
        decode.script.has_no_free_blocks = True
        await until(lambda: decode.runs)
        prefill.renewed.clear()
        await until(lambda: len(prefill.renewed) > 2)
        assert set(prefill.renewed) == set(prefill.fleet.caches)
        decode.go.set()
        prefill.go.set()
        assert tokens_of(await until_ended(stream)) == answer(PROMPT, 5)
        assert not decode.renewed, "only at the sender"


def hashes_of(prompt: tuple[int, ...]) -> bytes:
    return reported_hashes(pack(list(prompt)), b"", 16).tobytes()


@pytest.mark.slow
async def test_a_prompt_goes_where_its_prefix_is_cached(store: Store) -> None:
    async with fleet(P, P2, D, D2) as workers, core(store, workers) as harness:
        for holder in (workers[1], workers[3]):
            holder.cache = wire.PrefixCacheUpdate(published=hashes_of(LONG[:160]))
            holder.load.queued_tokens = 100
        pool = harness.router.pool
        prefix = PromptBlocks(make_request(prompt=LONG).engine_request)
        await until(lambda: sum(seen.cached_tokens == 160 for seen in pool.snapshot("m", set(), prefix)) == 2)
        await harness.answer(make_request("first", LONG))
        assert [len(worker.starts) for worker in workers[2:]] == [0, 1], "less is to be fetched there"
        for n in range(2):
            await harness.answer(make_request(str(n), LONG))
        assert [len(worker.prefills) for worker in workers[:2]] == [0, 3]
        workers[1].cache = wire.PrefixCacheUpdate(dropped=hashes_of(LONG))
        await until(lambda: sum(seen.cached_tokens == 160 for seen in pool.snapshot("m", set(), prefix)) == 1)
        await harness.answer(make_request("after", LONG))
        assert len(workers[0].prefills) == 1


async def test_a_prefix_just_sent_counts_until_its_worker_fails_to_report_it(store: Store) -> None:
    async with fleet(P, P2, D) as workers, core(store, workers) as harness:
        traces = [(await harness.answer(make_request(str(n), (*LONG, n)))).trace for n in range(4)]
        assert len({trace.prefill_worker for trace in traces}) == 1
        caches = [worker.load._cached for worker in harness.router.pool.of("m")]
        await until(lambda: not any(cache._cached or cache.expiring for cache in caches))
