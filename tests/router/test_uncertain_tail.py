from __future__ import annotations

import asyncio

import pytest

from decant.protos import worker_pb2 as wire
from decant.router.request.reader_lease import wait_for_resume_point
from decant.router.request.token_stream import RecordedStream, TokenStream
from decant.runtime.error_details import Reason, ResumePoint
from decant.runtime.errors import Aborted, Cancelled, OutOfRange
from decant.state.store import Store
from tests.router.abandoned_requests import KEY, PROMPT, left_behind
from tests.router.fake_script import LAYOUT_HASH, answer
from tests.router.fake_worker import fleet
from tests.router.harness import (
    PATIENCE,
    D,
    P,
    core,
    make_request,
    tokens_of,
    until,
    until_ended,
    until_written,
)


async def resume_behind(stream: TokenStream, after_seq: int) -> None:
    async with asyncio.timeout(PATIENCE):
        await wait_for_resume_point(stream, [after_seq])


async def test_an_equal_tail_is_resumed(store: Store) -> None:
    await left_behind(store, *answer(PROMPT, 2), layout_hash=LAYOUT_HASH)
    async with fleet(P, D) as workers, core(store, workers) as harness:
        workers[1].script.pause_at = 3
        stream = await harness.requests.resume(KEY)
        waiting = asyncio.create_task(resume_behind(stream, 4))
        await until(lambda: len(stream.outputs[0].tokens) == 3)
        assert not waiting.done(), "the reader has token 4 already, and waits for the next"
        workers[1].go.set()
        await waiting
        assert tokens_of(await until_ended(stream)) == answer(PROMPT, 5)


@pytest.mark.parametrize("has_equal_bits", [True, False])
async def test_the_tail_of_a_new_request_is_what_all_workers_generate(store: Store, has_equal_bits: bool) -> None:
    await left_behind(store, layout_hash=None)
    async with fleet(P, D) as workers:
        workers[0].registration.equal_bits = has_equal_bits
        async with core(store, workers) as harness:
            stream = await harness.requests.resume(KEY)
            if has_equal_bits:
                await resume_behind(stream, 4)
            else:
                await refused_behind(stream, 4, certain=0)
            assert tokens_of(await until_ended(stream)) == answer(PROMPT, 5)


@pytest.mark.rule(
    "uncertain-tail",
    "router/attempt/context.py:AttemptContext.mark_uncertain_tail",
    "router/request/reader_lease.py:wait_for_resume_point",
)
@pytest.mark.parametrize("layout_hash", [None, 0, LAYOUT_HASH + 1])
async def test_a_tail_that_may_come_out_otherwise_is_refused_with_what_is_certain(
    store: Store, layout_hash: int | None
) -> None:
    await left_behind(store, *answer(PROMPT, 2), layout_hash=layout_hash)
    async with fleet(P, D) as workers, core(store, workers) as harness:
        workers[1].script.pause_at = 3
        stream = await harness.requests.resume(KEY)
        await refused_behind(stream, 4, certain=2)
        await until_written(stream, 3)
        await refused_behind(stream, 3, certain=2)
        await resume_behind(stream, 2)
        workers[1].go.set()
        assert tokens_of(await until_ended(stream)) == answer(PROMPT, 5)
        await resume_behind(stream, 4)


async def refused_behind(stream: TokenStream, after_seq: int, *, certain: int) -> None:
    with pytest.raises(Aborted) as caught:
        await resume_behind(stream, after_seq)
    assert (caught.value.reason, caught.value.detail.resume) == (Reason.TAIL_UNCERTAIN, ResumePoint(0, certain))


async def test_one_worker_that_promises_nothing_is_enough_to_refuse(store: Store) -> None:
    await left_behind(store, *answer(PROMPT, 2), layout_hash=LAYOUT_HASH)
    async with fleet(P, D) as workers:
        workers[1].registration.equal_bits = False
        async with core(store, workers) as harness:
            stream = await harness.requests.resume(KEY)
            await refused_behind(stream, 4, certain=2)
            await until_ended(stream)


@pytest.mark.parametrize("has_reader", [False, True])
async def test_an_uncertain_tail_stays_uncertain_in_the_store_until_it_is_generated_again(
    store: Store, has_reader: bool
) -> None:
    await left_behind(store, *answer(PROMPT, 2), layout_hash=0)
    async with fleet(P, D) as workers, core(store, workers) as harness:
        workers[1].script.pause_at = 4
        stream = await harness.requests.resume(KEY)
        await until_written(stream, 4)
        if has_reader:
            await resume_behind(stream, 0)
        await until(lambda: harness.owned("r").synced_entries == 4)
        workers[1].go.set()
        await until_ended(stream)
        await until(lambda: harness.store_is_done)
        again = await harness.requests.resume(KEY)
        assert isinstance(again, RecordedStream)
        if has_reader:
            await resume_behind(again, 4)
        else:
            await refused_behind(again, 4, certain=2)
            await resume_behind(again, 2)


async def test_an_uncertain_tail_stays_uncertain_for_the_next_router(store: Store) -> None:
    await left_behind(store, *answer(PROMPT, 2), layout_hash=0)
    async with fleet(P, D) as workers, core(store, workers) as one, core(store, workers) as two:
        workers[1].script.pause_at = 4
        stream = await one.requests.resume(KEY)
        await until_written(stream, 4)
        await until(lambda: one.owned("r").synced_entries == 4)
        stream = await two.requests.resume(KEY)
        await refused_behind(stream, 3, certain=2)
        workers[1].go.set()
        await until_ended(stream)


async def test_the_next_attempt_continues_from_the_tokens_already_sent(store: Store) -> None:
    async with fleet(P, D, ("e", wire.ROLE_DECODE)) as workers:
        for worker in workers:
            worker.registration.equal_bits = False
        workers[1].script.fails_at = workers[2].script.fails_at = [3]
        async with core(store, workers) as harness:
            stream = await harness.answer(make_request())
            assert tokens_of(stream) == answer(PROMPT, 5)
            assert stream.trace.attempts > 1
            await resume_behind(stream, 4)


async def test_a_reader_that_waits_for_a_tail_gets_the_requests_end(store: Store) -> None:
    await left_behind(store, *answer(PROMPT, 2), layout_hash=LAYOUT_HASH)
    async with fleet(P, D) as workers, core(store, workers) as harness:
        workers[1].script.pause_at = 3
        stream = await harness.requests.resume(KEY)
        waiting = asyncio.create_task(resume_behind(stream, 4))
        await until(lambda: len(stream.outputs[0].tokens) == 3)
        await harness.requests.cancel(KEY)
        with pytest.raises(Cancelled):
            await waiting


async def test_a_resume_point_after_the_last_token_is_refused(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers) as harness:
        stream = await harness.answer(make_request())
        with pytest.raises(OutOfRange):
            await resume_behind(stream, 6)
