from __future__ import annotations

from datetime import UTC, datetime

import pytest

from decant.protos import inference_pb2 as pb
from decant.protos import worker_pb2 as wire
from decant.protos.inference_pb2 import Generation
from decant.router.request.token_stream import RecordedStream, TokenStream
from decant.runtime.error_details import Reason, ResumePoint
from decant.runtime.errors import Aborted, Cancelled, Unavailable
from decant.state import keys
from decant.state.errors import StoreUnavailable
from decant.state.ids import Incarnation, RequestKey
from decant.state.owned import OwnedRequest
from decant.state.store import Store
from tests.router.fake_script import answer
from tests.router.fake_worker import FakeWorker, fleet
from tests.router.harness import (
    D,
    P,
    begin_paused,
    core,
    make_request,
    pass_on,
    raising,
    tokens_of,
    until,
    until_ended,
    until_written,
)

PROMPT = [1, 2, 3]
KEY = RequestKey("default", "r")


def lose_runs(worker: FakeWorker) -> None:
    for run in worker.runs.values():
        assert run.task is not None
        run.task.cancel()
    worker.runs.clear()


async def test_another_router_takes_over_where_it_runs(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers) as one:
        first = await begin_paused(one, workers[1], 3, is_stored=True)
        async with core(store, workers) as two:
            second = await two.requests.resume(KEY)
            assert isinstance((await until_ended(first)).end, Aborted)
            workers[1].go.set()
            assert tokens_of(await until_ended(second)) == answer(PROMPT, 5)
            assert (len(workers[1].adopts), len(workers[1].starts)) == (1, 1), "nothing is begun again"
            assert two.router.metrics.adopted.labels("m")._value.get() == 1
            await until(lambda: two.store_is_done)
            found = await store.requests.read(KEY)
            assert (found.epoch, found.attempt, found.state) == (2, 1, Generation.STATE_SUCCEEDED)
            assert [entry.token for entry in found.entries] == second.outputs[0].tokens


async def test_a_request_without_a_worker_continues_from_its_stored_tokens(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers) as one:
        await begin_paused(one, workers[1], 3, is_stored=True)
        async with core(store, workers) as two:
            lose_runs(workers[1])
            second = await two.requests.resume(KEY)
            pass_on(workers[1], 4)
            await until_written(second, 4)
            workers[1].go.set()
            assert tokens_of(await until_ended(second)) == answer(PROMPT, 5)
            await one.requests.close()
            await until(lambda: one.store_is_done and two.store_is_done)
            found = await store.requests.read(KEY)
            assert (found.epoch, found.attempt, found.state) == (2, 2, Generation.STATE_SUCCEEDED)


async def test_another_router_cancels_it_where_it_runs(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers) as one:
        first = await begin_paused(one, workers[1], 3, is_stored=True)
        async with core(store, workers) as two:
            assert isinstance(await two.requests.cancel(KEY), Cancelled)
            await until(lambda: workers[1].cancels)
            assert (workers[1].cancels[0].run.epoch, workers[1].cancels[0].run.attempt) == (2, 1)
            assert isinstance(await two.requests.cancel(KEY), Cancelled)
            await until(lambda: two.store_is_done)
            assert (await store.requests.read(KEY)).state == Generation.STATE_CANCELLED
            workers[1].go.set()
            assert isinstance((await until_ended(first)).end, Cancelled), "and not superseded: it has no other reader"


async def test_a_cancel_at_another_router_ends_the_stream_as_cancelled(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers) as harness:
        stream = await begin_paused(harness, workers[1], 3, is_stored=True)
        await store.requests.cancel(KEY, Incarnation("other", 1))
        pass_on(workers[1], 4)
        assert isinstance((await until_ended(stream)).end, Cancelled)


@pytest.mark.parametrize(("epoch", "reason"), [(2, Reason.OWNER_CHANGED), (1, Reason.SUPERSEDED)])
async def test_without_redis_the_epoch_decides_whether_a_client_may_resume(
    store: Store, monkeypatch: pytest.MonkeyPatch, epoch: int, reason: Reason
) -> None:
    """Only a client's stream begins an epoch that a worker already runs; a greater epoch is a takeover's."""
    async with fleet(P, D) as workers, core(store, workers, flush_ms=10_000) as harness:
        stream = await begin_paused(harness, workers[1], 3)
        with monkeypatch.context() as patch:
            patch.setattr(store.requests, "read", raising(StoreUnavailable("away")))
            (run,) = workers[1].runs.values()
            workers[1]._send(wire.WorkerMessage(superseded=wire.Superseded(run=run.run, epoch=epoch)), run)
            error = (await until_ended(stream)).end
            assert isinstance(error, Aborted)
            assert error.reason is reason


