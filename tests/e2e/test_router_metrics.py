from __future__ import annotations

import asyncio
import json
from pathlib import Path

import grpc
import pytest
import redis as sync_redis

from decant.runtime.telemetry.metrics import ProcessMetrics, RequestMetrics
from decant.state.private_redis import PrivateRedis
from decant.state.store import Store
from docs.generate.metrics import Recorder
from tests.e2e.deployment import PATIENCE_S
from tests.e2e.metrics_page import Totals, read_page, read_totals, until_metric
from tests.e2e.scripted import BOTH, PROMPT, Harness, generate_request, read, scripted
from tests.router.conftest import bare, server, store
from tests.router.fake_script import answer
from tests.router.fake_worker import fleet
from tests.router.test_auth import SECRET, bearer, digest
from tests.router.test_router_process import usable

__all__ = ["bare", "server", "store"]

ELSEWHERE = {
    "decant_prompt_calls_total": "of Score and Embed: tests/router/test_prompt_calls.py",
    "decant_prompt_call_seconds": "the same",
    "decant_adapter_requests_total": "scripted workers have no adapter: tests/router/test_adapters.py",
    "decant_adapter_prompt_tokens_total": "the same",
    "decant_adapter_generation_tokens_total": "the same",
    "decant_kv_event_memory_bytes": "0 without the setting: tests/router/test_kv_event_service.py",
    "decant_kv_event_subscribers": "the same",
    "decant_requests_adopted_total": "needs a second router: tests/router/test_adoption.py",
    "decant_kv_cache_usage_ratio": "scripted workers use no block: tests/router/test_router_process.py",
    "decant_result_bytes": "set every 15 s: tests/router/test_result_memory.py",
    "decant_results": "the same",
    "decant_oldest_result_seconds": "the same",
    "decant_results_discarded_total": "needs more results than Redis may keep: the same",
    "decant_state_store_max_bytes": "this Redis has no limit: the same",
}
ONE_AT_A_TIME = ("--max-active", "1", "--queue-limit", "1", "--admin-port", "0")


def defined_names() -> set[str]:
    recorder = Recorder()
    ProcessMetrics(recorder)
    RequestMetrics(recorder)
    return {metric.name for metric in recorder.defined}


def start(harness: Harness, count: int = 5) -> asyncio.Future[list[int]]:
    call = harness.stub.GenerateStream(generate_request(count), metadata=bearer(SECRET))
    return asyncio.ensure_future(read(call))


async def until_refused(request: asyncio.Future[list[int]]) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await asyncio.wait_for(request, PATIENCE_S)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def answer_one(harness: Harness) -> Totals:
    harness.workers[1].script.fails_at = [2]
    assert len(await start(harness)) == 5
    totals = await until_metric(harness.admin_port, "decant_requests_total", lambda count: count == 1)
    assert totals["decant_failovers_total"] == 1
    assert totals["decant_generation_tokens_total"] == totals["decant_tenant_generation_tokens_total"] == 5
    assert totals["decant_prompt_tokens_total"] == totals["decant_tenant_prompt_tokens_total"] == len(PROMPT)
    return totals


async def check_listed(harness: Harness) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:  # until the decode worker has paused
            page = json.loads(await asyncio.to_thread(read_page, harness.admin_port, "/requests"))
            running, waiting = page["requests"]
            if running["output_tokens"] == 2:
                break
    assert page["total"] == 2
    assert (running["state"], running["output_tokens"], running["decode_worker"]) == ("decoding", 2, "d")
    assert (waiting["state"], waiting["output_tokens"], waiting["decode_worker"]) == ("queued", 0, "")
    assert running["age_s"] >= waiting["age_s"] >= 0
    shown = {"id", "tenant", "model", "state", "age_s", "prompt_tokens", "output_tokens", "attempt"}
    assert running.keys() == shown | {"prefill_worker", "decode_worker"}, "no text"


