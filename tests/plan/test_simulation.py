from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from random import Random
from typing import Any

import pytest

from decant.plan.capacity.memory import KvCapacity
from decant.plan.errors import InvalidPlan
from decant.plan.quantities import Slo, Tokens
from decant.plan.queueing import ServiceTime, Wait
from decant.plan.recorded_workload import Trace, TraceRequest
from decant.plan.simulation.outcome import outcome, percentiles
from decant.plan.simulation.simulation import Scenario, Simulation
from decant.plan.workload import Workload
from tests.plan.test_sizes import kv_layout

KV_CAPACITY = KvCapacity(memory=1 << 30, weights=0, layout=kv_layout(1 << 10), share=1.0)
SMALL = KvCapacity(memory=1 << 20, weights=0, layout=kv_layout(1 << 10), share=1.0)
"""Memory for 1,024 tokens."""


class Linear:
    def prefill(self, tokens: float) -> float:
        return tokens / 1e3

    def step(self, sequences: float, _: float) -> float:
        return 1e-3 + 1e-4 * sequences


class ExponentialLengths:
    low, high, mean, mean_square = 1, 10_000, 100.0, 20_000.0

    def mean_of(self, function: Callable[[float], float]) -> float:
        raise NotImplementedError

    def quantile(self, share: float) -> int:
        raise NotImplementedError

    def draw(self, rng: Random) -> int:
        return math.ceil(rng.expovariate(1 / self.mean))


ONE = Tokens(1, 1)
SCENARIO = Scenario(prefill_workers=1, decode_workers=1, requests=6000, seed=3)


def simulate(workload: Workload, scenario: Scenario, kv_capacity: KvCapacity = KV_CAPACITY) -> Simulation:
    simulation = Simulation(Linear(), kv_capacity, workload, scenario)
    simulation.run()
    return simulation


def waits(simulation: Simulation) -> list[float]:
    return sorted(request.prefill_began - request.arrival for request in simulation.requests)


@pytest.mark.slow
def test_one_worker_with_exponential_prompts_is_the_queue_m_m_1() -> None:
    load = 0.5
    waited = waits(simulate(Workload(ExponentialLengths(), ONE, rate=load / 0.1), SCENARIO))
    assert sum(waited) / len(waited) == pytest.approx(0.1 * load / (1 - load), rel=0.12)
    assert sum(each > 0 for each in waited) / len(waited) == pytest.approx(load, abs=0.03)


@pytest.mark.slow
def test_one_worker_with_equal_prompts_is_the_queue_m_d_1() -> None:
    load = 0.6
    waited = waits(simulate(Workload(Tokens(100, 100), ONE, rate=load / 0.1), SCENARIO))
    assert sum(waited) / len(waited) == pytest.approx(0.1 * load / (2 * (1 - load)), rel=0.12)
    for quantile in (0.5, 0.9, 0.99):
        expected = Wait(1, load / 0.1, ServiceTime(0.1, 0.01, 0.001)).quantile(quantile)
        assert waited[int(quantile * len(waited))] == pytest.approx(expected, rel=0.2, abs=0.01)


@pytest.mark.slow
def test_several_workers_are_between_one_shared_queue_m_d_c_and_a_queue_each() -> None:
    """Routers do not know the rest of a running prompt, so placement is a little worse than M/D/c."""
    workers, rate, service = 4, 28.0, ServiceTime(0.1, 0.01, 0.001)
    scenario = replace(SCENARIO, prefill_workers=workers)
    waited = waits(simulate(Workload(Tokens(100, 100), ONE, rate=rate), scenario))
    for quantile in (0.9, 0.99):
        simulated = waited[int(quantile * len(waited))]
        assert Wait(workers, rate, service).quantile(quantile) < simulated
        assert simulated < Wait(1, rate / workers, service).quantile(quantile) / 2


@pytest.mark.slow
def test_bursts_make_requests_wait_longer() -> None:
    workload = Workload(Tokens(100, 100), ONE, rate=5.0)
    scenario = replace(SCENARIO, requests=1500)
    calm, bursts = (waits(simulate(workload, replace(scenario, burstiness=each))) for each in (1.0, 0.2))
    assert sum(bursts) > 2 * sum(calm)


@pytest.mark.slow
@pytest.mark.parametrize("kv_capacity", [KV_CAPACITY, SMALL])
@pytest.mark.parametrize("routers", [1, 3])
def test_every_request_runs_once_and_leaves_nothing_behind(kv_capacity: KvCapacity, routers: int) -> None:
    workload = Workload(Tokens(50, 300), Tokens(1, 200), rate=20.0)
    scenario = Scenario(prefill_workers=5, decode_workers=3, routers=routers, requests=400)
    simulation = simulate(workload, scenario, kv_capacity)
    for request in simulation.requests:
        assert request.arrival <= request.prefill_began < request.first_token <= request.end
        assert (request.decode_worker >= 0) == (request.output_tokens > 1)
        assert request.output_tokens == 1 or request.tpot >= Linear().step(1, 0) * (1 - 1e-9)
        assert request.reservation is None
    decoded = Counter(request.decode_worker for request in simulation.requests if request.output_tokens > 1)
    assert [worker.taken for worker in simulation.decode_workers] == [decoded[number] for number in range(3)]
    computed = sum(worker.busy_seconds for worker in simulation.prefill_workers)
    assert computed == pytest.approx(sum(request.prompt_tokens for request in simulation.requests) / 1e3)
    for router in simulation.routers:
        assert all(load.queued_tokens.own == load.sequences.own == 0 for load in router.loads)


