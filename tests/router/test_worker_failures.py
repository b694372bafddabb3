from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from decant.protos import inference_pb2 as pb
from decant.protos import worker_pb2 as wire
from decant.router.request.output import Finish
from decant.router.timings import RouterTimings, WorkerTimings
from decant.runtime.error_details import Reason
from decant.runtime.errors import (
    Aborted,
    InvalidArgument,
    ServiceError,
    Unavailable,
    Unimplemented,
)
from decant.runtime.packed import unpack
from decant.state.store import Store
from tests.router.fake_script import EOS, answer
from tests.router.fake_worker import fleet
from tests.router.harness import (
    D2,
    DECODING,
    FAILED,
    P2,
    QUEUED,
    SUCCEEDED,
    D,
    P,
    begin_paused,
    core,
    error_of,
    incarnation_of,
    jump,
    make_request,
    pass_on,
    read_stored,
    states,
    tokens_of,
    until,
    until_ended,
    until_written,
)

PROMPT = [1, 2, 3]


@pytest.mark.parametrize(
    "fault", ["prefill_fails_before_ticket", "prefill_fails_after_ticket", "prefill_breaks_after_ticket"]
)
async def test_a_failed_prefill_is_repeated_on_another_worker(store: Store, fault: str) -> None:
    async with fleet(P, D) as workers, core(store, workers) as harness:
        setattr(workers[0].script, fault, 1)
        stream = await harness.answer(make_request())
        assert tokens_of(stream) == answer(PROMPT, 5)
        assert stream.trace.attempts == 2
        found = await read_stored(store, harness)
        assert found.attempt == 2
        assert [attempt.failure.cause != 0 for attempt in found.record.attempts] == [True, False]
        assert [entry.token for entry in found.entries] == answer(PROMPT, 5)


async def test_a_failure_before_the_ticket_goes_to_another_prefill_worker(store: Store) -> None:
    async with fleet(P, P2, D) as workers, core(store, workers) as harness:
        for worker in workers[:2]:
            worker.script.prefill_fails_before_ticket = 1
        stream = await harness.answer(make_request())
        assert tokens_of(stream) == answer(PROMPT, 5)
        assert [len(worker.prefills) for worker in workers[:2]] in ([2, 1], [1, 2])


@pytest.mark.parametrize("cause", [wire.CAUSE_CORRUPT, wire.CAUSE_LEASE_EXPIRED, wire.CAUSE_LAYOUT_DIFFERS])
async def test_a_failed_handoff_continues_from_tokens_without_gap_or_repeat(store: Store, cause: wire.Cause) -> None:
    async with fleet(P, D) as workers, core(store, workers) as harness:
        workers[1].script.handoff_fails = [cause]
        workers[1].script.has_no_free_blocks = True
        stream = await harness.requests.begin(make_request())
        await until_written(stream, 1)  # from the prefill worker, before the failure comes over the other connection
        workers[1].go.set()
        await until_ended(stream)
        assert tokens_of(stream) == answer(PROMPT, 5)
        assert stream.trace.prefill_worker == ""
        again = workers[1].starts[1]
        assert not again.HasField("ticket")
        assert again.run.attempt == 2
        assert list(unpack(again.engine_request.outputs[0].tokens)) == answer(PROMPT, 1)


@pytest.mark.rule("end-from-tokens", "router/request/finish.py:finish_from_tokens")
@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("attempts", [1, 3])
async def test_an_output_whose_end_report_is_lost_is_complete(store: Store, stops: bool, attempts: int) -> None:
    async with fleet(P, D) as workers, core(store, workers, attempts=attempts) as harness:
        workers[1].script.fails_at_end = 1
        workers[1].script.stops_at = 3 if stops else None
        stream = await harness.answer(make_request(eos_token_ids=frozenset({EOS})))
        if stops:
            assert stream.end == Finish(pb.FINISH_REASON_STOP, eos_token_id=EOS)
            assert stream.outputs[0].tokens == [*answer(PROMPT, 3), EOS]
        else:
            assert stream.end == Finish(pb.FINISH_REASON_LENGTH)
            assert stream.outputs[0].tokens == answer(PROMPT, 5)
        assert len(workers[1].starts) == 1, "nothing is left to be written"