async def fill_queue(harness: Harness) -> Totals:
    decode = harness.workers[1]
    decode.script.pause_at = 2
    running = start(harness)
    await until_metric(harness.admin_port, "decant_requests_running", lambda count: count == 1)
    waiting = start(harness)
    await until_metric(harness.admin_port, "decant_requests_waiting", lambda count: count == 1)
    await until_refused(start(harness))
    totals = await asyncio.to_thread(read_totals, harness.admin_port)
    assert totals["decant_waiting_prompt_tokens"] == len(PROMPT)
    assert totals["decant_waiting_prompt_seconds"] > 0
    assert totals["decant_oldest_waiting_request_seconds"] > 0
    assert totals["decant_requests_refused_total"] == totals["decant_tenant_requests_refused_total"] == 1
    await check_listed(harness)
    decode.script.pause_at = None
    decode.go.set()
    await asyncio.gather(running, waiting)
    return totals


async def lose_store(harness: Harness, redis: sync_redis.Redis) -> Totals:
    await until_metric(harness.admin_port, "decant_state_store_unwritten_requests", lambda count: count == 0)
    redis.client_pause(60_000, all=False)
    assert len(await start(harness)) == 5
    await until_metric(harness.admin_port, "decant_state_store_available", lambda value: value == 0)
    totals = await until_metric(harness.admin_port, "decant_state_store_unwritten_requests", lambda count: count == 1)
    redis.client_unpause()
    await until_metric(harness.admin_port, "decant_state_store_available", lambda value: value == 1)
    await until_metric(harness.admin_port, "decant_state_store_unwritten_requests", lambda count: count == 0)
    return totals


@pytest.mark.slow
async def test_every_metric_of_a_router_changes(
    server: PrivateRedis, store: Store, bare: sync_redis.Redis, tmp_path: Path
) -> None:
    credentials = tmp_path / "tenants.toml"
    credentials.write_text(f'[tenants.acme]\ntokens = ["{digest(SECRET)}"]\n')
    async with scripted(server, store, *ONE_AT_A_TIME, "--credentials", str(credentials)) as harness:
        pages = [await until_metric(harness.admin_port, "decant_ready_workers", lambda count: count == 2)]
        assert {name for name in pages[0] if name.startswith("decant_")} == defined_names()
        text = await asyncio.to_thread(read_page, harness.admin_port, "/metrics")
        assert 'decant_failovers_total{cause="peer_lost",model="m"} 0.0' in text, "an alert needs an increase from 0"
        pages += [await answer_one(harness), await fill_queue(harness), await lose_store(harness, bare)]
        await harness.workers[0].stop()
        await until_metric(harness.admin_port, "decant_ready_workers", lambda count: count == 1)
    still = {name for name in defined_names() if all(page[name] == 0 for page in pages)}
    assert still == ELSEWHERE.keys()


@pytest.mark.slow
async def test_prompts_that_no_worker_can_take_are_counted(server: PrivateRedis, store: Store) -> None:
    async with scripted(server, store, "--admin-port", "0", pools=()) as harness:
        assert (await asyncio.to_thread(read_totals, harness.admin_port))["decant_known_workers"] == 0
        with pytest.raises(grpc.aio.AioRpcError):
            await harness.stub.Generate(generate_request(5))
        totals = await asyncio.to_thread(read_totals, harness.admin_port)
        assert totals["decant_requests_refused_total"] == 1


async def test_a_request_wakes_a_pool_at_zero_and_is_answered_by_its_first_worker(
    server: PrivateRedis, store: Store
) -> None:
    settings = ("--worker-wait-seconds", "600", "--admin-port", "0")
    async with scripted(server, store, *settings, pools=()) as harness:
        answered = asyncio.ensure_future(read(harness.stream()))
        waiting = await until_metric(harness.admin_port, "decant_requests_waiting", lambda count: count == 1)
        assert waiting["decant_waiting_prompt_seconds"] > 0
        async with fleet(*BOTH) as workers:
            for worker in usable(workers):
                await store.workers.register(worker.registration)
            assert await answered == answer(PROMPT, 5)
            await until_metric(harness.admin_port, "decant_requests_waiting", lambda count: count == 0)


async def test_a_router_that_drains_refuses_the_requests_that_wait_for_a_first_worker(
    server: PrivateRedis, store: Store
) -> None:
    settings = ("--worker-wait-seconds", "600", "--admin-port", "0")
    async with scripted(server, store, *settings, pools=()) as harness:
        call = harness.stream()
        await until_metric(harness.admin_port, "decant_requests_waiting", lambda count: count == 1)
        harness.process.terminate()
        refused = await harness.error_of(read(call))
        assert refused.reason == "DRAINING"
        assert await asyncio.to_thread(harness.process.wait) == 0
