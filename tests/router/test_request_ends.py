from __future__ import annotations

import asyncio
import gc
from contextlib import suppress
from typing import Any

import pytest

from decant.protos import inference_pb2 as pb
from decant.protos import worker_pb2 as wire
from decant.router.request.token_stream import TokenStream
from decant.runtime.error_details import Reason, ResumePoint
from decant.runtime.errors import (
    Aborted,
    Cancelled,
    DeadlineExceeded,
    QueueFull,
    Unavailable,
)
from decant.state.ids import RequestKey
from decant.state.store import Store
from tests.router.fake_script import answer
from tests.router.fake_worker import FakeWorker, fleet
from tests.router.harness import (
    CANCELLED,
    DECODING,
    FAILED,
    PATIENCE,
    SUCCEEDED,
    D,
    P,
    begin_paused,
    core,
    error_of,
    jump,
    make_request,
    nothing_is_left_at,
    read_stored,
    tokens_of,
    until,
    until_ended,
    until_written,
)

PROMPT = [1, 2, 3]


PHASES = ["waiting for blocks", "prefilling", "waiting for a receiver", "handing off", "decoding"]


def hold(workers: list[FakeWorker], phase: str) -> None:
    prefill, decode = workers
    match phase:
        case "waiting for blocks":
            prefill.script.refuse = [wire.CAUSE_BUSY] * 10_000
        case "prefilling":
            prefill.script.prefill_pause = True
        case "waiting for a receiver":
            decode.script.refuse = [wire.CAUSE_BUSY] * 10_000
        case "handing off":
            prefill.script.first_pause = True
        case "decoding":
            decode.script.pause_at = 2


async def is_in(stream: TokenStream, workers: list[FakeWorker], phase: str) -> None:
    prefill, decode = workers
    match phase:
        case "waiting for blocks" | "prefilling":
            await until(lambda: prefill.prefills)
        case "waiting for a receiver":
            await until(lambda: decode.starts)
        case "handing off":
            await until(lambda: stream.trace.scheduled_at and decode.runs)
        case "decoding":
            await until_written(stream, 2)


@pytest.mark.parametrize("phase", PHASES)
async def test_a_cancel_ends_it_at_once_in_every_state(store: Store, phase: str) -> None:
    async with fleet(P, D) as workers, core(store, workers) as harness:
        hold(workers, phase)
        stream = await harness.requests.begin(make_request())
        await is_in(stream, workers, phase)
        for _ in range(2):  # the second time it has ended, and that is hardly written
            assert isinstance(await harness.requests.cancel(stream.request.key), Cancelled)
        assert isinstance(stream.end, Cancelled)
        await nothing_is_left_at(workers)
        if phase in ("handing off", "decoding"):
            assert workers[1].cancels[-1].reason == wire.Cancel.REASON_CLIENT
        found = await read_stored(store, harness)
        assert found.state == CANCELLED
        assert isinstance(stream.end, Cancelled), "the first end stays"
        assert found.record.finished[0].finish_reason == pb.FINISH_REASON_CANCELLED