def test_sequences_share_the_steps_and_more_than_fit_wait() -> None:
    requests = tuple(TraceRequest(at, 500, 101) for at in (0.0, 1.0, 1.6))
    trace = Trace(requests)
    simulation = simulate(Workload(trace.prompt, trace.output, trace.rate, trace=trace), SCENARIO, SMALL)
    assert [request.first_token for request in simulation.requests] == pytest.approx([0.5, 1.5, 2.1])
    assert [request.tpot for request in simulation.requests] == pytest.approx([1.1e-3] * 3)
    together = Trace(tuple(TraceRequest(at, 500, 501) for at in (0.0, 0.1, 0.2)))
    simulation = simulate(Workload(together.prompt, together.output, together.rate, trace=together), SCENARIO, SMALL)
    first, second, third = simulation.requests
    assert (second.end - second.first_token) > first.end - second.first_token, "memory for one: the second waits"
    assert third.end > second.end > first.end


def test_two_sequences_slow_each_other_down_while_both_run() -> None:
    trace = Trace((TraceRequest(0.0, 100, 1001), TraceRequest(0.1, 100, 1001)))
    workload = Workload(trace.prompt, trace.output, trace.rate, trace=trace)
    first, second = simulate(workload, replace(SCENARIO, prefill_workers=2)).requests
    alone = 0.1 / 1.1e-3  # steps of the first before the second comes
    assert first.end - first.first_token == pytest.approx(0.1 + (1000 - alone) * 1.2e-3)
    assert second.end - first.end == pytest.approx(alone * 1.1e-3)


def test_shared_prefixes_are_computed_once_at_each_worker_and_found_by_placement() -> None:
    workload = Workload(Tokens(200, 240), ONE, rate=10.0)
    scenario = replace(SCENARIO, prefill_workers=4, requests=500, prefix_tokens=160, prefixes=4)
    shared = outcome(simulate(workload, scenario), Slo())
    assert 0.65 < shared.cached_share < 160 / 220
    assert outcome(simulate(workload, replace(scenario, prefix_tokens=0)), Slo()).cached_share == 0


def test_a_prefix_cache_keeps_no_more_than_the_memory_has() -> None:
    workload = Workload(Tokens(200, 240), ONE, rate=10.0)
    scenario = replace(SCENARIO, prefill_workers=1, requests=300, prefix_tokens=160, prefixes=40)
    few = outcome(simulate(workload, scenario, SMALL), Slo())
    many = outcome(simulate(workload, scenario), Slo())
    assert few.cached_share < 0.3 < many.cached_share


def test_an_outcome_counts_what_the_requests_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "process_time", count(step=0.25).__next__)
    trace = Trace((TraceRequest(0.0, 100, 101), TraceRequest(0.05, 200, 1)))
    simulation = simulate(Workload(trace.prompt, trace.output, trace.rate, trace=trace), SCENARIO)
    result = outcome(simulation, Slo(ttft=0.2, tpot=1e-3))
    assert result.requests == 2
    assert [result.wait.p50, result.wait.p99] == pytest.approx([0.0, 0.05])
    assert [result.ttft.p50, result.ttft.p99] == pytest.approx([0.1, 0.25])
    assert result.within_objectives == 0, "the first misses TPOT, the second TTFT"
    assert outcome(simulation, Slo(ttft=0.3)).within_objectives == 1
    assert outcome(simulation, Slo(ttft=0.2)).within_objectives == 0.5
    assert result.prefill_use == pytest.approx(1.0)
    assert result.placement_cpu == 0.25 * 3 / 2, "the second has no decode worker"
    assert percentiles(range(1, 101)) == percentiles(reversed(range(1, 101)))
    assert (percentiles(range(1, 101)).p50, percentiles(range(1, 101)).p99) == (50, 99)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"routers": 0}, "--routers: at least 1, got 0"),
        ({"requests": 0}, "--requests: at least 1, got 0"),
        ({"burstiness": 0.0}, "--burstiness: 1e-09 to 1e.09, got 0"),
        ({"prefix_tokens": 50}, r"--prefix-tokens: at least 0 and below the shortest prompt \(50 tokens\), got 50"),
    ],
)
def test_scenarios_that_cannot_be_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidPlan, match=message):
        Simulation(Linear(), KV_CAPACITY, Workload(Tokens(50, 60), ONE), replace(SCENARIO, **change))
