"""One request's incarnation over scripted workers: it ends once, with the right tokens, and nothing is left of it.

Whatever goes wrong, `core` checks at its end that no place, ticket, run or waiter is left in the router.
"""

from __future__ import annotations

import asyncio
import gc
from contextlib import suppress
from typing import Any

import pytest

from decant.protos import inference_pb2 as pb
from decant.protos import worker_pb2 as wire
from decant.protos.inference_pb2 import Generation
from decant.router.request.token_stream import Finish, TokenStream
from decant.router.timings import RouterTimings, WorkerTimings
from decant.runtime.error_details import Reason, ResumePoint
from decant.runtime.errors import (
    Aborted,
    Cancelled,
    DeadlineExceeded,
    InvalidArgument,
    QueueFull,
    ServiceError,
    Unavailable,
    Unimplemented,
)
from decant.runtime.packed import unpack
from decant.state.ids import Incarnation, RequestKey
from decant.state.owned import StoredRequest
from decant.state.store import Store
from tests.router.fake_worker import EOS, FakeWorker, answer, fleet
from tests.router.harness import PATIENCE, Core, core, ended, make_request, tokens_of, until, written

P, D = ("p", wire.ROLE_PREFILL), ("d", wire.ROLE_DECODE)
P2, D2 = ("p2", wire.ROLE_PREFILL), ("d2", wire.ROLE_DECODE)
PROMPT = [1, 2, 3]
QUEUED, PREFILLING = Generation.STATE_QUEUED, Generation.STATE_PREFILLING
HANDING_OFF, DECODING = Generation.STATE_HANDING_OFF, Generation.STATE_DECODING
SUCCEEDED, FAILED, CANCELLED = Generation.STATE_SUCCEEDED, Generation.STATE_FAILED, Generation.STATE_CANCELLED


async def stored(store: Store, scene: Core, id: str = "r") -> StoredRequest:
    """As it is written once nothing is left to do."""
    async with asyncio.timeout(PATIENCE):
        await scene.dispatcher.drain()
    return await store.requests.read(RequestKey("default", id))


def states(found: StoredRequest) -> list[int]:
    return [each.state for each in found.record.transitions]


def life_of(worker: FakeWorker) -> Incarnation:
    return Incarnation.of(worker.facts.peer)


def pass_on(worker: FakeWorker, until: int) -> None:
    """A worker that waits goes on to that output token, and waits there."""
    worker.script.pause_at = until
    worker.go.set()
    worker.go = asyncio.Event()


def error_of(stream: TokenStream) -> ServiceError:
    assert isinstance(stream.end, ServiceError)
    return stream.end


# ------------------------------------------------------------------------------------------------ paths that go well


async def test_a_split_request_fills_its_receipt_from_both_workers(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers) as scene:
        stream = await scene.answer(make_request())
        assert tokens_of(stream) == answer(PROMPT, 5)
        assert stream.end == Finish(pb.FINISH_REASON_LENGTH)
        path = stream.path
        assert (path.prefill_worker, path.decode_worker, path.attempts) == ("p", "d", 1)
        assert (path.prefill_s, path.handoff_s, path.decode_wait_s, path.handoff_bytes) == (2, 4, 5, 1234)
        assert path.queue_s is not None
        assert path.decode_began_at is not None
        assert stream.cached_tokens == 3
        found = await stored(store, scene)
        assert [entry.token for entry in found.entries] == answer(PROMPT, 5)
        assert states(found) == [QUEUED, PREFILLING, HANDING_OFF, DECODING, SUCCEEDED]
        assert found.record.usage.completion_tokens == 5
        await until(lambda: workers[1].retired)


async def test_one_token_needs_no_decode_worker(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers) as scene:
        stream = await scene.answer(make_request(max_tokens=1))
        assert tokens_of(stream) == answer(PROMPT, 1)
        assert not workers[0].prefills[0].handoff
        assert not workers[1].starts
        assert stream.path.decode_worker == ""
        assert states(await stored(store, scene)) == [QUEUED, PREFILLING, SUCCEEDED]