@pytest.mark.rule(
    "former-owner-ends-its-stream",
    "router/execution/execution.py:Execution.on_superseded",
    "router/execution/execution.py:Execution._owned_elsewhere",
)
@pytest.mark.parametrize("resumed_by_client", [False, True], ids=["taken over", "resumed elsewhere"])
@pytest.mark.parametrize("notified_by", ["worker", "store"])
async def test_a_stream_ends_with_a_reason_to_resume_unless_a_newer_stream_took_the_request(
    store: Store, notified_by: str, resumed_by_client: bool
) -> None:
    flush_ms = 10 if notified_by == "store" else 10_000
    async with fleet(P, D) as workers, core(store, workers, flush_ms=flush_ms) as harness:
        stream = await begin_paused(harness, workers[1], 3)
        await store.requests.adopt(KEY, Incarnation("other", 1), None if resumed_by_client else 1)
        if notified_by == "worker":
            (run,) = workers[1].runs.values()
            workers[1]._send(wire.WorkerMessage(superseded=wire.Superseded(run=run.run, epoch=2)), run)
        else:
            pass_on(workers[1], until=4)
        error = (await until_ended(stream)).end
        assert isinstance(error, Aborted)
        if resumed_by_client:
            assert (error.reason, error.resume) == (Reason.SUPERSEDED, None)
        else:
            assert (error.reason, error.resume) == (Reason.OWNER_CHANGED, ResumePoint(0, len(stream.outputs[0].tokens)))
        assert (await store.requests.read(KEY)).owner == Incarnation("other", 1)


async def test_a_takeover_before_the_first_token_is_answered_as_unavailable(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers) as harness:
        workers[0].script.prefill_pause = True
        stream = await harness.requests.begin(make_request())
        await store.requests.adopt(KEY, Incarnation("other", 1), 1)
        harness.owned("r").transition(Generation.STATE_PREFILLING, datetime.now(UTC))
        error = (await until_ended(stream)).end
        assert isinstance(error, Unavailable)
        assert error.reason is Reason.OWNER_CHANGED
        workers[0].go.set()


@pytest.mark.rule("former-owner-forwards-a-cancel", "router/execution/registry.py:RequestRegistry.cancel")
async def test_a_former_owner_cancels_a_request_at_its_new_owner(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers, flush_ms=10_000) as harness:
        await begin_paused(harness, workers[1], 3)
        await store.requests.adopt(KEY, Incarnation("other", 1))
        assert isinstance(await harness.requests.cancel(KEY), Cancelled)
        found = await store.requests.read(KEY)
        assert (found.epoch, found.state) == (3, Generation.STATE_CANCELLED), "the owner learns it too"


SHOWN = pb.ResponseOptions(logprobs=2, prompt_logprobs=1)


def has_prompt_logprobs(stream: TokenStream) -> bool:
    prompt = [found.logprob for found in stream.prompt_logprobs]
    output = [(found.logprob, list(found.top_ids)) for found in stream.outputs[0].logprobs]
    return prompt == [-1, -2] and output == [(-token, [token, token + 1]) for token in stream.outputs[0].tokens]


async def stored_prompt_logprobs(owned: OwnedRequest) -> None:
    """Wait for the prompt's logprobs: they come over another connection than the tokens."""
    await until(lambda: owned.has_prompt_logprobs and not owned.needs_write)


@pytest.mark.rule("logprobs-with-tokens", "state/logprobs.py:Logprobs", "state/lua/request_write.lua")
@pytest.mark.parametrize("holder_is_there", [True, False])
async def test_logprobs_go_along_to_another_router(store: Store, holder_is_there: bool) -> None:
    async with fleet(P, D) as workers, core(store, workers) as one:
        first = await begin_paused(one, workers[1], 3, request=make_request(shown=SHOWN), is_stored=True)
        await stored_prompt_logprobs(one.owned("r"))
        seen = (await one.requests.get(KEY)).stream
        assert has_prompt_logprobs(seen)
        async with core(store, workers) as two:
            if not holder_is_there:
                lose_runs(workers[1])
            assert has_prompt_logprobs((await two.requests.get(KEY)).stream)
            second = await two.requests.resume(KEY)
            assert second.outputs[0].tokens[:3] == first.outputs[0].tokens, "no token is waited for that is written"
            assert has_prompt_logprobs(second)
            if not holder_is_there:
                pass_on(workers[1], 4)
                await until_written(second, 4)
            workers[1].go.set()
            assert tokens_of(await until_ended(second)) == answer(PROMPT, 5)
            assert has_prompt_logprobs(second)
            await one.requests.close()
            await until(lambda: one.store_is_done and two.store_is_done)
        again = await one.requests.resume(KEY)
        assert isinstance(again, RecordedStream)
        assert len(again.outputs[0].tokens) == 5
        assert has_prompt_logprobs(again)


async def test_a_prompt_whose_logprobs_were_lost_with_their_router_is_computed_again(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers) as one:
        await begin_paused(one, workers[1], 3, request=make_request(shown=SHOWN), is_stored=True)
        await stored_prompt_logprobs(one.owned("r"))
        await store._client.execute("HDEL", keys.request(KEY), "prompt_logprobs")
        async with core(store, workers) as two:
            second = await two.requests.resume(KEY)
            pass_on(workers[1], 4)
            await until_written(second, 4)
            workers[1].go.set()
            assert tokens_of(await until_ended(second)) == answer(PROMPT, 5)
            assert has_prompt_logprobs(second)
