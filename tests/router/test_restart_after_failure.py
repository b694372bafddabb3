from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from decant.protos import inference_pb2 as pb
from decant.protos.inference_pb2 import Generation
from decant.router.request.token_stream import TokenStream
from decant.runtime.error_details import Reason
from decant.runtime.errors import Aborted, AlreadyExists, Unavailable
from decant.state.errors import StoreUnavailable
from decant.state.ids import RequestKey
from decant.state.store import Store
from tests.router.fake_script import answer
from tests.router.fake_worker import FakeWorker, fleet
from tests.router.harness import (
    Core,
    D,
    P,
    begin_paused,
    core,
    make_request,
    raising,
    tokens_of,
    until,
    until_ended,
)

PROMPT = [1, 2, 3]
KEY = RequestKey("default", "r")


async def failed_at_once(harness: Core, worker: FakeWorker, id: str = "r") -> TokenStream:
    worker.script.prefill_fails_before_ticket += 1
    stream = await harness.answer(make_request(id))
    assert isinstance(stream.end, Unavailable)
    assert not stream.outputs[0].tokens
    return stream


@pytest.mark.rule(
    "restart-after-failure", "state/lua/request_accept.lua", "router/execution/registry.py:RequestRegistry.begin"
)
@pytest.mark.parametrize("from_store", [False, True])
async def test_a_request_that_failed_before_its_first_token_may_be_retried(store: Store, from_store: bool) -> None:
    async with fleet(P, D) as workers, core(store, workers, attempts=1) as harness:
        old = await failed_at_once(harness, workers[0])
        if from_store:
            await until(lambda: harness.store_is_done)
        for stream in ((await harness.requests.get(KEY)).stream, await harness.requests.resume(KEY)):
            assert isinstance(stream.end, Unavailable), "it has failed until a client requests it again"
        new = await harness.answer(make_request())
        assert new is not old
        assert tokens_of(new) == answer(PROMPT, 5)
        await until(lambda: harness.store_is_done)
        found = await store.requests.read(KEY)
        assert (found.epoch, found.attempt, found.state) == (2, 1, Generation.STATE_SUCCEEDED)
        assert [prefill.run.epoch for prefill in workers[0].prefills] == [1, 2]
        assert (await harness.answer(make_request())).outputs[0].tokens == new.outputs[0].tokens
        assert len(workers[0].prefills) == 2, "what ended well is replayed"


async def test_another_payload_does_not_get_the_id_of_one_that_failed(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers, attempts=1) as harness:
        await failed_at_once(harness, workers[0])
        other = replace(make_request(), payload=pb.GenerateRequest(request_id="r", prompt="other"))
        for _ in range(2):
            with pytest.raises(AlreadyExists):
                await harness.requests.begin(other)
            await until(lambda: harness.store_is_done)


async def test_of_two_concurrent_retries_one_starts_and_the_other_attaches(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers, attempts=1) as one, core(store, workers) as two:
        for id in "abcde":
            await failed_at_once(one, workers[0], id)
            await until(lambda: one.store_is_done)
            streams = await asyncio.gather(*(harness.requests.begin(make_request(id)) for harness in (one, two)))
            for stream in streams:
                end = (await until_ended(stream)).end
                if isinstance(end, Aborted):
                    assert end.reason is Reason.SUPERSEDED
                else:
                    assert tokens_of(stream) == answer(PROMPT, 5)
            assert not all(isinstance(stream.end, Aborted) for stream in streams)
            await until(lambda: one.store_is_done and two.store_is_done)
            found = await store.requests.read(KEY._replace(id=id))
            assert found.state == Generation.STATE_SUCCEEDED
            assert found.epoch in (2, 3), "one began anew, and at most one took over from it"


@pytest.mark.slow
async def test_while_the_store_is_unavailable_the_newer_one_of_two_is_written_last(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(P, D) as workers, core(store, workers, attempts=1) as harness:
        with monkeypatch.context() as patch:
            for name in ("flush", "accept", "read"):
                patch.setattr(store.requests, name, raising(StoreUnavailable("away")))
            await failed_at_once(harness, workers[0])
            new = await harness.answer(make_request())
            assert tokens_of(new) == answer(PROMPT, 5)
        await until(lambda: harness.store_is_done)
        found = await store.requests.read(KEY)
        assert (found.epoch, found.state, found.length) == (2, Generation.STATE_SUCCEEDED, 5)
        assert tokens_of(new), "and is not superseded by the older one"


async def test_a_get_at_another_router_does_not_take_the_request_over(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers) as one:
        first = await begin_paused(one, workers[1], 3, is_stored=True)
        async with core(store, workers) as two:
            seen = await two.requests.get(KEY)
            assert (seen.stream.outputs[0].tokens, seen.stream.end) == (first.outputs[0].tokens, None)
            assert (seen.state, seen.expires_in_s) == (Generation.STATE_DECODING, None)
        await until(lambda: len(workers[1]._outs) == 1)
        workers[1].go.set()
        assert tokens_of(await until_ended(first)) == answer(PROMPT, 5)