@pytest.mark.parametrize("late", [True, False])
async def test_a_first_token_that_ends_the_output_leaves_nothing_at_the_decode_worker(store: Store, late: bool) -> None:
    async with fleet(P, D) as workers, core(store, workers) as scene:
        workers[0].script.stops_at = 0
        workers[0].script.first_is_late = late
        workers[0].script.first_pause = True
        stream = await scene.dispatcher.begin(make_request())
        await until(lambda: workers[1].starts)
        workers[0].go.set()
        assert (await ended(stream)).end == Finish(pb.FINISH_REASON_STOP, eos_token_id=EOS)
        assert (stream.path.attempts, stream.path.decode_worker) == (1, "")
        await nothing_is_left_at(workers)


@pytest.mark.parametrize("role", [wire.ROLE_PREFILL, wire.ROLE_DECODE])
async def test_workers_of_one_role_answer_without_a_handoff(store: Store, role: wire.Role) -> None:
    async with fleet(("only", role)) as workers, core(store, workers) as scene:
        stream = await scene.answer(make_request())
        assert tokens_of(stream) == answer(PROMPT, 5)
        assert (stream.path.prefill_worker, stream.path.decode_worker) == ("", "only")
        assert stream.path.prefill_s == 3
        assert stream.cached_tokens == 5
        assert states(await stored(store, scene)) == [QUEUED, DECODING, SUCCEEDED]


async def test_workers_with_different_layouts_do_not_hand_over(store: Store) -> None:
    async with fleet(P, D) as workers:
        workers[1].facts.layout += 1
        async with core(store, workers) as scene:
            stream = await scene.answer(make_request())
            assert tokens_of(stream) == answer(PROMPT, 5)
            assert stream.path.decode_worker == "d"
            assert not workers[0].prefills


async def test_the_finish_reason_is_the_workers(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers) as scene:
        workers[1].script.stops_at = 3
        stream = await scene.answer(make_request("eos", max_tokens=9))
        assert stream.end == Finish(pb.FINISH_REASON_STOP, eos_token_id=EOS)
        assert stream.tokens == [*answer(PROMPT, 3), EOS]
        stream = await scene.answer(make_request("stop", max_tokens=9, stop_token_ids=[EOS]))
        assert stream.end == Finish(pb.FINISH_REASON_STOP, stop_token_id=EOS)
        workers[1].script.stops_at = None
        stream = await scene.answer(make_request("cut", cut_to_window=True))
        assert stream.end == Finish(pb.FINISH_REASON_CONTEXT_LENGTH)


async def test_workers_get_the_whole_request_with_its_present_age_and_deadline(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers) as scene:
        await scene.answer(make_request(seconds=1000))
        work = workers[1].starts[0].engine_request
        assert list(unpack(work.prompt)) == PROMPT
        assert 900_000 < work.remaining_ms <= 1_000_000
        assert workers[0].prefills[0].engine_request.sampling == work.sampling
        await scene.answer(make_request("forever"))
        assert not workers[1].starts[1].engine_request.HasField("remaining_ms")


async def test_many_concurrent_requests_get_their_own_tokens(store: Store) -> None:
    async with fleet(P, P2, D, D2) as workers, core(store, workers) as scene:
        requests = [make_request(str(n), (n, 1, 2), 1 + n % 9) for n in range(100)]
        streams = await asyncio.gather(*[scene.answer(request) for request in requests])
        for n, stream in enumerate(streams):
            assert tokens_of(stream) == answer([n, 1, 2], 1 + n % 9)
        assert all(worker.starts for worker in workers[2:])
        assert all(worker.prefills for worker in workers[:2])
        await until(lambda: not any(worker.runs for worker in workers))


# ------------------------------------------------------------------------------------------------ workers that fail


@pytest.mark.parametrize(
    "fault", ["prefill_fails_before_ticket", "prefill_fails_after_ticket", "prefill_breaks_after_ticket"]
)
async def test_a_failed_prefill_is_repeated_on_another_worker(store: Store, fault: str) -> None:
    async with fleet(P, D) as workers, core(store, workers) as scene:
        setattr(workers[0].script, fault, 1)
        stream = await scene.answer(make_request())
        assert tokens_of(stream) == answer(PROMPT, 5)
        assert stream.path.attempts == 2
        found = await stored(store, scene)
        assert found.attempt == 2
        assert [attempt.failure.cause != 0 for attempt in found.record.attempts] == [True, False]
        assert [entry.token for entry in found.entries] == answer(PROMPT, 5)


