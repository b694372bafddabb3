from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from decant.protos import inference_pb2 as pb
from decant.protos.inference_pb2_grpc import InferenceServiceStub
from decant.runtime.telemetry.metrics import PromptSource
from tests.e2e.deployment import PATIENCE_S, Deployment
from tests.e2e.metrics_page import Totals, read_page, read_totals, totals_of

REFERENCE = (Path(__file__).parents[2] / "docs" / "reference" / "metrics.md").read_text()

NEEDS_TROUBLE = {
    "decant_errors_total",
    "decant_requests_refused_total",
    "decant_tenant_requests_refused_total",
    "decant_failovers_total",
    "decant_requests_adopted_total",
    "decant_state_store_unwritten_requests",
    "decant_preemptions_total",
    "decant_handoff_failures_total",
}
"""Of overload, lost processes and full caches: in tests/e2e/test_router_metrics.py and tests/worker/test_metrics.py."""
ON_A_GPU = {"decant_device_memory_used_bytes", "decant_device_memory_total_bytes"}
"""In tests/worker/test_metrics.py."""
OF_A_MOMENT = {
    "decant_requests_waiting",
    "decant_oldest_waiting_request_seconds",
    "decant_waiting_prompt_tokens",
    "decant_waiting_prompt_seconds",
    "decant_queued_prompt_tokens",
    "decant_handoff_leases",
}
"""Gauges that are above 0 for less than a scrape; in the same tests."""
OF_RESULTS = {
    "decant_result_bytes",
    "decant_result_max_bytes",
    "decant_results",
    "decant_oldest_result_seconds",
    "decant_results_discarded_total",
    "decant_state_store_used_bytes",
    "decant_state_store_max_bytes",
}
"""Set every 15 s; in tests/router/test_result_memory.py."""

OF_KV_EVENTS = {"decant_kv_event_memory_bytes", "decant_kv_event_subscribers"}
"""In tests/router/test_kv_event_service.py."""
OF_ADAPTERS = {
    "decant_adapter_requests_total",
    "decant_adapter_prompt_tokens_total",
    "decant_adapter_generation_tokens_total",
    "decant_adapters_in_memory",
    "decant_adapter_memory_bytes",
    "decant_adapter_loads_total",
    "decant_adapter_evictions_total",
}
"""In tests/router/test_adapters.py and tests/worker/test_adapter_store.py."""
ELSEWHERE = NEEDS_TROUBLE | ON_A_GPU | OF_A_MOMENT | OF_RESULTS | OF_ADAPTERS | OF_KV_EVENTS


def documented() -> set[str]:
    return set(re.findall(r"^\| `(decant_\w+)` \|", REFERENCE, re.MULTILINE))


def all_ports(pair: Deployment) -> list[int]:
    processes = [*pair.routers, *(worker.process for worker in pair.workers)]
    return [one.until("serving")["admin_port"] for one in processes]


def moved(before: Totals, after: Totals) -> set[str]:
    return {name for name, value in after.items() if name.startswith("decant_") and value != before.get(name, 0.0)}


async def until_running(ports: list[int]) -> list[Totals]:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            pages = await asyncio.gather(*(asyncio.to_thread(read_totals, port) for port in ports))
            if pages[0]["decant_requests_running"] and sum(page["decant_requests_running"] for page in pages[1:]):
                return list(pages)


@pytest.mark.slow
async def test_a_run_moves_every_metric_of_the_reference(pair: Deployment, stub: InferenceServiceStub) -> None:
    ports = all_ports(pair)
    before = [await asyncio.to_thread(read_totals, port) for port in ports]
    prompt = "def metrics_of_a_run(values):\n" * 12
    for _ in range(2):  # the second finds the first's prefix
        await stub.Generate(pb.GenerateRequest(prompt=prompt, stopping=pb.StoppingParams(max_tokens=4)))
    await stub.Embed(pb.EmbedRequest(inputs=[pb.EmbedInput(text=prompt)]))
    # Cancelled long before its end: all pages have to be read while it runs.
    long = stub.GenerateStream(
        pb.GenerateRequest(prompt=prompt, stopping=pb.StoppingParams(max_tokens=1800, min_tokens=1800))
    )
    await long.read()
    during = await until_running(ports)
    for _ in range(20):
        await long.read()
    long.cancel()

    always = {"decant_build_info", "decant_worker_info", "decant_ready_workers", "decant_known_workers"}
    always |= {"decant_state_store_available"}  # as set at the start
    changed = set().union(*(moved(b, a) for b, a in zip(before, during, strict=True)))
    async with asyncio.timeout(PATIENCE_S):
        while True:  # a token's time is counted after it was sent
            texts = [await asyncio.to_thread(read_page, port, "/metrics") for port in ports]
            after = [totals_of(text) for text in texts]
            changed |= set().union(*(moved(b, a) for b, a in zip(before, after, strict=True)))
            lacking = documented() - changed - always - ELSEWHERE
            if not lacking:
                break
            print("not moved yet:", *lacking)
    assert all(sum(page.get(name, 0.0) for page in after) > 0 for name in always)
    for source in PromptSource:
        lines = re.findall(rf'decant_prompt_tokens_total{{source="{source.value}"}} ([\d.e+]+)', "".join(texts[1:]))
        assert sum(map(float, lines)) > 0, source
