from __future__ import annotations

import asyncio
from functools import partial

import pytest

from decant.engine.engine import Engine
from decant.engine.output import SequenceFinished, StepOutput
from decant.engine.plan import DeviceMemory
from decant.engine.request import FinishReason
from decant.handoff.errors import HandoffFailed
from decant.handoff.receiver import FetchEnd, TransferResult
from decant.protos import worker_pb2 as wire
from decant.runtime.telemetry.metrics import Registry
from decant.worker.report.metrics import WorkerMetrics
from tests.worker.harness import MODEL, WorkerHarness, make_work, worker
from tests.worker.requests import to_request


def values(registry: Registry) -> dict[str, float]:
    lines = [line.rsplit(" ", 1) for line in registry.text().decode().splitlines() if line.startswith("decant_")]
    return {name.removeprefix("decant_"): float(value) for name, value in lines}


async def take(harness: WorkerHarness, receiver: WorkerHarness, name: str) -> None:
    work = make_work(30, 4)
    call = harness.ask(work, request=f"t/{name}")
    ticket = await call.expect("ticket")
    await call.expect("first")
    await receiver.receive(ticket, to_request(name, work, model=MODEL))
    await receiver.written(name)


async def test_prompt_tokens_are_counted_by_where_their_cache_came_from() -> None:
    async with worker() as harness, worker("d") as receiver:
        given, taken = Registry(process=False), Registry(process=False)
        WorkerMetrics(given, harness.host)
        WorkerMetrics(taken, receiver.host)
        await take(harness, receiver, "a")
        await take(harness, receiver, "b")
        found = values(given)
        assert found['prompt_tokens_total{source="local_compute"}'] == 30 + 2
        assert found['prompt_tokens_total{source="local_cache_hit"}'] == 28
        assert found["generation_tokens_total"] == 2
        found = values(taken)
        assert found['prompt_tokens_total{source="local_compute"}'] == 0
        assert found['prompt_tokens_total{source="external_kv_transfer"}'] == 30 + 2
        assert found['prompt_tokens_total{source="local_cache_hit"}'] == 28
        assert (found["generation_tokens_total"], found["handoff_seconds_count"]) == (6, 2)
        assert found["handoff_bytes_sum"] == (8 + 1) * harness.host.transfer_layout.block_bytes


async def test_a_fetched_run_that_is_cancelled_before_its_first_step_changes_no_count_of_a_later_one() -> None:
    async with worker("d") as receiver:
        registry = Registry(process=False)
        metrics = WorkerMetrics(registry, receiver.host)
        request = to_request("a", make_work(30, 4), model=MODEL)
        arrival = await receiver.host.loop.call(lambda engine: engine.transfers.reserve(request))
        outcome = TransferResult((), received_bytes=0, opened_at=0.0, owned_at=0.0)
        receiver.host.receiver.fetches.publish(arrival)
        receiver.host.receiver.fetch_ends.publish(FetchEnd(arrival, outcome))
        await receiver.host.loop.call(lambda _: arrival.abort())
        cancelled = SequenceFinished("a", FinishReason.CANCELLED, arrival.sequence.timeline)
        metrics._on_step(StepOutput(1, tokens=[], prompt_logprobs=[], filled=[], parked=[], ended=[cancelled]))
        await receiver.host.loop.call(lambda engine: engine.add(request))
        await receiver.written("a")
        assert values(registry)['prompt_tokens_total{source="local_compute"}'] == 30


async def test_a_failed_handoff_is_counted_by_its_cause() -> None:
    async with worker() as harness, worker("d") as receiver:
        registry = Registry(process=False)
        WorkerMetrics(registry, receiver.host)
        work = make_work(30, 4)
        gone = wire.Ticket(
            id=b"unknown", sender=harness.host.peer, address=harness.address, layout_hash=harness.host.layout_hash
        )
        with pytest.raises(HandoffFailed):
            await receiver.receive(gone, to_request("late", work, model=MODEL))
        found = values(registry)
        assert found['handoff_failures_total{cause="lease_expired"}'] == 1
        assert found["handoff_seconds_count"] == 0


async def test_gauges_follow_the_engine() -> None:
    async with worker(blocks=128) as harness:
        registry = Registry(process=False)
        WorkerMetrics(registry, harness.host)
        assert values(registry)['worker_info{model="m",role="prefill"}'] == 1
        harness.device.hold()
        requests = [to_request(f"r{seed}", make_work(30, 4, seed=seed), model=MODEL) for seed in range(9)]

        def add_all(engine: Engine) -> None:
            for request in requests:
                engine.add(request)

        await harness.host.loop.call(add_all)
        sample = asyncio.create_task(harness.host.sample_load())
        await asyncio.sleep(0)  # it is posted: it runs after the first step
        harness.device.let(1)
        await sample
        found = values(registry)
        assert found["requests_running"] >= 1
        assert found["requests_waiting"] >= 1
        assert found["queued_prompt_tokens"] == 9 * 30 - 16
        assert 0 < found["kv_cache_usage_ratio"] <= 1
        harness.device.go_on()
        for request in requests:
            await harness.written(request.id)
        await harness.host.sample_load()
        assert values(registry)["requests_waiting"] == values(registry)["queued_prompt_tokens"] == 0
        call = harness.ask(make_work(30, 4))
        await call.expect("ticket")
        await harness.host.sample_load()
        assert values(registry)["handoff_leases"] == 1
        await call.break_off()


async def test_preemptions_are_counted() -> None:
    async with worker("d", blocks=16, role=wire.ROLE_DECODE) as harness:
        registry = Registry(process=False)
        WorkerMetrics(registry, harness.host)
        for seed in range(3):
            request = to_request(f"r{seed}", make_work(12, 30, seed=seed), model=MODEL)
            await harness.host.loop.call(partial(Engine.add, request=request))
        for seed in range(3):
            assert len(await harness.written(f"r{seed}")) == 30
        await harness.host.sample_load()
        assert values(registry)["preemptions_total"] == harness.engine.load().preemptions > 0


async def test_memory_of_a_gpu_is_read_when_metrics_are() -> None:
    async with worker() as harness:
        plain, registry = Registry(process=False), Registry(process=False)
        WorkerMetrics(plain, harness.host)
        assert values(plain)["device_memory_total_bytes"] == 0
        free = [60]
        harness.host.device_memory = lambda: DeviceMemory(free[-1], 80)
        WorkerMetrics(registry, harness.host)
        assert values(registry)["device_memory_used_bytes"] == 20
        free.append(10)
        found = values(registry)
        assert (found["device_memory_used_bytes"], found["device_memory_total_bytes"]) == (70, 80)
