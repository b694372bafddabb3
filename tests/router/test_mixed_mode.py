from __future__ import annotations

from decant.protos import worker_pb2 as wire
from decant.protos.inference_pb2 import Generation
from decant.state.ids import RequestKey
from decant.state.store import Store
from tests.router.fake_script import answer
from tests.router.fake_worker import fleet
from tests.router.harness import core, make_request, tokens_of, until, until_ended

P, P2, D = ("p", wire.ROLE_PREFILL), ("p2", wire.ROLE_PREFILL), ("d", wire.ROLE_DECODE)
SHORT = tuple(range(1, 31))
LONG = tuple(range(1, 201))


async def test_a_short_prompt_is_computed_locally_and_its_receipt_shows_it(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers, handoff_min_tokens=100) as harness:
        stream = await harness.answer(make_request(prompt=SHORT))
        assert tokens_of(stream) == answer(list(SHORT), 5)
        assert (stream.trace.prefill_worker, stream.trace.decode_worker) == ("", "d")
        assert stream.trace.handoff_s is None
        await harness.requests.drain()
        found = await store.requests.read(RequestKey("default", "r"))
        assert Generation.STATE_PREFILLING not in [each.state for each in found.record.transitions]


async def test_a_long_prompt_and_one_for_a_single_token_go_to_the_prefill_pool(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers, handoff_min_tokens=100) as harness:
        assert (await harness.answer(make_request("long", LONG))).trace.prefill_worker == "p"
        single = await harness.answer(make_request("single", SHORT, max_tokens=1))
        assert (single.trace.prefill_worker, single.trace.decode_worker) == ("p", "")


async def test_a_failing_decode_worker_is_not_near(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers, handoff_min_tokens=100) as harness:
        workers[1].script.fails_at = [0]
        stream = await harness.answer(make_request(prompt=SHORT))
        assert tokens_of(stream) == answer(list(SHORT), 5)
        assert (stream.trace.prefill_worker, stream.trace.attempts) == ("p", 2)


async def test_without_measurements_all_are_handed_over_and_each_answer_is_one(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers, handoff_min_tokens=None) as harness:
        costs = harness.router.pool.costs["m"]
        workers[1].script.pause_at = 1
        stream = await harness.requests.begin(make_request("first", SHORT))
        await until(lambda: stream.trace.prefill_s)  # it comes over another connection than the end
        workers[1].go.set()
        assert (await until_ended(stream)).trace.prefill_worker == "p"
        assert costs._transfer.is_known(costs._now())
        read = costs._on_prefill_worker.per_token
        assert 0 < read < 2.0 / (len(SHORT) - 3), "not the 2 s that the scripted worker reported: they did not pass"


async def test_the_choice_of_mode_follows_measurements_of_both(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers, handoff_min_tokens=None) as harness:
        costs = harness.router.pool.costs["m"]
        for _ in range(100):
            costs.add_prefill(200, 0.2, on_decode_worker=False)
            costs.add_transfer(200, 1.0)
        assert (await harness.answer(make_request("cheap", LONG))).trace.prefill_worker == ""
        beside = costs._on_decode_worker.per_token
        assert 0 < beside < 3.0 / (len(LONG) - 5), "not the 3 s that the scripted worker reported: they did not pass"
        for _ in range(100):
            costs.add_prefill(len(LONG) - 5, 3.0, on_decode_worker=True)
        assert (await harness.answer(make_request("dear", LONG[::-1]))).trace.prefill_worker == "p"
        assert (await harness.answer(make_request("short", SHORT))).trace.prefill_worker == ""


async def test_a_session_has_one_affinity_worker_and_sessions_are_spread(store: Store) -> None:
    async with fleet(P, P2, D) as workers, core(store, workers) as harness:
        affinity_workers = set()
        for session in ("tenant/a", "tenant/b", "tenant/c", "tenant/d", "tenant/e", "tenant/f"):
            used = set()
            for n in range(3):
                request = make_request(f"{session}{n}", tuple(range(1, 8)), session=session)
                used.add((await harness.answer(request)).trace.prefill_worker)
            assert len(used) == 1
            affinity_workers |= used
        assert affinity_workers == {"p", "p2"}


async def test_requests_without_prefix_reuse_have_no_preferred_worker(store: Store) -> None:
    async with fleet(P, P2, D) as workers, core(store, workers) as harness:
        affinity_worker = (await harness.answer(make_request("shared", session="s"))).trace.prefill_worker
        other = next(worker for worker in workers[:2] if worker.registration.peer.id != affinity_worker)
        request = make_request("alone", session="s")
        request.engine_request.bypass_prefix_cache = True
        before = len(other.prefills)
        for worker in workers[:2]:
            worker.load.running = 0 if worker is other else 1
        pool = harness.router.pool
        await until(
            lambda: {seen.incarnation.id: seen.sequences for seen in pool.snapshot("m", set())}[affinity_worker] == 1
        )
        await harness.answer(request)
        assert len(other.prefills) == before + 1