async def test_a_failure_before_the_ticket_goes_to_another_prefill_worker(store: Store) -> None:
    async with fleet(P, P2, D) as workers, core(store, workers) as scene:
        for worker in workers[:2]:
            worker.script.prefill_fails_before_ticket = 1
        stream = await scene.answer(make_request())
        assert tokens_of(stream) == answer(PROMPT, 5)
        assert [len(worker.prefills) for worker in workers[:2]] in ([2, 1], [1, 2])


@pytest.mark.parametrize("cause", [wire.CAUSE_CORRUPT, wire.CAUSE_LEASE_OVER, wire.CAUSE_LAYOUT_DIFFERS])
async def test_a_failed_handoff_continues_from_tokens_without_gap_or_repeat(store: Store, cause: wire.Cause) -> None:
    async with fleet(P, D) as workers, core(store, workers) as scene:
        workers[1].script.handoff_fails = [cause]
        stream = await scene.answer(make_request())
        assert tokens_of(stream) == answer(PROMPT, 5)
        assert stream.path.prefill_worker == ""
        again = workers[1].starts[1]
        assert not again.HasField("ticket")
        assert again.run.attempt == 2
        assert list(unpack(again.engine_request.outputs[0].tokens)) == answer(PROMPT, 1)


@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("attempts", [1, 3])
async def test_an_output_whose_end_report_is_lost_is_complete(store: Store, stops: bool, attempts: int) -> None:
    async with fleet(P, D) as workers, core(store, workers, attempts=attempts) as scene:
        workers[1].script.fails_at_end = 1
        workers[1].script.stops_at = 3 if stops else None
        stream = await scene.answer(make_request(eos_token_ids=frozenset({EOS})))
        if stops:
            assert stream.end == Finish(pb.FINISH_REASON_STOP, eos_token_id=EOS)
            assert stream.tokens == [*answer(PROMPT, 3), EOS]
        else:
            assert stream.end == Finish(pb.FINISH_REASON_LENGTH)
            assert stream.tokens == answer(PROMPT, 5)
        assert len(workers[1].starts) == 1, "nothing is left to be written"


async def test_an_output_continues_after_its_worker_failed(store: Store) -> None:
    async with fleet(P, D, D2) as workers, core(store, workers) as scene:
        for worker in workers[1:]:
            worker.script.fails_at = [3]
        workers[1].script.fails_at = workers[2].script.fails_at = shared = [3]
        stream = await scene.answer(make_request(max_tokens=8))
        assert not shared
        assert tokens_of(stream) == answer(PROMPT, 8)
        first, second = (worker for worker in workers[1:])
        starts = sorted([*first.starts, *second.starts], key=lambda start: start.run.attempt)
        assert len(first.starts) == len(second.starts) == 1, "the other worker goes on"
        assert list(unpack(starts[1].engine_request.outputs[0].tokens)) == answer(PROMPT, 3)
        assert states(await stored(store, scene))[-3:] == [QUEUED, DECODING, SUCCEEDED]


async def test_attempts_are_spent_before_the_first_token(store: Store) -> None:
    async with fleet(D) as workers, core(store, workers) as scene:
        workers[0].script.fails_at = [0, 0, 0, 0]
        error = error_of(await scene.answer(make_request()))
        assert isinstance(error, Unavailable)
        assert error.reason is Reason.WORKERS_LOST
        assert len(workers[0].starts) == 3
        found = await stored(store, scene)
        assert (found.state, found.attempt) == (FAILED, 3)
        assert found.record.error.code == error.fault.code