@pytest.mark.rule("owner-starts-attempts", "router/execution/execution.py:Execution._run_attempts")
async def test_an_output_continues_after_its_worker_failed(store: Store) -> None:
    async with fleet(P, D, D2) as workers, core(store, workers) as harness:
        for worker in workers[1:]:
            worker.script.fails_at = [3]
        workers[1].script.fails_at = workers[2].script.fails_at = shared = [3]
        stream = await harness.answer(make_request(max_tokens=8))
        assert not shared
        assert tokens_of(stream) == answer(PROMPT, 8)
        first, second = (worker for worker in workers[1:])
        starts = sorted([*first.starts, *second.starts], key=lambda start: start.run.attempt)
        assert len(first.starts) == len(second.starts) == 1, "the other worker goes on"
        assert list(unpack(starts[1].engine_request.outputs[0].tokens)) == answer(PROMPT, 3)
        assert states(await read_stored(store, harness))[-3:] == [QUEUED, DECODING, SUCCEEDED]


async def test_attempts_are_spent_before_the_first_token(store: Store) -> None:
    async with fleet(D) as workers, core(store, workers) as harness:
        workers[0].script.fails_at = [0, 0, 0, 0]
        error = error_of(await harness.answer(make_request()))
        assert isinstance(error, Unavailable)
        assert error.reason is Reason.WORKERS_LOST
        assert len(workers[0].starts) == 3
        found = await read_stored(store, harness)
        assert (found.state, found.attempt) == (FAILED, 3)
        assert found.record.error.code == error.detail.code


@pytest.mark.rule(
    "attempts-spent",
    "router/execution/execution.py:Execution._prepare_next",
    "router/execution/interruptions.py:workers_lost_error",
)
async def test_attempts_are_spent_after_the_first_token(store: Store) -> None:
    async with fleet(D) as workers, core(store, workers, attempts=2) as harness:
        workers[0].script.fails_at = [2, 2]
        stream = await harness.answer(make_request())
        error = error_of(stream)
        assert isinstance(error, Aborted)
        assert error.reason is Reason.WORKERS_LOST
        assert stream.outputs[0].tokens == answer(PROMPT, 2)
        assert error.resume is not None
        assert error.resume.last_seq == 2


@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        (wire.CAUSE_INVALID, InvalidArgument),
        (wire.CAUSE_NEVER_FITS, InvalidArgument),
        (wire.CAUSE_UNSUPPORTED, Unimplemented),
    ],
)
@pytest.mark.parametrize("pools", [(P, D), (D,)])
async def test_a_client_error_is_reported_once_and_blames_no_worker(
    store: Store, cause: wire.Cause, kind: type[ServiceError], pools: tuple[tuple[str, wire.Role], ...]
) -> None:
    async with fleet(*pools) as workers, core(store, workers) as harness:
        workers[0].script.refuse = [cause]
        workers[0].script.violation = wire.Violation(field="sampling.top_p", limit="at most 1", value="3")
        error = error_of(await harness.answer(make_request()))
        assert isinstance(error, kind)
        assert error.detail.violation is not None
        assert error.detail.violation.field == "sampling.top_p"
        assert len(workers[0].prefills) + len(workers[0].starts) == 1
        assert not any(seen.is_avoided for seen in harness.router.pool.snapshot("m", frozenset()))


@pytest.mark.slow
@pytest.mark.parametrize("cause", [wire.CAUSE_BUSY, wire.CAUSE_DRAINING])
async def test_a_full_worker_is_tried_again_in_the_same_attempt(store: Store, cause: wire.Cause) -> None:
    async with fleet(P, D) as workers, core(store, workers) as harness:
        for worker in workers:
            worker.script.refuse = [cause, cause]
        stream = await harness.answer(make_request())
        assert tokens_of(stream) == answer(PROMPT, 5)
        assert stream.trace.attempts == 1
        assert len(workers[0].prefills) == 3
        assert len(workers[1].starts) == 3


