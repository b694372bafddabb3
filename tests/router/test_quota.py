"""Quotas with long leases: what is free again was given back, not expired."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
import redis as sync_redis

from decant.protos import inference_pb2 as pb
from decant.protos import worker_pb2 as wire
from decant.runtime.error_details import Reason
from decant.runtime.errors import AlreadyExists, Cancelled, DeadlineExceeded, QueueFull, QuotaExceeded, Unavailable
from decant.state import keys
from decant.state.errors import StoreUnavailable
from decant.state.ids import RequestKey
from decant.state.private_redis import PrivateRedis
from decant.state.quota import Quotas, TenantLimits
from decant.state.store import Store
from tests.router.fake_script import answer
from tests.router.fake_worker import FakeWorker, fleet
from tests.router.harness import Core, begin_paused, core, jump, make_request, tokens_of, until, until_ended
from tests.state.factories import make_store
from tests.state.test_every_operation import CommandRecorder

P, D = ("p", wire.ROLE_PREFILL), ("d", wire.ROLE_DECODE)
PROMPT = [1, 2, 3]
KEY = RequestKey("default", "r")
ONE = {"default": TenantLimits(in_flight=1)}

EndRequest = Callable[[Core, list[FakeWorker]], Awaitable[object]]


@pytest.fixture
async def store(server: PrivateRedis, bare: sync_redis.Redis) -> AsyncIterator[Store]:
    async with make_store(server.url, quota_lease_s=600.0) as made:
        yield made


@pytest.fixture
def at_work(bare: Any) -> Callable[[], set[str]]:
    return lambda: {id.decode() for id in bare.zrange(keys.quota("default")[0], 0, -1)}


async def test_requests_beyond_the_quota_are_refused_until_one_ends(
    store: Store, at_work: Callable[[], set[str]]
) -> None:
    async with fleet(P, D) as workers, core(store, workers, quotas=ONE) as harness:
        workers[1].script.pause_at = 2
        first = await harness.requests.begin(make_request())
        with pytest.raises(QuotaExceeded) as refusal:
            await harness.requests.begin(make_request("another"))
        error = refusal.value
        assert (error.field, error.limit, error.value) == ("in_flight", "at most 1", "2")
        assert error.detail.subject == "default"
        assert (error.retry_after or 0) > 0
        assert await harness.requests.begin(make_request()) is first, "it is the same request"
        others = await harness.requests.begin(make_request("r", key=RequestKey("other", "r")))
        workers[1].go.set()
        for stream in (first, others):
            assert tokens_of(await until_ended(stream)) == answer(PROMPT, 5)
        await until(lambda: not at_work())
        assert tokens_of(await harness.answer(make_request("another"))) == answer(PROMPT, 5)


async def test_the_minute_is_charged_for_what_was_used(store: Store, at_work: Callable[[], set[str]]) -> None:
    minute = {"default": TenantLimits(tokens_per_minute=100)}
    async with fleet(P, D) as workers, core(store, workers, quotas=minute) as harness:
        await begin_paused(harness, workers[1], 2, request=make_request(max_tokens=80))
        with pytest.raises(QuotaExceeded) as refusal:
            await harness.requests.begin(make_request("next", max_tokens=80))
        assert refusal.value.field == "tokens_per_minute"
        await harness.requests.cancel(KEY)
        await until(lambda: not at_work())
        following = await harness.requests.begin(make_request("next", max_tokens=80))
        await harness.requests.cancel(following.request.key)


async def test_a_tenant_without_limits_costs_no_command(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    async with fleet(P, D) as workers, core(store, workers, quotas={"other": TenantLimits(in_flight=1)}) as harness:
        recorder = CommandRecorder(monkeypatch)
        await harness.answer(make_request())
        await until(lambda: harness.store_is_done)
        sent = {command.script.name for trip in recorder.take() for command in trip if command.script}
        assert sent
        assert not {name for name in sent if name.startswith("quota")}


async def test_a_call_that_needs_no_worker_counts_for_the_quota_while_it_runs(
    store: Store, at_work: Callable[[], set[str]]
) -> None:
    async with fleet(P, D) as workers, core(store, workers, quotas=ONE) as harness:
        async with harness.requests.hold_quota("default"):
            assert len(at_work()) == 1
            with pytest.raises(QuotaExceeded):
                await harness.requests.begin(make_request())
            with pytest.raises(QuotaExceeded):
                async with harness.requests.hold_quota("default"):
                    pytest.fail("it is beyond the share")
            async with harness.requests.hold_quota("other"):
                pass
        assert not at_work(), "the tenant's next call finds its place free"
        with pytest.raises(ZeroDivisionError):
            async with harness.requests.hold_quota("default"):
                raise ZeroDivisionError
        assert not at_work()
        assert tokens_of(await harness.answer(make_request())) == answer(PROMPT, 5)


async def by_itself(harness: Core, workers: list[FakeWorker]) -> None:
    workers[1].go.set()


async def by_cancel(harness: Core, workers: list[FakeWorker]) -> None:
    assert isinstance(await harness.requests.cancel(KEY), Cancelled)


async def by_its_client(harness: Core, workers: list[FakeWorker]) -> None:
    harness.requests.on_disconnect(await harness.requests.resume(KEY))


async def by_its_workers(harness: Core, workers: list[FakeWorker]) -> None:
    workers[1].script.fails_at = [3] * 99
    workers[1].go.set()


@pytest.mark.rule("end-frees-quota", "router/admission/quota.py:QuotaLeases.release", "state/lua/quota_release.lua")
@pytest.mark.parametrize("end_request", [by_itself, by_cancel, by_its_client, by_its_workers])
async def test_a_request_leaves_the_quota_however_it_ends(
    store: Store, at_work: Callable[[], set[str]], end_request: EndRequest
) -> None:
    async with fleet(P, D) as workers, core(store, workers, quotas=ONE, resume_grace_ms=10) as harness:
        stream = await begin_paused(harness, workers[1], 2)
        assert at_work() == {"r"}
        await end_request(harness, workers)
        await until_ended(stream)
        await until(lambda: not at_work())


async def test_a_request_leaves_the_quota_at_its_deadline(
    store: Store, at_work: Callable[[], set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(P, D) as workers, core(store, workers, quotas=ONE) as harness:
        workers[1].script.pause_at = 2
        stream = await harness.requests.begin(make_request(seconds=8.0))
        assert at_work() == {"r"}
        jump(monkeypatch, 8.0)
        assert isinstance((await until_ended(stream)).end, DeadlineExceeded)
        await until(lambda: not at_work())


async def test_a_request_refused_before_it_runs_does_not_count_for_the_quota(
    store: Store, at_work: Callable[[], set[str]]
) -> None:
    quotas = {"default": TenantLimits(in_flight=9)}
    async with (
        fleet(P, D) as workers,
        core(store, workers, quotas=quotas, max_active=1, queue_limit=1, flush_ms=10) as harness,
    ):
        done = await harness.answer(make_request("done"))
        await until(lambda: harness.store_is_done)
        other = replace(make_request("done"), payload=pb.GenerateRequest(request_id="done", prompt="other"))
        with pytest.raises(AlreadyExists):
            await harness.requests.begin(other)
        replayed = await harness.requests.begin(make_request("done"))
        assert replayed.outputs[0].tokens == done.outputs[0].tokens, "replayed"
        workers[1].script.pause_at = 2
        await harness.requests.begin(make_request())
        waiting = asyncio.ensure_future(harness.requests.begin(make_request("waits")))
        await until(lambda: harness.router.admission.waiting == 1)
        assert at_work() == {"r", "waits"}, "a waiting request counts too"
        with pytest.raises(QueueFull):
            await harness.requests.begin(make_request("one too many"))
        waiting.cancel()
        await until(lambda: at_work() == {"r"})
        workers[1].go.set()
        await until(lambda: not at_work())


async def test_a_request_cancelled_while_its_quota_is_acquired_does_not_count(
    store: Store, at_work: Callable[[], set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    acquire, acquired = Quotas.acquire, asyncio.Event()

    async def slow(*arguments: Any) -> bool:
        await acquire(*arguments)
        acquired.set()
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(Quotas, "acquire", slow)
    async with fleet(P, D) as workers, core(store, workers, quotas=ONE) as harness:
        call = asyncio.ensure_future(harness.requests.begin(make_request()))
        await acquired.wait()
        assert at_work() == {"r"}
        call.cancel()
        await until(lambda: not at_work())


@pytest.mark.rule(
    "quotas-over-all-routers", "router/admission/quota.py:QuotaLeases.acquire", "state/lua/quota_acquire.lua"
)
async def test_a_request_counts_once_wherever_it_goes(store: Store, at_work: Callable[[], set[str]]) -> None:
    async with fleet(P, D) as workers, core(store, workers, quotas=ONE) as one:
        first = await begin_paused(one, workers[1], 2, is_stored=True)
        async with core(store, workers, id="two", quotas=ONE) as two:
            second = await two.requests.begin(make_request())
            assert at_work() == {"r"}
            await until_ended(first)
            with pytest.raises(QuotaExceeded):
                await one.requests.begin(make_request("another"))
            assert at_work() == {"r"}, "its former owner released nothing"
            workers[1].go.set()
            assert tokens_of(await until_ended(second)) == answer(PROMPT, 5)
            await until(lambda: not at_work())


async def test_a_cancel_at_another_router_removes_the_request_from_the_quota(
    store: Store, at_work: Callable[[], set[str]]
) -> None:
    async with fleet(P, D) as workers, core(store, workers, quotas=ONE) as one:
        first = await begin_paused(one, workers[1], 2)
        async with core(store, workers, id="two", quotas=ONE) as two:
            assert isinstance(await two.requests.cancel(KEY), Cancelled)
            await until(lambda: not at_work())
        await until_ended(first)


async def test_requests_left_by_a_drain_still_count_for_the_quota(
    store: Store, at_work: Callable[[], set[str]]
) -> None:
    async with fleet(P, D) as workers:
        async with core(store, workers, quotas=ONE) as one:
            first = await begin_paused(one, workers[1], 2)
            await one.requests.drain(0)
            assert (await until_ended(first)).end is not None
        assert at_work() == {"r"}
        async with core(store, workers, id="two", quotas=ONE, resume_grace_ms=60_000) as two:
            await two.requests.take_over(KEY)
            assert at_work() == {"r"}
            workers[1].go.set()
            await until(lambda: not at_work())


@pytest.mark.rule(
    "no-quota-without-redis",
    "router/admission/quota.py:QuotaLeases.acquire",
    "router/admission/quota.py:QuotaLeases.hold",
)
async def test_without_redis_no_quota_applies_and_all_requests_count_afterwards(
    store: Store, at_work: Callable[[], set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail_with_outage(*_: object) -> bool:
        raise StoreUnavailable("away")

    async with fleet(P, D) as workers, core(store, workers, quotas=ONE, flush_ms=10_000) as harness:
        workers[1].script.pause_at = 2
        await harness.requests.begin(make_request())
        with monkeypatch.context() as patch:
            patch.setattr(Quotas, "acquire", fail_with_outage)
            await harness.requests.begin(make_request("second"))
        with monkeypatch.context() as patch:
            patch.setattr(harness.router.journal_writer, "is_unavailable", True)
            third = await harness.requests.begin(make_request("third"))
        assert not third.resumable
        await until(lambda: at_work() == {"r", "second", "third"})
        workers[1].go.set()
        await until(lambda: not at_work())


async def test_a_router_that_requires_redis_refuses_requests_without_it(
    store: Store, at_work: Callable[[], set[str]]
) -> None:
    async with fleet(P, D) as workers, core(store, workers, quotas=ONE, serve_without_redis=False) as harness:
        harness.router.journal_writer.is_unavailable = True
        with pytest.raises(Unavailable) as refusal:
            await harness.requests.begin(make_request())
        assert refusal.value.reason is Reason.STATE_STORE_UNAVAILABLE
        assert not at_work()


async def test_quota_leases_are_renewed_and_restored_in_an_emptied_redis(
    server: PrivateRedis, bare: sync_redis.Redis, at_work: Callable[[], set[str]]
) -> None:
    async with (
        make_store(server.url, quota_lease_s=1.0) as store,
        fleet(P, D) as workers,
        core(store, workers, quotas=ONE) as harness,
    ):
        await begin_paused(harness, workers[1], 2)
        bare.delete(*keys.quota("default"))
        await until(lambda: at_work() == {"r"})
        lease = bare.zscore(keys.quota("default")[0], "r")
        await until(lambda: bare.zscore(keys.quota("default")[0], "r") != lease)
        workers[1].go.set()
        await until(lambda: not at_work())