async def test_attempts_are_spent_after_the_first_token(store: Store) -> None:
    async with fleet(D) as workers, core(store, workers, attempts=2) as scene:
        workers[0].script.fails_at = [2, 2]
        stream = await scene.answer(make_request())
        error = error_of(stream)
        assert isinstance(error, Aborted)
        assert error.reason is Reason.WORKERS_LOST
        assert stream.tokens == answer(PROMPT, 2)
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
async def test_a_clients_mistake_is_reported_once_and_blames_no_worker(
    store: Store, cause: wire.Cause, kind: type[ServiceError], pools: tuple[tuple[str, wire.Role], ...]
) -> None:
    async with fleet(*pools) as workers, core(store, workers) as scene:
        workers[0].script.refuse = [cause]
        workers[0].script.violation = wire.Violation(field="sampling.top_p", limit="at most 1", value="3")
        error = error_of(await scene.answer(make_request()))
        assert isinstance(error, kind)
        assert error.fault.violation is not None
        assert error.fault.violation.field == "sampling.top_p"
        assert len(workers[0].prefills) + len(workers[0].starts) == 1
        assert not any(seen.avoided for seen in scene.router.pool.snapshot("m", frozenset()))


@pytest.mark.parametrize("cause", [wire.CAUSE_BUSY, wire.CAUSE_DRAINING])
async def test_a_full_worker_is_tried_again_in_the_same_attempt(store: Store, cause: wire.Cause) -> None:
    async with fleet(P, D) as workers, core(store, workers) as scene:
        for worker in workers:
            worker.script.refuse = [cause, cause]
        stream = await scene.answer(make_request())
        assert tokens_of(stream) == answer(PROMPT, 5)
        assert stream.path.attempts == 1
        assert len(workers[0].prefills) == 3
        assert len(workers[1].starts) == 3


async def test_a_worker_with_capacity_replaces_a_full_one(store: Store) -> None:
    async with fleet(P, P2, D, D2) as workers, core(store, workers) as scene:
        workers[0].script.refuse = [wire.CAUSE_BUSY] * 100
        workers[2].script.refuse = [wire.CAUSE_BUSY] * 100
        stream = await scene.answer(make_request())
        assert tokens_of(stream) == answer(PROMPT, 5)
        assert (stream.path.prefill_worker, stream.path.decode_worker) == ("p2", "d2")


async def test_a_decode_worker_that_dies_is_replaced_by_the_other(store: Store) -> None:
    async with fleet(P, D, D2) as workers, core(store, workers) as scene:
        for worker in workers[1:]:
            worker.script.pause_at = 3
        stream = await scene.dispatcher.begin(make_request(max_tokens=8))
        await written(stream, 3)
        dead, other = sorted(workers[1:], key=lambda worker: not worker.starts)
        await dead.stop()
        other.go.set()
        assert tokens_of(await ended(stream)) == answer(PROMPT, 8)
        assert other.starts[0].run.attempt == 2
        await store.workers.remove(life_of(dead))


async def test_a_prefill_worker_that_dies_before_its_first_token_is_replaced(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers) as scene:
        workers[0].script.first_pause = True
        stream = await scene.dispatcher.begin(make_request())
        await until(lambda: workers[1].starts)
        await workers[0].stop()
        assert tokens_of(await ended(stream)) == answer(PROMPT, 5)
        assert stream.path.decode_worker == "d"


async def test_a_break_of_the_session_is_no_failure_when_it_comes_back(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers) as scene:
        workers[1].script.pause_at = 3
        stream = await scene.dispatcher.begin(make_request(max_tokens=8))
        await written(stream, 3)
        workers[1].break_session()
        workers[1].go.set()  # writes while nobody hears it
        assert tokens_of(await ended(stream)) == answer(PROMPT, 8)
        assert stream.path.attempts == 1
        (owned,) = workers[1].hellos[-1].owned
        assert owned.resume[0].position == len(PROMPT) + 3


async def test_lost_frames_are_requested_again(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers) as scene:
        workers[1].script.pause_at = 2
        stream = await scene.dispatcher.begin(make_request(max_tokens=8))
        await written(stream, 2)
        workers[1].script.drop_frames = 2
        pass_on(workers[1], until=6)
        await written(stream, 6)  # and not only at its end
        workers[1].go.set()
        assert tokens_of(await ended(stream)) == answer(PROMPT, 8)
        assert workers[1].resends > 0


