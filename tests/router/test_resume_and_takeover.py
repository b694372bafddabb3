"""A request that is known is come back to: where it runs, where it ran, and through the store, always to one answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from decant.protos import inference_pb2 as pb
from decant.protos import worker_pb2 as wire
from decant.protos.inference_pb2 import Generation
from decant.protos.state_pb2 import RequestRecord
from decant.router.recovery.takeover import OrphanRecovery
from decant.router.request.reader_lease import wait_for_resume_point
from decant.router.request.token_stream import TokenStream
from decant.router.timings import TakeoverTimings
from decant.runtime.background import BackgroundTask
from decant.runtime.error_details import Reason, ResumePoint
from decant.runtime.errors import Aborted, AlreadyExists, Cancelled, DeadlineExceeded, NotFound, OutOfRange, Unavailable
from decant.runtime.peer import new_peer
from decant.state import keys
from decant.state.errors import OwnerAlive, StoreUnavailable
from decant.state.ids import Incarnation, RequestKey
from decant.state.journal import Entry
from decant.state.keys import Ttls
from decant.state.owned import OwnedRequest
from decant.state.private_redis import PrivateRedis
from decant.state.store import Store
from decant.state.store_instance import StoreInstance
from tests.router.fake_worker import LAYOUT, MODEL, FakeWorker, answer, fleet
from tests.router.harness import PATIENCE, Core, core, ended, ended_run, make_request, tokens_of, until, written
from tests.router.test_registry import pass_on
from tests.state.factories import make_store, router_facts

TIMINGS = TakeoverTimings()
P, D = ("p", wire.ROLE_PREFILL), ("d", wire.ROLE_DECODE)
PROMPT = [1, 2, 3]
KEY = RequestKey("default", "r")


async def test_an_equal_request_attaches_to_the_one_that_runs(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers) as scene:
        workers[1].script.pause_at = 2
        stream = await scene.dispatcher.begin(make_request())
        await written(stream, 2)
        assert await scene.dispatcher.begin(make_request()) is stream
        assert await scene.dispatcher.resume(KEY) is stream
        workers[1].go.set()
        assert tokens_of(await ended(stream)) == answer(PROMPT, 5)
        assert len(workers[0].prefills) == 1


async def test_an_equal_request_waits_for_admission_with_the_first(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers, max_active=1) as scene:
        workers[1].script.pause_at = 2
        before = await scene.dispatcher.begin(make_request("before"))
        both = [asyncio.ensure_future(scene.dispatcher.begin(make_request())) for _ in range(2)]
        await until(lambda: scene.router.admission.waiting == 1)
        both[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await both[0]
        workers[1].go.set()
        await ended(before)
        assert tokens_of(await ended(await both[1])) == answer(PROMPT, 5), "one who stays keeps it"


async def test_an_id_is_good_for_one_payload(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers) as scene:
        workers[1].script.pause_at = 2
        stream = await scene.dispatcher.begin(make_request())
        other = replace(make_request(), payload=pb.GenerateRequest(request_id="r", prompt="other"))
        with pytest.raises(AlreadyExists):
            await scene.dispatcher.begin(other)
        workers[1].go.set()
        await ended(stream)
        await until(lambda: scene.store_is_done)
        with pytest.raises(AlreadyExists):
            await scene.dispatcher.begin(other)
        assert scene.router.admission.active == 0


@pytest.mark.parametrize("from_store", [False, True])
async def test_what_succeeded_is_replayed(store: Store, from_store: bool) -> None:
    async with fleet(P, D) as workers, core(store, workers, flush_ms=10) as scene:
        first = await scene.answer(make_request())
        if from_store:
            await until(lambda: scene.store_is_done)
        for again in (await scene.dispatcher.begin(make_request()), await scene.dispatcher.resume(KEY)):
            assert (again is first) is not from_store
            assert (again.tokens, again.end) == (first.tokens, ended_run())
        assert len(workers[0].prefills) == 1
        if from_store:
            record = again.recorded
            assert record is not None
            assert (record.usage.completion_tokens, record.usage.total_tokens) == (5, 8)
            assert (record.receipt.prefill_worker, record.receipt.decode_worker) == ("p", "d")
            assert record.receipt.e2e_ms > 0


async def test_what_failed_is_replayed_with_its_error(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers) as scene:
        workers[1].script.pause_at = 2
        stream = await scene.dispatcher.begin(make_request(seconds=0.5))
        assert isinstance((await ended(stream)).end, DeadlineExceeded)
        await until(lambda: scene.store_is_done)
        again = await scene.dispatcher.resume(KEY)
        assert isinstance(again.end, DeadlineExceeded)
        assert again.tokens == stream.tokens


async def test_a_stream_that_is_resumed_within_its_grace_is_not_cancelled(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers, resume_grace_ms=50) as scene:
        workers[1].script.pause_at = 2
        stream = await scene.dispatcher.begin(make_request())
        other = await scene.dispatcher.begin(make_request("other"))
        await written(stream, 2)
        scene.dispatcher.on_disconnect(stream)
        scene.dispatcher.on_disconnect(other)
        assert await scene.dispatcher.resume(KEY) is stream
        assert isinstance((await ended(other)).end, Cancelled), "its grace is over, and so would be the first's"
        workers[1].go.set()
        assert tokens_of(await ended(stream)) == answer(PROMPT, 5)


async def test_a_detached_request_goes_on_without_a_reader(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers, resume_grace_ms=0) as scene:
        workers[1].script.pause_at = 2
        stream = await scene.dispatcher.begin(make_request(detach_ms=60_000))
        await written(stream, 2)
        scene.dispatcher.on_disconnect(stream)
        assert stream.end is None
        workers[1].go.set()
        assert tokens_of(await ended(stream)) == answer(PROMPT, 5)


async def test_a_detached_request_is_cancelled_when_its_time_is_over(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers) as scene:
        workers[1].script.pause_at = 2
        stream = await scene.dispatcher.begin(make_request(detach_ms=50))
        await written(stream, 2)
        scene.dispatcher.on_disconnect(stream)
        assert isinstance((await ended(stream)).end, Cancelled)


@pytest.mark.parametrize("from_store", [False, True])
async def test_a_cancel_may_be_repeated_at_any_time(store: Store, from_store: bool) -> None:
    async with fleet(P, D) as workers, core(store, workers) as scene:
        workers[1].script.pause_at = 2
        stream = await scene.dispatcher.begin(make_request())
        await written(stream, 1)
        assert isinstance(await scene.dispatcher.cancel(KEY), Cancelled)
        if from_store:
            await until(lambda: scene.store_is_done)
        assert isinstance(await scene.dispatcher.cancel(KEY), Cancelled)
        workers[1].go.set()
        done = await scene.answer(make_request("done"))
        if from_store:
            await until(lambda: scene.store_is_done)
        assert await scene.dispatcher.cancel(done.request.key) == ended_run()


async def test_how_a_request_stands_is_told_here_and_from_the_store(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers) as scene:
        workers[1].script.pause_at = 2
        stream = await scene.dispatcher.begin(make_request())
        await written(stream, 2)
        await until(lambda: scene.owned("r").state == Generation.STATE_DECODING)
        here = await scene.dispatcher.get(KEY)
        assert (here.stream, here.state, here.expires_in_s) == (stream, Generation.STATE_DECODING, None)
        workers[1].go.set()
        await ended(stream)
        just_now = await scene.dispatcher.get(KEY)
        assert just_now.state == Generation.STATE_SUCCEEDED
        assert just_now.expires_in_s is not None
        await until(lambda: scene.store_is_done)
        stored = await scene.dispatcher.get(KEY)
        assert stored.state == Generation.STATE_SUCCEEDED
        assert stored.stream.tokens == stream.tokens
        assert stored.expires_in_s is not None
        assert 0 < stored.expires_in_s <= 3600
        assert [each.state for each in stored.record.transitions] == [1, 2, 3, 4, 5]


async def test_what_nobody_knows_is_not_found(server: PrivateRedis, bare: object) -> None:
    workers: list[FakeWorker] = []
    async with make_store(server.url, refill_s=0.0) as store, core(store, workers) as scene:
        for ask in (scene.dispatcher.resume, scene.dispatcher.get, scene.dispatcher.cancel):
            with pytest.raises(NotFound):
                await ask(KEY)


# ---------------------------------------------------------------------------------------------- on another router


def lose_runs(worker: FakeWorker) -> None:
    for run in worker.runs.values():
        assert run.task is not None
        run.task.cancel()
    worker.runs.clear()


async def test_another_router_takes_over_where_it_runs(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers) as one:
        workers[1].script.pause_at = 3
        first = await one.dispatcher.begin(make_request())
        await written(first, 3)
        await until(lambda: one.owned("r").synced_entries == 3)
        async with core(store, workers) as two:
            second = await two.dispatcher.resume(KEY)
            assert isinstance((await ended(first)).end, Aborted)
            workers[1].go.set()
            assert tokens_of(await ended(second)) == answer(PROMPT, 5)
            assert (len(workers[1].adopts), len(workers[1].starts)) == (1, 1), "nothing is begun again"
            await until(lambda: two.store_is_done)
            found = await store.requests.read(KEY)
            assert (found.epoch, found.attempt, found.state) == (2, 1, Generation.STATE_SUCCEEDED)
            assert [entry.token for entry in found.entries] == second.tokens


async def test_what_no_worker_has_any_more_goes_on_from_what_is_written(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers) as one:
        workers[1].script.pause_at = 3
        first = await one.dispatcher.begin(make_request())
        await written(first, 3)
        await until(lambda: one.owned("r").synced_entries == 3)
        async with core(store, workers) as two:
            lose_runs(workers[1])
            second = await two.dispatcher.resume(KEY)
            pass_on(workers[1], 4)
            await written(second, 4)
            workers[1].go.set()
            assert tokens_of(await ended(second)) == answer(PROMPT, 5)
            await one.dispatcher.close()
            await until(lambda: one.store_is_done and two.store_is_done)
            found = await store.requests.read(KEY)
            assert (found.epoch, found.attempt, found.state) == (2, 2, Generation.STATE_SUCCEEDED)


async def test_another_router_cancels_it_where_it_runs(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers) as one:
        workers[1].script.pause_at = 3
        first = await one.dispatcher.begin(make_request())
        await written(first, 3)
        await until(lambda: one.owned("r").synced_entries == 3)
        async with core(store, workers) as two:
            assert isinstance(await two.dispatcher.cancel(KEY), Cancelled)
            await until(lambda: workers[1].cancels)
            assert (workers[1].cancels[0].run.epoch, workers[1].cancels[0].run.attempt) == (2, 1)
            assert isinstance(await two.dispatcher.cancel(KEY), Cancelled)
            await until(lambda: two.store_is_done)
            assert (await store.requests.read(KEY)).state == Generation.STATE_CANCELLED
            workers[1].go.set()
            assert isinstance((await ended(first)).end, Cancelled), "and not superseded: nobody else reads it"


async def test_who_learns_from_the_store_that_it_was_cancelled_elsewhere_says_so(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers) as scene:
        workers[1].script.pause_at = 3
        stream = await scene.dispatcher.begin(make_request())
        await written(stream, 3)
        await until(lambda: scene.owned("r").synced_entries == 3)
        await store.requests.cancel(KEY, Incarnation("other", 1))
        pass_on(workers[1], 4)
        assert isinstance((await ended(stream)).end, Cancelled)


@pytest.mark.parametrize(("epoch", "reason"), [(2, Reason.OWNER_CHANGED), (1, Reason.SUPERSEDED)])
async def test_while_the_store_is_away_the_epoch_says_whether_a_client_may_resume(
    store: Store, monkeypatch: pytest.MonkeyPatch, epoch: int, reason: Reason
) -> None:
    """Only a client's stream begins an epoch that runs already at a worker; a greater epoch is a takeover's."""
    async with fleet(P, D) as workers, core(store, workers, flush_ms=10_000) as scene:
        workers[1].script.pause_at = 3
        stream = await scene.dispatcher.begin(make_request())
        await written(stream, 3)
        with monkeypatch.context() as patch:
            patch.setattr(store.requests, "read", raising(StoreUnavailable("away")))
            (run,) = workers[1].runs.values()
            workers[1]._say(wire.WorkerMessage(superseded=wire.Superseded(run=run.run, epoch=epoch)), run)
            error = (await ended(stream)).end
            assert isinstance(error, Aborted)
            assert error.reason is reason


@pytest.mark.parametrize("resumed_by_client", [False, True], ids=["taken over", "resumed elsewhere"])
@pytest.mark.parametrize("notified_by", ["worker", "store"])
async def test_a_stream_ends_with_a_reason_to_resume_unless_a_newer_stream_took_the_request(
    store: Store, notified_by: str, resumed_by_client: bool
) -> None:
    flush_ms = 10 if notified_by == "store" else 10_000
    async with fleet(P, D) as workers, core(store, workers, flush_ms=flush_ms) as scene:
        workers[1].script.pause_at = 3
        stream = await scene.dispatcher.begin(make_request())
        await written(stream, 3)
        await store.requests.adopt(KEY, Incarnation("other", 1), None if resumed_by_client else 1)
        if notified_by == "worker":
            (run,) = workers[1].runs.values()
            workers[1]._say(wire.WorkerMessage(superseded=wire.Superseded(run=run.run, epoch=2)), run)
        else:
            pass_on(workers[1], until=4)
        error = (await ended(stream)).end
        assert isinstance(error, Aborted)
        if resumed_by_client:
            assert (error.reason, error.resume) == (Reason.SUPERSEDED, None)
        else:
            assert (error.reason, error.resume) == (Reason.OWNER_CHANGED, ResumePoint(0, len(stream.tokens)))
        assert (await store.requests.read(KEY)).owner == Incarnation("other", 1)


async def test_a_takeover_before_the_first_token_is_answered_as_unavailable(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers) as scene:
        workers[0].script.prefill_pause = True
        stream = await scene.dispatcher.begin(make_request())
        await store.requests.adopt(KEY, Incarnation("other", 1), 1)
        scene.owned("r").transition(Generation.STATE_PREFILLING, datetime.now(UTC))
        error = (await ended(stream)).end
        assert isinstance(error, Unavailable)
        assert error.reason is Reason.OWNER_CHANGED
        workers[0].go.set()


async def test_who_owns_it_no_longer_cancels_it_where_it_is_owned(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers, flush_ms=10_000) as scene:
        workers[1].script.pause_at = 3
        stream = await scene.dispatcher.begin(make_request())
        await written(stream, 3)
        await store.requests.adopt(KEY, Incarnation("other", 1))
        assert isinstance(await scene.dispatcher.cancel(KEY), Cancelled)
        found = await store.requests.read(KEY)
        assert (found.epoch, found.state) == (3, Generation.STATE_CANCELLED), "the owner learns it too"


# ------------------------------------------------------------------------------- what failed before its first token


def raising(error: Exception) -> Any:
    async def raises(*_: object, **__: object) -> None:
        raise error

    return raises


async def failed_at_once(scene: Core, worker: FakeWorker, id: str = "r") -> TokenStream:
    worker.script.prefill_fails_before_ticket += 1
    stream = await scene.answer(make_request(id))
    assert isinstance(stream.end, Unavailable)
    assert not stream.tokens
    return stream


@pytest.mark.parametrize("from_store", [False, True])
async def test_what_failed_before_its_first_token_is_tried_again_under_its_id(store: Store, from_store: bool) -> None:
    async with fleet(P, D) as workers, core(store, workers, attempts=1) as scene:
        old = await failed_at_once(scene, workers[0])
        if from_store:
            await until(lambda: scene.store_is_done)
        for stream in ((await scene.dispatcher.get(KEY)).stream, await scene.dispatcher.resume(KEY)):
            assert isinstance(stream.end, Unavailable), "until somebody asks for it again, it has failed"
        new = await scene.answer(make_request())
        assert new is not old
        assert tokens_of(new) == answer(PROMPT, 5)
        await until(lambda: scene.store_is_done)
        found = await store.requests.read(KEY)
        assert (found.epoch, found.attempt, found.state) == (2, 1, Generation.STATE_SUCCEEDED)
        assert [prefill.run.epoch for prefill in workers[0].prefills] == [1, 2]
        assert (await scene.answer(make_request())).tokens == new.tokens
        assert len(workers[0].prefills) == 2, "what ended well is replayed"


async def test_another_payload_does_not_get_the_id_of_one_that_failed(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers, attempts=1) as scene:
        await failed_at_once(scene, workers[0])
        other = replace(make_request(), payload=pb.GenerateRequest(request_id="r", prompt="other"))
        for _ in range(2):
            with pytest.raises(AlreadyExists):
                await scene.dispatcher.begin(other)
            await until(lambda: scene.store_is_done)


async def test_of_two_routers_that_try_again_at_once_one_begins_and_the_other_attaches(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers, attempts=1) as one, core(store, workers) as two:
        for id in "abcde":
            await failed_at_once(one, workers[0], id)
            await until(lambda: one.store_is_done)
            streams = await asyncio.gather(*(scene.dispatcher.begin(make_request(id)) for scene in (one, two)))
            for stream in streams:
                end = (await ended(stream)).end
                if isinstance(end, Aborted):
                    assert end.reason is Reason.SUPERSEDED
                else:
                    assert tokens_of(stream) == answer(PROMPT, 5)
            assert not all(isinstance(stream.end, Aborted) for stream in streams)
            await until(lambda: one.store_is_done and two.store_is_done)
            found = await store.requests.read(KEY._replace(id=id))
            assert found.state == Generation.STATE_SUCCEEDED
            assert found.epoch in (2, 3), "one began anew, and at most one took over from it"


async def test_while_the_store_is_away_the_newer_one_of_two_is_written_last(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(P, D) as workers, core(store, workers, attempts=1) as scene:
        with monkeypatch.context() as patch:
            for name in ("flush", "accept", "read"):
                patch.setattr(store.requests, name, raising(StoreUnavailable("away")))
            await failed_at_once(scene, workers[0])
            new = await scene.answer(make_request())
            assert tokens_of(new) == answer(PROMPT, 5)
        await until(lambda: scene.store_is_done)
        found = await store.requests.read(KEY)
        assert (found.epoch, found.state, found.length) == (2, Generation.STATE_SUCCEEDED, 5)
        assert tokens_of(new), "and is not superseded by the older one"


async def test_a_look_from_another_router_takes_nothing_over(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers) as one:
        workers[1].script.pause_at = 3
        first = await one.dispatcher.begin(make_request())
        await written(first, 3)
        await until(lambda: one.owned("r").synced_entries == 3)
        async with core(store, workers) as two:
            seen = await two.dispatcher.get(KEY)
            assert (seen.stream.tokens, seen.stream.end) == (first.tokens, None)
            assert (seen.state, seen.expires_in_s) == (Generation.STATE_DECODING, None)
        await until(lambda: len(workers[1]._outs) == 1)
        workers[1].go.set()
        assert tokens_of(await ended(first)) == answer(PROMPT, 5)


# ------------------------------------------------------------------------------------------------------ logprobs

SHOWN = pb.ResponseOptions(logprobs=2, prompt_logprobs=1)


def has_prompt_logprobs(stream: TokenStream) -> bool:
    """Every token of it, and of the prompt, has the logprobs that a worker gave it."""
    prompt = [found.logprob for found in stream.prompt_logprobs]
    output = [(found.logprob, list(found.top_ids)) for found in stream.logprobs]
    return prompt == [-1, -2] and output == [(-token, [token, token + 1]) for token in stream.tokens]


@pytest.mark.parametrize("holder_is_there", [True, False])
async def test_logprobs_go_along_to_another_router(store: Store, holder_is_there: bool) -> None:
    async with fleet(P, D) as workers, core(store, workers) as one:
        workers[1].script.pause_at = 3
        first = await one.dispatcher.begin(make_request(shown=SHOWN))
        await written(first, 3)
        await until(lambda: one.owned("r").synced_entries == 3)
        seen = (await one.dispatcher.get(KEY)).stream
        assert has_prompt_logprobs(seen)
        async with core(store, workers) as two:
            if not holder_is_there:
                lose_runs(workers[1])
            assert has_prompt_logprobs((await two.dispatcher.get(KEY)).stream)
            second = await two.dispatcher.resume(KEY)
            assert second.tokens[:3] == first.tokens, "no token is waited for that is written"
            assert has_prompt_logprobs(second)
            if not holder_is_there:
                pass_on(workers[1], 4)
                await written(second, 4)
            workers[1].go.set()
            assert tokens_of(await ended(second)) == answer(PROMPT, 5)
            assert has_prompt_logprobs(second)
            await one.dispatcher.close()
            await until(lambda: one.store_is_done and two.store_is_done)
        again = await one.dispatcher.resume(KEY)
        assert again.recorded is not None
        assert len(again.tokens) == 5
        assert has_prompt_logprobs(again)


async def test_a_prompt_whose_logprobs_were_lost_with_their_router_is_read_again(store: Store) -> None:
    """The worker that goes on with the tokens has told them, and tells them once."""
    async with fleet(P, D) as workers, core(store, workers) as one:
        workers[1].script.pause_at = 3
        first = await one.dispatcher.begin(make_request(shown=SHOWN))
        await written(first, 3)
        await until(lambda: one.owned("r").synced_entries == 3)
        await store._client.execute("HDEL", keys.request(KEY), "prompt_logprobs")
        async with core(store, workers) as two:
            second = await two.dispatcher.resume(KEY)
            pass_on(workers[1], 4)
            await written(second, 4)
            workers[1].go.set()
            assert tokens_of(await ended(second)) == answer(PROMPT, 5)
            assert has_prompt_logprobs(second)


async def left_behind(store: Store, *tokens: int, layout: int | None = None, **asked: Any) -> None:
    """A request whose router is not registered, and has written so much of it. With ``layout`` it ran at a worker of
    such a one that promised equal bits, or none with 0; that one is gone too."""
    request = make_request(**asked)
    record = RequestRecord(model=MODEL, seed=4, prompt_tokens=3)
    if layout is not None:
        record.attempts.add(attempt=1, decode_worker=new_peer("lost"), layout=layout)
    owned = OwnedRequest.begin(KEY, Incarnation("gone", 1), request.payload, record, datetime.now(UTC))
    await store.requests.accept(owned)
    owned.append(Entry(0, token) for token in tokens)
    owned.transition(Generation.STATE_DECODING, datetime.now(UTC))
    await store.requests.write(owned)


@asynccontextmanager
async def watching(
    store: Store,
    scene: Core,
    refill_s: float = 0.0,
    registration_s: float = 0.2,
    is_connected: Callable[[Incarnation], bool] = lambda _: False,
    timings: TakeoverTimings = TIMINGS,
) -> AsyncIterator[None]:
    """The router is registered and takes over what others leave. What it takes for a registration's time is short."""
    incarnation, ttls = Incarnation.of(scene.router.peer), Ttls(refill_s=refill_s, registration_s=registration_s)
    store.instance = StoreInstance(store._client, ttls)
    registration = await store.routers.register(router_facts(incarnation))
    takeover = OrphanRecovery(store, scene.dispatcher, incarnation, is_connected, ttls, timings)
    try:
        async with BackgroundTask("takeover", takeover.run):
            yield
    finally:
        await registration.remove()


