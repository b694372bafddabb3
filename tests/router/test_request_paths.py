from __future__ import annotations

import asyncio

import pytest

from decant.protos import inference_pb2 as pb
from decant.protos import worker_pb2 as wire
from decant.router.request.output import Finish
from decant.router.timings import RouterTimings, WorkerTimings
from decant.runtime.packed import unpack
from decant.state.ids import RequestKey
from decant.state.store import Store
from tests.router.fake_script import EOS, answer
from tests.router.fake_worker import fleet
from tests.router.harness import (
    D2,
    DECODING,
    HANDING_OFF,
    P2,
    PATIENCE,
    PREFILLING,
    QUEUED,
    SUCCEEDED,
    D,
    P,
    core,
    jump,
    make_request,
    nothing_is_left_at,
    read_stored,
    states,
    tokens_of,
    until,
    until_ended,
)

PROMPT = [1, 2, 3]


async def test_a_split_request_fills_its_receipt_from_both_workers(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers) as harness:
        workers[1].script.pause_at = 1
        stream = await harness.requests.begin(make_request())
        await until(lambda: stream.trace.prefill_s)  # it comes over another connection than the end
        workers[1].go.set()
        assert tokens_of(await until_ended(stream)) == answer(PROMPT, 5)
        assert stream.end == Finish(pb.FINISH_REASON_LENGTH)
        trace = stream.trace
        assert (trace.prefill_worker, trace.decode_worker, trace.attempts) == ("p", "d", 1)
        assert (trace.prefill_s, trace.handoff_s, trace.decode_wait_s, trace.handoff_bytes) == (2, 4, 5, 1234)
        assert trace.queue_s is not None
        assert trace.decode_began_at is not None
        assert stream.cached_tokens == 3
        found = await read_stored(store, harness)
        assert [entry.token for entry in found.entries] == answer(PROMPT, 5)
        assert states(found) == [QUEUED, PREFILLING, HANDING_OFF, DECODING, SUCCEEDED]
        assert found.record.usage.completion_tokens == 5
        await until(lambda: workers[1].forgotten)