async def test_a_lost_last_frame_is_requested_again(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers) as scene:
        workers[1].script.pause_at = 4
        stream = await scene.dispatcher.begin(make_request())
        await written(stream, 4)
        workers[1].script.drop_frames = 1
        workers[1].go.set()
        assert tokens_of(await ended(stream)) == answer(PROMPT, 5)
        assert workers[1].resends == 1


async def test_another_token_for_a_known_position_is_counted_and_never_sent(store: Store) -> None:
    async with fleet(D) as workers, core(store, workers) as scene:
        workers[0].script.wrong_token_at = 2
        stream = await scene.answer(make_request())
        assert tokens_of(stream) == answer(PROMPT, 5)
        assert [worker.session.runs.conflicts for worker in scene.router.pool.of("m")] == [1]
        assert stream.path.attempts == 2


async def test_a_stuck_worker_gets_no_new_work_and_loses_what_it_has(store: Store) -> None:
    async with fleet(D, D2) as workers, core(store, workers) as scene:
        for worker in workers:
            worker.script.pause_at = 2
        stream = await scene.dispatcher.begin(make_request())
        await written(stream, 2)
        stuck, other = sorted(workers, key=lambda worker: not worker.starts)
        stuck.script.stuck_ms = 60_000
        other.go.set()
        assert tokens_of(await ended(stream)) == answer(PROMPT, 5)
        assert len(other.starts) == 1
        await scene.answer(make_request("next"))
        assert len(stuck.starts) == 1
        stuck.script.stuck_ms = None


@pytest.mark.slow
async def test_a_silent_worker_loses_what_it_has(store: Store) -> None:
    async with fleet(D, D2) as workers, core(store, workers) as scene:
        for worker in workers:
            worker.script.pause_at = 2
        stream = await scene.dispatcher.begin(make_request())
        await written(stream, 2)
        silent, other = sorted(workers, key=lambda worker: not worker.starts)
        silent.script.silent = True
        other.go.set()
        assert tokens_of(await ended(stream)) == answer(PROMPT, 5)
        assert other.starts[0].run.attempt == 2


# ------------------------------------------------------------------------------------------------ nobody is there


async def test_without_any_worker_a_request_is_refused_at_once(store: Store) -> None:
    async with core(store, []) as scene:
        with pytest.raises(Unavailable) as refused:
            await scene.dispatcher.begin(make_request())
        assert refused.value.reason is Reason.NO_WORKER
        assert refused.value.retry_after is not None


async def test_when_the_last_worker_goes_for_good_the_request_is_not_left_hanging(store: Store) -> None:
    timings = RouterTimings(workers=WorkerTimings(no_worker_patience_s=0.5))
    async with fleet(D) as workers, core(store, workers, timings=timings) as scene:
        workers[0].script.pause_at = 2
        stream = await scene.dispatcher.begin(make_request())
        await written(stream, 2)
        await store.workers.remove(life_of(workers[0]))
        await workers[0].stop()
        error = error_of(await ended(stream))
        assert isinstance(error, Aborted)
        assert error.reason is Reason.WORKERS_LOST


# ------------------------------------------------------------------------------------------------ ends from outside


PHASES = ["waiting for room", "prefilling", "waiting for a taker", "handing off", "decoding"]


def hold(workers: list[FakeWorker], phase: str) -> None:
    """Everything stops in that phase."""
    prefill, decode = workers
    match phase:
        case "waiting for room":
            prefill.script.refuse = [wire.CAUSE_BUSY] * 10_000
        case "prefilling":
            prefill.script.prefill_pause = True
        case "waiting for a taker":
            decode.script.refuse = [wire.CAUSE_BUSY] * 10_000
        case "handing off":
            prefill.script.first_pause = True
        case "decoding":
            decode.script.pause_at = 2


async def is_in(stream: TokenStream, workers: list[FakeWorker], phase: str) -> None:
    prefill, decode = workers
    match phase:
        case "waiting for room" | "prefilling":
            await until(lambda: prefill.prefills)
        case "waiting for a taker":
            await until(lambda: decode.starts)
        case "handing off":
            await until(lambda: stream.path.scheduled_at and decode.runs)
        case "decoding":
            await written(stream, 2)