async def test_what_a_router_left_behind_is_gone_on_with_once(store: Store) -> None:
    await left_behind(store, *answer(PROMPT, 2))
    async with fleet(P, D) as workers, core(store, workers) as one, core(store, workers) as two:
        async with watching(store, one), watching(store, two):
            await until(lambda: workers[1].starts)
            owner = one if KEY in one.dispatcher.executions.open else two
            stream = await owner.dispatcher.resume(KEY)
            assert tokens_of(await ended(stream)) == answer(PROMPT, 5)
            assert len(workers[1].starts) == 1
            await until(lambda: one.store_is_done and two.store_is_done)
        found = await store.requests.read(KEY)
        assert (found.epoch, found.attempt, found.state) == (2, 2, Generation.STATE_SUCCEEDED)
        assert await store.open.of(Incarnation("gone", 1)) == set()


async def test_what_is_taken_over_and_read_by_nobody_ends_with_its_grace(store: Store) -> None:
    await left_behind(store, *answer(PROMPT, 2))
    async with fleet(P, D) as workers, core(store, workers, resume_grace_ms=100) as scene:
        workers[1].script.pause_at = 3
        async with watching(store, scene):
            await until(lambda: scene.dispatcher.executions.running)
            await until(lambda: not scene.dispatcher.executions.running and scene.store_is_done)
        assert (await store.requests.read(KEY)).state == Generation.STATE_CANCELLED