async def test_a_worker_with_capacity_replaces_a_full_one(store: Store) -> None:
    async with fleet(P, P2, D, D2) as workers, core(store, workers) as harness:
        workers[0].script.refuse = [wire.CAUSE_BUSY] * 100
        workers[2].script.refuse = [wire.CAUSE_BUSY] * 100
        stream = await harness.answer(make_request())
        assert tokens_of(stream) == answer(PROMPT, 5)
        assert (stream.trace.prefill_worker, stream.trace.decode_worker) == ("p2", "d2")


async def test_a_lost_decode_worker_is_replaced_by_the_other(store: Store) -> None:
    async with fleet(P, D, D2) as workers, core(store, workers) as harness:
        for worker in workers[1:]:
            worker.script.pause_at = 3
        stream = await harness.requests.begin(make_request(max_tokens=8))
        await until_written(stream, 3)
        dead, other = sorted(workers[1:], key=lambda worker: not worker.starts)
        await dead.stop()
        other.go.set()
        assert tokens_of(await until_ended(stream)) == answer(PROMPT, 8)
        assert other.starts[0].run.attempt == 2
        await store.workers.remove(incarnation_of(dead))


async def test_a_prefill_worker_lost_before_its_first_token_is_replaced(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers) as harness:
        workers[0].script.first_pause = True
        stream = await harness.requests.begin(make_request())
        await until(lambda: workers[1].starts)
        await workers[0].stop()
        assert tokens_of(await until_ended(stream)) == answer(PROMPT, 5)
        assert stream.trace.decode_worker == "d"


async def test_a_break_of_the_session_is_no_failure_when_it_comes_back(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers) as harness:
        stream = await begin_paused(harness, workers[1], 3, request=make_request(max_tokens=8))
        workers[1].break_session()
        workers[1].go.set()  # decodes while no router is connected
        assert tokens_of(await until_ended(stream)) == answer(PROMPT, 8)
        assert stream.trace.attempts == 1
        (owned,) = workers[1].hellos[-1].owned
        assert owned.resume[0].position == len(PROMPT) + 3


@pytest.mark.rule(
    "position-written-once",
    "router/request/output.py:Output.write",
    "router/workers/session_runs.py:SessionRuns._request_resend",
)
async def test_lost_frames_are_requested_again(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers) as harness:
        stream = await begin_paused(harness, workers[1], 2, request=make_request(max_tokens=8))
        workers[1].script.drop_frames = 2
        pass_on(workers[1], until=6)
        await until_written(stream, 6)  # and not only at its end
        workers[1].go.set()
        assert tokens_of(await until_ended(stream)) == answer(PROMPT, 8)
        assert workers[1].resends > 0


async def test_a_lost_last_frame_is_requested_again(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers) as harness:
        stream = await begin_paused(harness, workers[1], 4)
        workers[1].script.drop_frames = 1
        workers[1].go.set()
        assert tokens_of(await until_ended(stream)) == answer(PROMPT, 5)
        assert workers[1].resends == 1


@pytest.mark.rule(
    "other-token-never-sent",
    "router/request/output.py:Output.write",
    "router/workers/session_runs.py:SessionRuns._on_write_error",
)
async def test_another_token_for_a_known_position_is_logged_and_never_sent(store: Store) -> None:
    async with fleet(D) as workers, core(store, workers) as harness:
        workers[0].script.wrong_token_at = 2
        with capture_logs() as logs:
            stream = await harness.answer(make_request())
        assert tokens_of(stream) == answer(PROMPT, 5)
        reasons = [line["reason"] for line in logs if line["event"] == "invalid message from a worker"]
        assert reasons == ["it sent another token for a known position"]
        assert stream.trace.attempts == 2


async def test_a_stuck_worker_gets_no_new_work_and_loses_what_it_has(store: Store) -> None:
    async with fleet(D, D2) as workers, core(store, workers) as harness:
        for worker in workers:
            worker.script.pause_at = 2
        stream = await harness.requests.begin(make_request())
        await until_written(stream, 2)
        stuck, other = sorted(workers, key=lambda worker: not worker.starts)
        stuck.script.stuck_ms = 60_000
        other.go.set()
        assert tokens_of(await until_ended(stream)) == answer(PROMPT, 5)
        assert len(other.starts) == 1
        await harness.answer(make_request("next"))
        assert len(stuck.starts) == 1
        stuck.script.stuck_ms = None