async def nothing_is_left_at(workers: list[FakeWorker]) -> None:
    prefill, decode = workers
    await until(lambda: not prefill.prefilling and not decode.runs)


@pytest.mark.parametrize("phase", PHASES)
async def test_a_cancel_ends_it_at_once_in_every_state(store: Store, phase: str) -> None:
    async with fleet(P, D) as workers, core(store, workers) as scene:
        hold(workers, phase)
        stream = await scene.dispatcher.begin(make_request())
        await is_in(stream, workers, phase)
        for _ in range(2):  # the second time it has ended, and that is hardly written
            assert isinstance(await scene.dispatcher.cancel(stream.request.key), Cancelled)
        assert isinstance(stream.end, Cancelled)
        await nothing_is_left_at(workers)
        if phase in ("handing off", "decoding"):
            assert workers[1].cancels[-1].reason == wire.Cancel.REASON_CLIENT
        found = await stored(store, scene)
        assert found.state == CANCELLED
        assert isinstance(stream.end, Cancelled), "the first end stays"
        assert found.record.finished[0].finish_reason == pb.FINISH_REASON_CANCELLED


@pytest.mark.parametrize("phase", PHASES)
async def test_its_deadline_ends_it_in_every_state(store: Store, phase: str) -> None:
    async with fleet(P, D) as workers, core(store, workers) as scene:
        hold(workers, phase)
        stream = await scene.dispatcher.begin(make_request(seconds=1.0))
        await is_in(stream, workers, phase)
        assert isinstance((await ended(stream)).end, DeadlineExceeded)
        await nothing_is_left_at(workers)
        if phase in ("handing off", "decoding"):
            assert workers[1].cancels[-1].reason == wire.Cancel.REASON_DEADLINE
        found = await stored(store, scene)
        assert found.state == FAILED
        assert found.record.finished[0].finish_reason == pb.FINISH_REASON_TIME_LIMIT
        assert [entry.token for entry in found.entries] == stream.tokens


async def test_a_lost_stream_has_a_grace_unless_nobody_could_come_back(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers, resume_grace_ms=50) as scene:
        workers[1].script.pause_at = 2
        stream = await scene.dispatcher.begin(make_request())
        await written(stream, 2)
        scene.dispatcher.on_disconnect(stream)
        scene.dispatcher.on_disconnect(stream)
        assert stream.end is None
        assert isinstance((await ended(stream)).end, Cancelled)
        nameless = await scene.dispatcher.begin(make_request("made-up", id_generated=True))
        scene.dispatcher.on_disconnect(nameless)
        assert isinstance(nameless.end, Cancelled)
        scene.dispatcher.on_disconnect(nameless)


async def test_a_lost_stream_whose_answer_ends_within_the_grace_stays_a_success(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers) as scene:
        workers[1].script.pause_at = 2
        stream = await scene.dispatcher.begin(make_request())
        await written(stream, 2)
        scene.dispatcher.on_disconnect(stream)
        workers[1].go.set()
        assert tokens_of(await ended(stream)) == answer(PROMPT, 5)


async def test_a_cancel_reaches_those_that_wait_for_admission(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers, max_active=1, queue_limit=2) as scene:
        workers[1].script.pause_at = 2
        stream = await scene.dispatcher.begin(make_request("one"))
        await written(stream, 1)
        waiting = [asyncio.ensure_future(scene.dispatcher.begin(make_request(id))) for id in ("two", "three")]
        await until(lambda: scene.router.admission.waiting == 2)
        with pytest.raises(QueueFull):
            await scene.dispatcher.begin(make_request("four"))
        assert isinstance(await scene.dispatcher.cancel(RequestKey("default", "two")), Cancelled)
        with pytest.raises(Cancelled):
            await waiting[0]
        waiting[1].cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting[1]
        assert scene.dispatcher.executions.waiting == 0
        assert scene.dispatcher.executions.running == 1
        assert scene.dispatcher.load() == wire.Load(running=1)
        workers[1].go.set()
        await ended(stream)


