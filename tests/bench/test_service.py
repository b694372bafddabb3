from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import psutil
import pytest

from bench import service
from bench.comparison.subprocess_runner import Job
from bench.deployment import service as deployed
from bench.deployment.cpu_use import CpuUse, hottest
from bench.deployment.service import PARTS, LoadFailed
from bench.deployment.service import service as running_service
from bench.workloads import exponential
from tests.bench import fork_server as forked


def spent(user: float, system: float) -> dict[str, float]:
    return {"user": user, "system": system, "main_thread": user, "switches": 1}


def served(throughput: float, worker: float) -> dict[str, object]:
    cpu = {"client": spent(0.2, 0.1), "router": spent(0.5, 0.1), "worker": spent(worker, 0.0), "redis": spent(0.0, 0.1)}
    return {"output_throughput": throughput, "cpu": cpu}


def test_the_ratio_is_of_medians_and_the_own_cost_is_all_that_the_engine_does_not_need() -> None:
    alone = [{"output_throughput": rate, "cpu_seconds": 4.0} for rate in (90.0, 100.0, 200.0)]
    found = service.compare(alone, [served(50.0, 5.0), served(91.0, 5.0), served(95.0, 9.0)], tokens=1000)
    assert (found["ratio"], found["goal"], found["met"]) == (0.91, 0.9, True)
    cpu = found["cpu_us_per_token"]
    assert {name: round(value) for name, value in cpu.items() if name != "share_of_engine"} == {
        "engine": 4000,
        "client": 300,
        "router": 600,
        "worker": 5000,
        "redis": 100,
        "own": 2000,
    }
    assert cpu["share_of_engine"] == pytest.approx(4 / 6)
    assert not service.compare(alone, [served(89.0, 5.0)], tokens=1000)["met"]


def test_samples_are_counted_by_function_alone_and_with_what_it_calls(tmp_path: Path) -> None:
    raw = "main (a.py:1);write (b.py:7) 6\nmain (a.py:2);write (b.py:9) 2\nmain (a.py:2) 2\n"
    (tmp_path / "router.txt").write_text(raw)
    assert hottest(tmp_path / "router.txt") == [
        {"function": "write (b.py)", "own": 0.8, "within": 0.8},
        {"function": "main (a.py)", "own": 0.2, "within": 1.0},
    ]


def test_cpu_use_counts_what_a_process_has_used_since() -> None:
    me = psutil.Process()
    before = CpuUse.of(me)
    until = time.process_time() + 0.1
    while time.process_time() < until:
        os.getpid()
    since = CpuUse.of(me).since(before)
    assert since.seconds >= 0.05
    assert CpuUse.of(me).since(before).seconds >= since.seconds


@pytest.mark.slow
async def test_a_worker_that_ends_early_is_reported_with_its_reason(tmp_path: Path) -> None:
    job = Job(str(tmp_path / "missing"), "bfloat16", 1)
    with pytest.raises(LoadFailed, match="the worker ended early"):
        async with running_service(job, tmp_path):
            pass


@pytest.mark.slow
def test_a_workload_goes_through_client_router_and_worker(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deployed, "module_process", forked.module_process)
    items = exponential(512, count=3, prompt=16, mean=8)
    job = Job(str(tiny), "bfloat16", 1, tuple(items), token_budget=64, kv_bytes=1 << 22)
    run = asyncio.run(service.whole_service(job))
    assert set(run["cpu"]) == set(PARTS)
    assert run["cpu_seconds"] > 0
    assert run["tokens_per_message"] >= 1
    assert run["output_throughput"] == pytest.approx(sum(item.output_len for item in items) / run["duration"])