@pytest.mark.rule(
    "deadline-in-every-state",
    "router/execution/execution.py:Execution.run",
    "router/attempt/context.py:AttemptContext.engine_request",
    "worker/decode/execution.py:RunExecutor.start",
)
@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
async def test_the_deadline_ends_a_request_in_every_state(
    store: Store, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    async with fleet(P, D) as workers, core(store, workers) as harness:
        hold(workers, phase)
        stream = await harness.requests.begin(make_request(seconds=8.0))
        await is_in(stream, workers, phase)
        jump(monkeypatch, 8.0)
        assert isinstance((await until_ended(stream)).end, DeadlineExceeded)
        await nothing_is_left_at(workers)
        if phase in ("handing off", "decoding"):
            assert workers[1].cancels[-1].reason == wire.Cancel.REASON_DEADLINE
        found = await read_stored(store, harness)
        assert found.state == FAILED
        assert found.record.finished[0].finish_reason == pb.FINISH_REASON_TIME_LIMIT
        assert [entry.token for entry in found.entries] == stream.outputs[0].tokens


@pytest.mark.rule("grace-of-a-lost-stream", "router/execution/registry.py:RequestRegistry.on_disconnect")
async def test_a_lost_stream_has_a_grace_unless_its_id_was_generated(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers, resume_grace_ms=50) as harness:
        stream = await begin_paused(harness, workers[1], 2)
        harness.requests.on_disconnect(stream)
        harness.requests.on_disconnect(stream)
        assert stream.end is None
        assert isinstance((await until_ended(stream)).end, Cancelled)
        nameless = await harness.requests.begin(make_request("made-up", id_generated=True))
        harness.requests.on_disconnect(nameless)
        assert isinstance(nameless.end, Cancelled)
        harness.requests.on_disconnect(nameless)


async def test_a_lost_stream_whose_answer_ends_within_the_grace_stays_a_success(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers) as harness:
        stream = await begin_paused(harness, workers[1], 2)
        harness.requests.on_disconnect(stream)
        workers[1].go.set()
        assert tokens_of(await until_ended(stream)) == answer(PROMPT, 5)


@pytest.mark.slow
async def test_a_request_that_waits_for_admission_keeps_its_turn_while_its_client_reconnects(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers, max_active=1, resume_grace_ms=60_000) as harness:
        workers[1].script.pause_at = 2
        stream = await harness.requests.begin(make_request("one"))
        await until_written(stream, 1)
        is_waiting = asyncio.Event()

        async def notify() -> None:
            is_waiting.set()

        waiting = [asyncio.ensure_future(harness.requests.begin(make_request("two"), notify))]
        async with asyncio.timeout(PATIENCE):
            await is_waiting.wait()
        waiting.append(asyncio.ensure_future(harness.requests.begin(make_request("three"))))
        await until(lambda: harness.router.admission.waiting == 2)
        waiting[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting[0]
        again = asyncio.ensure_future(harness.requests.begin(make_request("two")))
        workers[1].go.set()
        two = await again
        assert not waiting[1].done()
        assert harness.requests.executions.open[two.request.key].disconnect_timer is None
        await until_ended(two)
        await until_ended(await waiting[1])


async def test_a_cancel_reaches_those_that_wait_for_admission(store: Store) -> None:
    async with (
        fleet(P, D) as workers,
        core(store, workers, max_active=1, queue_limit=2, resume_grace_ms=0) as harness,
    ):
        workers[1].script.pause_at = 2
        stream = await harness.requests.begin(make_request("one"))
        await until_written(stream, 1)
        waiting = [asyncio.ensure_future(harness.requests.begin(make_request(id))) for id in ("two", "three")]
        await until(lambda: harness.router.admission.waiting == 2)
        with pytest.raises(QueueFull):
            await harness.requests.begin(make_request("four"))
        assert isinstance(await harness.requests.cancel(RequestKey("default", "two")), Cancelled)
        with pytest.raises(Cancelled):
            await waiting[0]
        waiting[1].cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting[1]
        assert harness.requests.executions.waiting == 0
        assert harness.requests.executions.running == 1
        assert harness.requests.load() == wire.Load(running=1)
        workers[1].go.set()
        await until_ended(stream)


async def test_a_deadline_reaches_those_that_wait_for_admission(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers, max_active=1) as harness:
        workers[1].script.pause_at = 2
        stream = await harness.requests.begin(make_request("one"))
        with pytest.raises(DeadlineExceeded):
            await harness.requests.begin(make_request("two", seconds=0.05))
        workers[1].go.set()
        await until_ended(stream)


@pytest.mark.rule(
    "former-owner-writes-nothing",
    "router/execution/execution.py:Execution._record_end",
    "router/execution/journal_writer.py:JournalWriter.forget",
)
async def test_a_superseded_request_ends_and_writes_nothing_more(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers) as harness:
        stream = await begin_paused(harness, workers[1], 2)
        workers[1]._send(wire.WorkerMessage(superseded=wire.Superseded(run=workers[1].starts[0].run, epoch=2)))
        error = error_of(await until_ended(stream))
        assert isinstance(error, Aborted)
        assert (error.reason, error.resume) == (Reason.OWNER_CHANGED, ResumePoint(0, 2)), "no client's stream did it"
        assert (await read_stored(store, harness)).state not in (SUCCEEDED, FAILED, CANCELLED)


async def test_a_router_that_drains_finishes_what_it_has_and_takes_no_more(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers) as harness:
        workers[1].script.pause_at = 2
        stream = await harness.requests.begin(make_request())
        draining = asyncio.ensure_future(harness.requests.drain())
        await until(lambda: harness.requests.is_draining)
        with pytest.raises(Unavailable) as refused:
            await harness.requests.begin(make_request("late"))
        assert refused.value.reason is Reason.DRAINING
        assert not draining.done()
        workers[1].go.set()
        await draining
        assert tokens_of(stream) == answer(PROMPT, 5)


async def test_a_router_that_ends_ends_every_stream(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers) as harness:
        stream = await begin_paused(harness, workers[1], 2)
        await harness.requests.close()
        assert isinstance(stream.end, Aborted)
        assert stream.end.resume == ResumePoint(0, 2)
        await nothing_is_left_at(workers)


async def test_a_drain_that_runs_out_leaves_requests_to_other_routers(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers, max_active=1) as harness:
        workers[1].script.pause_at = 2
        stream = await harness.requests.begin(make_request())
        waiting = asyncio.ensure_future(harness.requests.begin(make_request("waiting")))
        await until_written(stream, 2)
        await until(lambda: harness.router.admission.waiting == 1)
        await harness.requests.drain(0.05)
        assert harness.requests.num_left_behind == 2
        assert isinstance(stream.end, Aborted)
        assert (stream.end.reason, stream.end.resume) == (Reason.DRAINING, ResumePoint(0, 2))
        with pytest.raises(Unavailable):
            await waiting
        await nothing_is_left_at(workers)
        found = await store.requests.read(stream.request.key)
        assert found.state == DECODING, "it is as open as before"
        assert [entry.token for entry in found.entries] == stream.outputs[0].tokens
        workers[1].go.set()
        async with core(store, workers) as other:
            assert tokens_of(await until_ended(await other.requests.resume(stream.request.key))) == answer(PROMPT, 5)


async def test_a_bug_ends_the_stream_too(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    async with fleet(P, D) as workers, core(store, workers) as harness:

        def broken(*_: object) -> None:
            raise KeyError("a bug")

        monkeypatch.setattr("decant.router.attempt.placement_search.PromptSearch.choose", broken)
        stream = await harness.answer(make_request())
        assert error_of(stream).reason is Reason.INTERNAL
        assert (await read_stored(store, harness)).state == FAILED


async def test_a_cancel_leaves_no_unretrieved_exception(store: Store) -> None:
    unseen: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
    async with fleet(P, D) as workers, core(store, workers, resume_grace_ms=0, max_active=1) as harness:
        stream = await begin_paused(harness, workers[1], 2, request=make_request("runs", max_tokens=50))
        waiting = asyncio.create_task(harness.requests.begin(make_request("waits")))
        await until(lambda: len(harness.requests.executions.open) == 2)
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await waiting
        await harness.requests.cancel(RequestKey("default", "runs"))
        del stream, waiting
    gc.collect()
    assert not unseen