async def test_a_deadline_reaches_those_that_wait_for_admission(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers, max_active=1) as scene:
        workers[1].script.pause_at = 2
        stream = await scene.dispatcher.begin(make_request("one"))
        with pytest.raises(DeadlineExceeded):
            await scene.dispatcher.begin(make_request("two", seconds=0.05))
        workers[1].go.set()
        await ended(stream)


async def test_a_superseded_request_ends_and_writes_nothing_more(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers) as scene:
        workers[1].script.pause_at = 2
        stream = await scene.dispatcher.begin(make_request())
        await written(stream, 2)
        workers[1]._say(wire.WorkerMessage(superseded=wire.Superseded(run=workers[1].starts[0].run, epoch=2)))
        error = error_of(await ended(stream))
        assert isinstance(error, Aborted)
        assert (error.reason, error.resume) == (Reason.OWNER_CHANGED, ResumePoint(0, 2)), "no client's stream did it"
        assert (await stored(store, scene)).state not in (SUCCEEDED, FAILED, CANCELLED)


async def test_a_router_that_drains_finishes_what_it_has_and_takes_no_more(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers) as scene:
        workers[1].script.pause_at = 2
        stream = await scene.dispatcher.begin(make_request())
        draining = asyncio.ensure_future(scene.dispatcher.drain())
        await until(lambda: scene.dispatcher.is_draining)
        with pytest.raises(Unavailable) as refused:
            await scene.dispatcher.begin(make_request("late"))
        assert refused.value.reason is Reason.DRAINING
        assert not draining.done()
        workers[1].go.set()
        await draining
        assert tokens_of(stream) == answer(PROMPT, 5)


async def test_a_router_that_ends_ends_every_stream(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers) as scene:
        workers[1].script.pause_at = 2
        stream = await scene.dispatcher.begin(make_request())
        await written(stream, 2)
        await scene.dispatcher.close()
        assert isinstance(stream.end, Aborted)
        assert stream.end.resume == ResumePoint(0, 2)
        await nothing_is_left_at(workers)


async def test_a_drain_that_runs_out_leaves_requests_to_other_routers(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers, max_active=1) as scene:
        workers[1].script.pause_at = 2
        stream = await scene.dispatcher.begin(make_request())
        waiting = asyncio.ensure_future(scene.dispatcher.begin(make_request("waiting")))
        await written(stream, 2)
        await until(lambda: scene.router.admission.waiting == 1)
        await scene.dispatcher.drain(0.05)
        assert scene.dispatcher.num_left_behind == 2
        assert isinstance(stream.end, Aborted)
        assert (stream.end.reason, stream.end.resume) == (Reason.DRAINING, ResumePoint(0, 2))
        with pytest.raises(Unavailable):
            await waiting
        await nothing_is_left_at(workers)
        found = await store.requests.read(stream.request.key)
        assert found.state == DECODING, "it is as open as before"
        assert [entry.token for entry in found.entries] == stream.tokens
        workers[1].go.set()
        async with core(store, workers) as other:
            assert tokens_of(await ended(await other.dispatcher.resume(stream.request.key))) == answer(PROMPT, 5)


async def test_a_bug_ends_the_stream_too(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    async with fleet(P, D) as workers, core(store, workers) as scene:

        def broken(*_: object) -> None:
            raise KeyError("a bug")

        monkeypatch.setattr("decant.router.attempt.placement_search.PromptSearch.choose", broken)
        stream = await scene.answer(make_request())
        assert error_of(stream).reason is Reason.INTERNAL
        assert (await stored(store, scene)).state == FAILED


async def test_a_cancel_leaves_no_unretrieved_exception(store: Store) -> None:
    unseen: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
    async with fleet(P, D) as workers, core(store, workers, resume_grace_ms=0, max_active=1) as scene:
        workers[1].script.pause_at = 2
        stream = await scene.dispatcher.begin(make_request("runs", max_tokens=50))
        await written(stream, 2)
        waiting = asyncio.create_task(scene.dispatcher.begin(make_request("waits")))
        await until(lambda: len(scene.dispatcher.executions.open) == 2)
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await waiting
        await scene.dispatcher.cancel(RequestKey("default", "runs"))
        del stream, waiting
    gc.collect()
    assert not unseen