async def test_nobody_is_gone_until_those_that_live_had_the_time_to_say_so(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Routers write their requests to an emptied Redis before they are registered there again."""
    orphaned, looks = store.open.orphaned, []

    async def looked() -> set[Incarnation]:
        looks.append((await store.instance.current()).refill_left_s)
        return await orphaned()

    monkeypatch.setattr(store.open, "orphaned", looked)
    workers: list[FakeWorker] = []
    async with core(store, workers) as scene, watching(store, scene, refill_s=1.0):
        await until(lambda: looks)
    assert looks[0] == 0


async def test_a_living_routers_requests_are_its_own(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers) as one, core(store, workers) as two:
        workers[1].script.pause_at = 2
        async with watching(store, one):
            stream = await one.dispatcher.begin(make_request())
            await written(stream, 2)
            await until(lambda: one.owned("r").synced_entries == 2)
            with pytest.raises(OwnerAlive):
                await two.dispatcher.take_over(KEY)
        workers[1].go.set()
        assert tokens_of(await ended(stream)) == answer(PROMPT, 5)


# ------------------------------------------------------------------- a client that has more than is written of it


async def begun_behind(stream: TokenStream, after_seq: int) -> None:
    async with asyncio.timeout(PATIENCE):
        await wait_for_resume_point(stream, after_seq)


async def test_a_tail_that_comes_out_the_same_again_is_gone_on_with(store: Store) -> None:
    await left_behind(store, *answer(PROMPT, 2), layout=LAYOUT)
    async with fleet(P, D) as workers, core(store, workers) as scene:
        workers[1].script.pause_at = 3
        stream = await scene.dispatcher.resume(KEY)
        waiting = asyncio.create_task(begun_behind(stream, 4))
        await until(lambda: len(stream.tokens) == 3)
        assert not waiting.done(), "he has token 4 already, and lacks what comes after it"
        workers[1].go.set()
        await waiting
        assert tokens_of(await ended(stream)) == answer(PROMPT, 5)


@pytest.mark.parametrize("alike", [True, False])
async def test_of_one_that_was_just_accepted_the_tail_is_what_all_workers_write(store: Store, alike: bool) -> None:
    await left_behind(store, layout=None)
    async with fleet(P, D) as workers:
        workers[0].facts.equal_bits = alike
        async with core(store, workers) as scene:
            stream = await scene.dispatcher.resume(KEY)
            if alike:
                await begun_behind(stream, 4)
            else:
                await refused_behind(stream, 4, certain=0)
            assert tokens_of(await ended(stream)) == answer(PROMPT, 5)


@pytest.mark.parametrize("layout", [None, 0, LAYOUT + 1])
async def test_a_tail_that_may_come_out_otherwise_is_refused_with_what_is_certain(
    store: Store, layout: int | None
) -> None:
    """Nobody knows where it ran; it ran where equal bits aren't promised; it ran on another kind of worker."""
    await left_behind(store, *answer(PROMPT, 2), layout=layout)
    async with fleet(P, D) as workers, core(store, workers) as scene:
        workers[1].script.pause_at = 3
        stream = await scene.dispatcher.resume(KEY)
        await refused_behind(stream, 4, certain=2)
        await written(stream, 3)
        await refused_behind(stream, 3, certain=2)
        await begun_behind(stream, 2)
        workers[1].go.set()
        assert tokens_of(await ended(stream)) == answer(PROMPT, 5)
        await begun_behind(stream, 4)


async def refused_behind(stream: TokenStream, after_seq: int, *, certain: int) -> None:
    with pytest.raises(Aborted) as caught:
        await begun_behind(stream, after_seq)
    assert (caught.value.reason, caught.value.fault.resume) == (Reason.TAIL_UNCERTAIN, ResumePoint(0, certain))


async def test_one_worker_that_promises_nothing_is_enough_to_refuse(store: Store) -> None:
    await left_behind(store, *answer(PROMPT, 2), layout=LAYOUT)
    async with fleet(P, D) as workers:
        workers[1].facts.equal_bits = False
        async with core(store, workers) as scene:
            stream = await scene.dispatcher.resume(KEY)
            await refused_behind(stream, 4, certain=2)
            await ended(stream)


@pytest.mark.parametrize("is_read", [False, True])
async def test_what_is_uncertain_stays_so_in_the_store_until_somebody_reads_it_anew(
    store: Store, is_read: bool
) -> None:
    await left_behind(store, *answer(PROMPT, 2), layout=0)
    async with fleet(P, D) as workers, core(store, workers) as scene:
        workers[1].script.pause_at = 4
        stream = await scene.dispatcher.resume(KEY)
        await written(stream, 4)
        if is_read:
            await begun_behind(stream, 0)
        await until(lambda: scene.owned("r").synced_entries == 4)
        workers[1].go.set()
        await ended(stream)
        await until(lambda: scene.store_is_done)
        again = await scene.dispatcher.resume(KEY)
        assert again.recorded is not None
        if is_read:
            await begun_behind(again, 4)
        else:
            await refused_behind(again, 4, certain=2)
            await begun_behind(again, 2)


async def test_what_was_uncertain_to_one_router_is_to_the_next(store: Store) -> None:
    await left_behind(store, *answer(PROMPT, 2), layout=0)
    async with fleet(P, D) as workers, core(store, workers) as one, core(store, workers) as two:
        workers[1].script.pause_at = 4
        stream = await one.dispatcher.resume(KEY)
        await written(stream, 4)
        await until(lambda: one.owned("r").synced_entries == 4)
        stream = await two.dispatcher.resume(KEY)
        await refused_behind(stream, 3, certain=2)
        workers[1].go.set()
        await ended(stream)


async def test_a_routers_own_next_attempt_goes_on_from_what_it_has_shown(store: Store) -> None:
    """The tokens that were shown are the next worker's input, whatever it promises."""
    async with fleet(P, D, ("e", wire.ROLE_DECODE)) as workers:
        for worker in workers:
            worker.facts.equal_bits = False
        workers[1].script.fails_at = workers[2].script.fails_at = [3]
        async with core(store, workers) as scene:
            stream = await scene.answer(make_request())
            assert tokens_of(stream) == answer(PROMPT, 5)
            assert stream.path.attempts > 1
            await begun_behind(stream, 4)


async def test_who_waits_for_a_tail_hears_how_the_request_ended(store: Store) -> None:
    await left_behind(store, *answer(PROMPT, 2), layout=LAYOUT)
    async with fleet(P, D) as workers, core(store, workers) as scene:
        workers[1].script.pause_at = 3
        stream = await scene.dispatcher.resume(KEY)
        waiting = asyncio.create_task(begun_behind(stream, 4))
        await until(lambda: len(stream.tokens) == 3)
        await scene.dispatcher.cancel(KEY)
        with pytest.raises(Cancelled):
            await waiting


async def test_nobody_has_more_than_was_ever_written(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers) as scene:
        stream = await scene.answer(make_request())
        with pytest.raises(OutOfRange):
            await begun_behind(stream, 6)