async def test_a_receipt_has_the_times_of_a_prefill_worker_whose_report_follows_the_end(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    timings = RouterTimings(workers=WorkerTimings(late_report_s=PATIENCE))
    async with fleet(P, D) as (prefill, decode), core(store, [prefill, decode], timings=timings) as harness:
        prefill.script.reports_late = True
        stream = await harness.requests.begin(make_request(seconds=PATIENCE / 2))
        await until(lambda: decode.forgotten)
        assert stream.outputs[0].tokens == answer(PROMPT, 5)
        jump(monkeypatch, PATIENCE / 2)  # the deadline passes, of an answer that is complete
        prefill.go.set()
        assert (await until_ended(stream)).end == Finish(pb.FINISH_REASON_LENGTH)
        assert (stream.trace.prefill_s, stream.cached_tokens) == (2, 3)
        receipt = (await read_stored(store, harness)).record.receipt
        assert receipt.prefill_ms == 2000


@pytest.mark.parametrize("ends", ["cancelled", "left to other routers"])
async def test_a_complete_answer_stays_complete_whatever_ends_it_before_the_report(store: Store, ends: str) -> None:
    timings = RouterTimings(workers=WorkerTimings(late_report_s=PATIENCE))
    async with fleet(P, D) as (prefill, decode), core(store, [prefill, decode], timings=timings) as harness:
        prefill.script.reports_late = True
        stream = await harness.requests.begin(make_request("r"))
        await until(lambda: decode.forgotten)
        if ends == "cancelled":
            await harness.requests.cancel(RequestKey("default", "r"))
        else:
            harness.requests.executions.open[RequestKey("default", "r")].close_for_peers()
        assert (await until_ended(stream)).end == Finish(pb.FINISH_REASON_LENGTH)
        assert states(await read_stored(store, harness))[-1] == SUCCEEDED


async def test_an_answer_ends_without_the_report_of_a_prefill_worker_that_hangs(store: Store) -> None:
    async with fleet(P, D) as (prefill, decode), core(store, [prefill, decode]) as harness:
        prefill.script.reports_late = True
        stream = await harness.answer(make_request())
        assert tokens_of(stream) == answer(PROMPT, 5)
        assert (stream.trace.prefill_s, stream.trace.attempts) == (None, 1)


async def test_one_token_needs_no_decode_worker(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers) as harness:
        stream = await harness.answer(make_request(max_tokens=1))
        assert tokens_of(stream) == answer(PROMPT, 1)
        assert not workers[0].prefills[0].handoff
        assert not workers[1].starts
        assert stream.trace.decode_worker == ""
        assert states(await read_stored(store, harness)) == [QUEUED, PREFILLING, SUCCEEDED]


@pytest.mark.parametrize("late", [True, False])
async def test_a_first_token_that_ends_the_output_leaves_nothing_at_the_decode_worker(store: Store, late: bool) -> None:
    async with fleet(P, D) as workers, core(store, workers) as harness:
        workers[0].script.stops_at = 0
        workers[0].script.first_is_late = late
        workers[0].script.first_pause = True
        stream = await harness.requests.begin(make_request())
        await until(lambda: workers[1].starts)
        workers[0].go.set()
        assert (await until_ended(stream)).end == Finish(pb.FINISH_REASON_STOP, eos_token_id=EOS)
        assert (stream.trace.attempts, stream.trace.decode_worker) == (1, "")
        await nothing_is_left_at(workers)


@pytest.mark.parametrize("role", [wire.ROLE_PREFILL, wire.ROLE_DECODE])
async def test_workers_of_one_role_answer_without_a_handoff(store: Store, role: wire.Role) -> None:
    async with fleet(("only", role)) as workers, core(store, workers) as harness:
        stream = await harness.answer(make_request())
        assert tokens_of(stream) == answer(PROMPT, 5)
        assert (stream.trace.prefill_worker, stream.trace.decode_worker) == ("", "only")
        assert stream.trace.prefill_s == 3
        assert stream.cached_tokens == 5
        assert states(await read_stored(store, harness)) == [QUEUED, DECODING, SUCCEEDED]


@pytest.mark.rule(
    "equal-layout-hashes",
    "router/placement/policy.py:choose_first_worker",
    "router/placement/policy.py:choose_decode_worker",
)
async def test_workers_with_different_layouts_do_not_hand_over(store: Store) -> None:
    async with fleet(P, D) as workers:
        workers[1].registration.layout_hash += 1
        async with core(store, workers) as harness:
            stream = await harness.answer(make_request())
            assert tokens_of(stream) == answer(PROMPT, 5)
            assert stream.trace.decode_worker == "d"
            assert not workers[0].prefills


async def test_the_finish_reason_is_the_workers(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers) as harness:
        workers[1].script.stops_at = 3
        stream = await harness.answer(make_request("eos", max_tokens=9))
        assert stream.end == Finish(pb.FINISH_REASON_STOP, eos_token_id=EOS)
        assert stream.outputs[0].tokens == [*answer(PROMPT, 3), EOS]
        stream = await harness.answer(make_request("stop", max_tokens=9, stop_token_ids=[EOS]))
        assert stream.end == Finish(pb.FINISH_REASON_STOP, stop_token_id=EOS)
        workers[1].script.stops_at = None
        stream = await harness.answer(make_request("cut", capped_by_context_length=True))
        assert stream.end == Finish(pb.FINISH_REASON_CONTEXT_LENGTH)


async def test_workers_get_the_whole_request_with_its_present_age_and_deadline(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers) as harness:
        await harness.answer(make_request(seconds=1000))
        work = workers[1].starts[0].engine_request
        assert list(unpack(work.prompt)) == PROMPT
        assert 900_000 < work.remaining_ms <= 1_000_000
        assert workers[0].prefills[0].engine_request.sampling == work.sampling
        await harness.answer(make_request("for years", seconds=1e9))
        assert workers[1].starts[1].engine_request.remaining_ms == 2**32 - 1
        await harness.answer(make_request("forever"))
        assert not workers[1].starts[2].engine_request.HasField("remaining_ms")


@pytest.mark.slow
async def test_many_concurrent_requests_get_their_own_tokens(store: Store) -> None:
    async with fleet(P, P2, D, D2) as workers, core(store, workers) as harness:
        requests = [make_request(str(n), (n, 1, 2), 1 + n % 9) for n in range(100)]
        streams = await asyncio.gather(*[harness.answer(request) for request in requests])
        for n, stream in enumerate(streams):
            assert tokens_of(stream) == answer([n, 1, 2], 1 + n % 9)
        assert all(worker.starts for worker in workers[2:])
        assert all(worker.prefills for worker in workers[:2])
        await until(lambda: not any(worker.runs for worker in workers))