@pytest.mark.slow
async def test_a_silent_worker_loses_what_it_has(store: Store) -> None:
    async with fleet(D, D2) as workers, core(store, workers) as harness:
        for worker in workers:
            worker.script.pause_at = 2
        stream = await harness.requests.begin(make_request())
        await until_written(stream, 2)
        silent, other = sorted(workers, key=lambda worker: not worker.starts)
        silent.script.silent = True
        other.go.set()
        assert tokens_of(await until_ended(stream)) == answer(PROMPT, 5)
        assert other.starts[0].run.attempt == 2


async def test_without_any_worker_a_request_is_refused_at_once(store: Store) -> None:
    async with core(store, []) as harness:
        with pytest.raises(Unavailable) as refused:
            await harness.requests.begin(make_request())
        assert refused.value.reason is Reason.NO_WORKER
        assert refused.value.retry_after is not None


@pytest.mark.slow
async def test_when_the_last_worker_goes_for_good_the_request_is_not_left_hanging(store: Store) -> None:
    timings = RouterTimings(workers=WorkerTimings(no_worker_timeout_s=0.5))
    async with fleet(D) as workers, core(store, workers, timings=timings) as harness:
        stream = await begin_paused(harness, workers[0], 2)
        await store.workers.remove(incarnation_of(workers[0]))
        await workers[0].stop()
        error = error_of(await until_ended(stream))
        assert isinstance(error, Aborted)
        assert error.reason is Reason.WORKERS_LOST


@pytest.mark.rule("unfetchable-cache-computed-again", "router/attempt/placement_search.py:CacheSearch.failure")
@pytest.mark.slow
@pytest.mark.parametrize(
    "loss",
    [
        "removed",
        "draining",
        "unreachable",
        pytest.param("silent", marks=pytest.mark.slow),
        pytest.param("stuck", marks=pytest.mark.slow),
    ],
)
async def test_a_cache_that_no_worker_can_fetch_is_computed_again(store: Store, loss: str) -> None:
    timings = RouterTimings(workers=WorkerTimings(no_worker_timeout_s=0.5))
    async with fleet(P, D) as workers, core(store, workers, timings=timings) as harness:
        decode = workers[1]
        decode.script.refuse = [wire.CAUSE_BUSY] * 1000
        stream = await harness.requests.begin(make_request())
        await until(lambda: len(decode.starts) > 1)
        match loss:
            case "removed":
                await store.workers.remove(incarnation_of(decode))
                await decode.stop()
            case "draining":
                decode.load.draining = True
            case "unreachable":
                await decode.stop()
            case "silent":
                decode.script.silent = True
            case "stuck":
                decode.script.stuck_ms = 60_000
        assert tokens_of(await until_ended(stream)) == answer(PROMPT, 5)
        assert (stream.trace.attempts, stream.trace.decode_worker) == (2, "p")
        decode.script.silent, decode.script.stuck_ms = False, None


async def test_patience_with_lost_workers_begins_when_the_last_is_lost(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    timings = RouterTimings(workers=WorkerTimings(no_worker_timeout_s=20))
    async with fleet(D, D2) as workers, core(store, workers[:1], timings=timings) as harness:
        full, other = workers
        full.load.takes_prompts = False
        await until(lambda: not next(iter(harness.router.pool.membership)).load.takes_prompts)
        stream = await harness.requests.begin(make_request())
        await until(lambda: harness.router.pool.waiting)
        jump(monkeypatch, 25)  # longer than that timeout, shorter than with full workers
        await store.workers.remove(incarnation_of(full))
        await full.stop()
        await until(lambda: not list(harness.router.pool.membership))
        await store.workers.register(other.registration)
        assert tokens_of(await until_ended(stream)) == answer(PROMPT, 5)
        assert stream.trace.decode_worker == "d2"
