"""Prompts that are computed alone, over fake workers: which worker, what fails, and what is left behind."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from decant.protos import worker_pb2 as wire
from decant.router.api.validation import salt_of
from decant.router.prompt_runs.prompt_run import ComputedPrompt
from decant.router.prompt_runs.runner import AT_ONCE, PromptBatch, PromptRunner
from decant.router.timings import RouterTimings, WorkerTimings
from decant.runtime.connections.channel import Deadline
from decant.runtime.error_details import Reason
from decant.runtime.errors import DeadlineExceeded, InvalidArgument, NotFound, QuotaExceeded, Unavailable
from decant.runtime.packed import pack
from decant.state.quota import TenantLimits
from decant.state.store import Store
from tests.router.fake_script import MODEL
from tests.router.fake_worker import FakeWorker, fleet
from tests.router.harness import P2, Core, D, P, core, jump, until

PROMPT = [7, 8, 9]


def engine_request(tokens: list[int], **more: Any) -> wire.EngineRequest:
    return wire.EngineRequest(
        model=MODEL,
        prompt=pack(tokens),
        outputs=[wire.OutputPrefix()],
        sampling=wire.Sampling(top_p=1.0, repetition_penalty=1.0),
        stopping=wire.Stopping(max_tokens=1),
        salt=salt_of("default", ""),
        **more,
    )


def scores(count: int = 3, seconds: float | None = 60.0) -> PromptBatch:
    requests = [
        engine_request([*PROMPT, 20 + index, 30], prompt_logprobs=0, prompt_logprobs_from=len(PROMPT))
        for index in range(count)
    ]
    return PromptBatch("default", requests, 3 + 2 * count, 0, Deadline.after(seconds), shares_first=True)


def embeddings(count: int = 3, seconds: float | None = 60.0) -> PromptBatch:
    embedding = wire.Embedding(pooling=wire.Embedding.POOLING_MEAN, dimensions=2)
    requests = [engine_request([5] * (index + 1), embedding=embedding) for index in range(count)]
    return PromptBatch("default", requests, 6, 0, Deadline.after(seconds))


def adapted(name: str) -> PromptBatch:
    batch = embeddings()
    for request in batch.requests:
        request.adapter = f"{name}'s"
    return replace(batch, adapter_name=name)


async def accepted() -> None:
    pass


async def run(harness: Core, batch: PromptBatch) -> list[ComputedPrompt]:
    return await PromptRunner(harness.router).run(batch, accepted)


def values(computed: list[ComputedPrompt]) -> list[tuple[float, ...]]:
    return [struct.unpack("<2f", each.embedding) for each in computed]


async def test_scores_are_those_of_the_continuations_and_embeddings_of_each_input(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers) as harness:
        computed = await run(harness, scores())
        assert [[entry.logprob for entry in each.logprobs] for each in computed] == [[-3, -4]] * 3
        assert values(await run(harness, embeddings())) == [(1, 2), (2, 2), (3, 2)]
        calls = workers[0].prefills
        assert len(calls) == 6
        assert not workers[1].prefills, "decode workers compute none while a prefill worker is there"
        assert not any(call.handoff for call in calls)
        assert len({(call.run.request, call.run.attempt) for call in calls}) == 6
        assert len({call.run.request for call in calls}) == 2, "a call is one request to its workers"
        assert all(0 < call.engine_request.remaining_ms <= 60_000 for call in calls)


async def test_without_a_prefill_worker_a_decode_worker_computes_prompts(store: Store) -> None:
    async with fleet(D) as workers, core(store, workers) as harness:
        assert values(await run(harness, embeddings(1))) == [(1, 2)]


async def test_prompts_with_an_adapter_go_to_workers_that_have_it(store: Store) -> None:
    timings = RouterTimings(workers=WorkerTimings(no_worker_timeout_s=0.05))
    async with fleet(P, P2, D) as workers:
        workers[1].registration.adapters.add(name="pirate", digest="pirate's", rank=8)
        async with core(store, workers, timings=timings) as harness:
            await run(harness, adapted("pirate"))
            with pytest.raises(NotFound) as missing:
                await run(harness, adapted("poet"))
            assert str(missing.value) == "adapter: one of pirate, got poet"
            assert [len(worker.prefills) for worker in workers] == [0, 3, 0]
            workers[1].script.refuse = [wire.CAUSE_UNKNOWN_ADAPTER] * 10  # it has dropped it
            with pytest.raises(NotFound, match="adapter: not found, got pirate"):
                await run(harness, adapted("pirate"))


async def test_a_prompt_ends_if_its_adapter_is_refused_whenever_its_worker_is_listed(store: Store) -> None:
    async with fleet(P) as workers, core(store, workers) as harness:
        workers[0].script.refuse = [wire.CAUSE_UNKNOWN_ADAPTER] * 1000
        running = asyncio.create_task(run(harness, adapted("pirate")))
        for number in range(1000):
            if running.done():
                break
            del workers[0].registration.adapters[:]
            workers[0].registration.adapters.add(name="pirate", digest="pirate's")
            workers[0].registration.adapters.add(name="other", digest=str(number))
            await store.workers.register(workers[0].registration)
            await asyncio.sleep(0.01)
        with pytest.raises(NotFound, match="got pirate"):
            await asyncio.wait_for(running, 0)


async def test_continuations_follow_the_first_to_its_worker(store: Store) -> None:
    async with fleet(P, P2, D) as workers, core(store, workers) as harness:
        await run(harness, scores(12))
        assert sorted(len(worker.prefills) for worker in workers) == [0, 0, 12]


@pytest.mark.parametrize("batch", [scores, embeddings])
async def test_a_prompt_whose_worker_fails_is_computed_at_another(
    store: Store, batch: Callable[[], PromptBatch]
) -> None:
    async with fleet(P, P2, D) as workers, core(store, workers) as harness:
        for worker in workers[:2]:
            worker.script.prefill_fails_before_ticket = 1
        assert len(await run(harness, batch())) == 3
        assert sum(len(worker.prefills) for worker in workers) == 5


async def test_a_prompt_of_a_lost_worker_is_computed_at_another(store: Store) -> None:
    async with fleet(P, P2, D) as workers, core(store, workers) as harness:
        for worker in workers[:2]:
            worker.script.prefill_pause = True
        running = asyncio.create_task(run(harness, scores()))
        await until(lambda: workers[0].prefilling or workers[1].prefilling)
        lost, other = (workers[0], workers[1]) if workers[0].prefilling else (workers[1], workers[0])
        other.script.prefill_pause = False
        await lost.stop()
        assert len(await running) == 3
        assert len(other.prefills) == 3


async def test_a_refusal_for_capacity_costs_no_attempt(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers, attempts=1) as harness:
        workers[0].script.refuse = [wire.CAUSE_BUSY]
        assert len(await run(harness, embeddings(1))) == 1
        assert len(workers[0].prefills) == 2


async def test_after_the_last_attempt_the_call_ends_with_workers_lost(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers, attempts=2) as harness:
        for worker in workers:
            worker.script.prefill_fails_before_ticket = 9
        with pytest.raises(Unavailable) as caught:
            await run(harness, scores())
        assert caught.value.reason is Reason.WORKERS_LOST
        assert sum(len(worker.prefills) for worker in workers) == 2


async def test_a_worker_without_embeddings_is_passed_over(store: Store) -> None:
    async with fleet(P, P2) as workers, core(store, workers) as harness:
        workers[0].script.returns_no_embedding = True
        assert values(await run(harness, embeddings(4))) == [(1, 2), (2, 2), (3, 2), (4, 2)]


async def test_a_field_that_a_worker_refuses_ends_the_call_by_name(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers) as harness:
        workers[0].script.refuse = [wire.CAUSE_INVALID]
        workers[0].script.violation = wire.Violation(field="dimensions", limit="at most 64", value="99")
        with pytest.raises(InvalidArgument, match="dimensions: at most 64, got 99"):
            await run(harness, embeddings(1))
        assert len(workers[0].prefills) == 1


@pytest.mark.parametrize("end", ["cancel", "deadline", "failure"])
async def test_nothing_is_left_of_a_call_that_ends_early(
    store: Store, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    quotas = {"default": TenantLimits(1, 1000)}
    async with fleet(P, D) as workers, core(store, workers, quotas=quotas) as harness:
        worker: FakeWorker = workers[0]
        worker.script.first_pause = True
        running = asyncio.create_task(run(harness, embeddings(40, 1000.0)))
        await until(lambda: worker.prefilling == AT_ONCE)
        if end == "cancel":
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running
        elif end == "failure":
            await worker.stop()
            workers[1].script.refuse = [wire.CAUSE_UNSUPPORTED]
            with suppress(Exception):
                await running
        else:
            jump(monkeypatch, 2000.0)
            with pytest.raises(DeadlineExceeded):
                await running
        await until(lambda: not worker.prefilling)
        assert harness.router.admission.active == 0
        assert not harness.router.quota_leases._held


async def test_a_call_counts_its_tokens_in_the_quota_of_its_tenant(store: Store) -> None:
    quotas = {"default": TenantLimits(tokens_per_minute=16)}
    async with fleet(P, D) as workers, core(store, workers, quotas=quotas) as harness:
        await run(harness, scores())  # 9 tokens
        with pytest.raises(QuotaExceeded):
            await run(harness, scores())
        assert len(workers[0].prefills) == 3
