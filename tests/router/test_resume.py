from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from decant.protos import inference_pb2 as pb
from decant.protos.inference_pb2 import Generation
from decant.router.request.token_stream import RecordedStream
from decant.runtime.errors import AlreadyExists, Cancelled, DeadlineExceeded, NotFound
from decant.state.ids import RequestKey
from decant.state.private_redis import PrivateRedis
from decant.state.store import Store
from tests.router.fake_script import answer
from tests.router.fake_worker import FakeWorker, fleet
from tests.router.harness import (
    D,
    P,
    begin_paused,
    core,
    ended_run,
    jump,
    make_request,
    tokens_of,
    until,
    until_ended,
    until_written,
)
from tests.state.factories import make_store

PROMPT = [1, 2, 3]
KEY = RequestKey("default", "r")


async def test_an_equal_request_attaches_to_the_one_that_runs(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers) as harness:
        stream = await begin_paused(harness, workers[1], 2)
        assert await harness.requests.begin(make_request()) is stream
        assert await harness.requests.resume(KEY) is stream
        workers[1].go.set()
        assert tokens_of(await until_ended(stream)) == answer(PROMPT, 5)
        assert len(workers[0].prefills) == 1


async def test_an_equal_request_waits_for_admission_with_the_first(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers, max_active=1) as harness:
        workers[1].script.pause_at = 2
        before = await harness.requests.begin(make_request("before"))
        both = [asyncio.ensure_future(harness.requests.begin(make_request())) for _ in range(2)]
        await until(lambda: harness.router.admission.waiting == 1)
        both[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await both[0]
        workers[1].go.set()
        await until_ended(before)
        assert tokens_of(await until_ended(await both[1])) == answer(PROMPT, 5), "a reader that stays keeps it"


async def test_an_id_is_good_for_one_payload(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers) as harness:
        workers[1].script.pause_at = 2
        stream = await harness.requests.begin(make_request())
        other = replace(make_request(), payload=pb.GenerateRequest(request_id="r", prompt="other"))
        with pytest.raises(AlreadyExists):
            await harness.requests.begin(other)
        workers[1].go.set()
        await until_ended(stream)
        await until(lambda: harness.store_is_done)
        with pytest.raises(AlreadyExists):
            await harness.requests.begin(other)
        assert harness.router.admission.active == 0


@pytest.mark.parametrize("from_store", [False, True])
async def test_a_finished_request_is_replayed(store: Store, from_store: bool) -> None:
    async with fleet(P, D) as workers, core(store, workers, flush_ms=10) as harness:
        first = await harness.answer(make_request())
        if from_store:
            await until(lambda: harness.store_is_done)
        for again in (await harness.requests.begin(make_request()), await harness.requests.resume(KEY)):
            assert (again is first) is not from_store
            assert (again.outputs[0].tokens, again.end) == (first.outputs[0].tokens, ended_run())
        assert len(workers[0].prefills) == 1
        if from_store:
            assert isinstance(again, RecordedStream)
            record = again.record
            assert record is not None
            assert (record.usage.completion_tokens, record.usage.total_tokens) == (5, 8)
            assert (record.receipt.prefill_worker, record.receipt.decode_worker) == ("p", "d")
            assert record.receipt.e2e_ms > 0


async def test_a_failed_request_is_replayed_with_its_error(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    async with fleet(P, D) as workers, core(store, workers) as harness:
        stream = await begin_paused(harness, workers[1], 2, request=make_request(seconds=8.0))
        jump(monkeypatch, 8.0)
        assert isinstance((await until_ended(stream)).end, DeadlineExceeded)
        await until(lambda: harness.store_is_done)
        again = await harness.requests.resume(KEY)
        assert isinstance(again.end, DeadlineExceeded)
        assert again.outputs[0].tokens == stream.outputs[0].tokens


async def test_a_stream_that_is_resumed_within_its_grace_is_not_cancelled(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers, resume_grace_ms=50) as harness:
        workers[1].script.pause_at = 2
        stream = await harness.requests.begin(make_request())
        other = await harness.requests.begin(make_request("other"))
        await until_written(stream, 2)
        harness.requests.on_disconnect(stream)
        harness.requests.on_disconnect(other)
        assert await harness.requests.resume(KEY) is stream
        assert isinstance((await until_ended(other)).end, Cancelled), "its grace is over, and so would be the first's"
        workers[1].go.set()
        assert tokens_of(await until_ended(stream)) == answer(PROMPT, 5)


async def test_a_detached_request_continues_without_a_reader(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers, resume_grace_ms=0) as harness:
        stream = await begin_paused(harness, workers[1], 2, request=make_request(detach_ms=60_000))
        harness.requests.on_disconnect(stream)
        assert stream.end is None
        workers[1].go.set()
        assert tokens_of(await until_ended(stream)) == answer(PROMPT, 5)


@pytest.mark.rule("detached-request", "router/execution/registry.py:RequestRegistry.on_disconnect")
async def test_a_detached_request_is_cancelled_when_its_time_is_over(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers) as harness:
        stream = await begin_paused(harness, workers[1], 2, request=make_request(detach_ms=50))
        harness.requests.on_disconnect(stream)
        assert isinstance((await until_ended(stream)).end, Cancelled)


@pytest.mark.parametrize("from_store", [False, True])
async def test_a_cancel_may_be_repeated_at_any_time(store: Store, from_store: bool) -> None:
    async with fleet(P, D) as workers, core(store, workers) as harness:
        workers[1].script.pause_at = 2
        stream = await harness.requests.begin(make_request())
        await until_written(stream, 1)
        assert isinstance(await harness.requests.cancel(KEY), Cancelled)
        if from_store:
            await until(lambda: harness.store_is_done)
        assert isinstance(await harness.requests.cancel(KEY), Cancelled)
        workers[1].go.set()
        done = await harness.answer(make_request("done"))
        if from_store:
            await until(lambda: harness.store_is_done)
        assert await harness.requests.cancel(done.request.key) == ended_run()


async def test_get_returns_a_request_from_memory_and_from_the_store(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers) as harness:
        stream = await begin_paused(harness, workers[1], 2)
        await until(lambda: harness.owned("r").state == Generation.STATE_DECODING)
        here = await harness.requests.get(KEY)
        assert (here.stream, here.state, here.expires_in_s) == (stream, Generation.STATE_DECODING, None)
        workers[1].go.set()
        await until_ended(stream)
        just_now = await harness.requests.get(KEY)
        assert just_now.state == Generation.STATE_SUCCEEDED
        assert just_now.expires_in_s is not None
        await until(lambda: harness.store_is_done)
        stored = await harness.requests.get(KEY)
        assert stored.state == Generation.STATE_SUCCEEDED
        assert stored.stream.outputs[0].tokens == stream.outputs[0].tokens
        assert stored.expires_in_s is not None
        assert 0 < stored.expires_in_s <= 3600
        assert [each.state for each in stored.record.transitions] == [1, 2, 3, 4, 5]


async def test_an_unknown_request_is_not_found(server: PrivateRedis, bare: object) -> None:
    workers: list[FakeWorker] = []
    async with make_store(server.url, refill_s=0.0) as store, core(store, workers) as harness:
        for ask in (harness.requests.resume, harness.requests.get, harness.requests.cancel):
            with pytest.raises(NotFound):
                await ask(KEY)
