from __future__ import annotations

import heapq
import math
from dataclasses import replace
from random import Random

import pytest

from decant.engine.costs import StepCostModel
from decant.plan.capacity.devices import Device
from decant.plan.capacity.memory import KvCapacity
from decant.plan.costs.overheads import NO_OVERHEADS, Contention, Overheads
from decant.plan.costs.speed import Efficiency, Measured, roofline
from decant.plan.errors import InvalidPlan
from decant.plan.pools import Pools
from decant.plan.quantities import Slo, Tokens
from decant.plan.queueing import ServiceTime, Wait, wait_probability
from decant.plan.sizing import Sizing
from decant.plan.workload import Workload
from tests.plan.test_sizes import LLAMA_3_8B, known_shape, kv_layout

KV_CAPACITY = KvCapacity(memory=1 << 30, weights=0, layout=kv_layout(1 << 10), share=1.0)
WORKLOAD = Workload(Tokens(1500, 2000), Tokens(500, 500), rate=4.0)
COSTS = StepCostModel(fixed=0.02, token=1e-4, logits=1e-4, pair=1e-9)
SPEED = Measured(COSTS, COSTS)


def sizing(slo: Slo = Slo(), rate: float = 4.0) -> Sizing:  # noqa: B008 - frozen
    return Sizing(SPEED, KV_CAPACITY, replace(WORKLOAD, rate=rate), slo)


def pools() -> Pools:
    return Pools(SPEED, KV_CAPACITY, WORKLOAD, NO_OVERHEADS)


def waits(servers: int, rate: float, service: Tokens, seed: int = 1, arrivals: int = 60_000) -> list[float]:
    """Return sorted waits in seconds in a queue with uniform service times in milliseconds."""
    rng, now, free, seconds = Random(seed), 0.0, [0.0] * servers, []
    for _ in range(arrivals):
        now += rng.expovariate(rate)
        start = max(now, heapq.heappop(free))
        seconds.append(start - now)
        heapq.heappush(free, start + rng.uniform(service.low, service.high) / 1e3)
    return sorted(seconds)


def test_erlang_c_has_its_tabulated_values() -> None:
    assert wait_probability(1, 0.7) == pytest.approx(0.7)  # one server: its utilization
    assert wait_probability(2, 1.0) == pytest.approx(1 / 3)
    assert wait_probability(10, 8.0) == pytest.approx(0.4092, abs=1e-4)


def moments(milliseconds: Tokens) -> ServiceTime:
    return ServiceTime(*(milliseconds.mean_of(lambda one, power=power: (one / 1e3) ** power) for power in (1, 2, 3)))  # type: ignore[misc]


@pytest.mark.parametrize(("servers", "rate"), [(1, 1.4), (1, 1.6), (1, 2.0), (4, 7.0), (4, 8.0)])
def test_wait_quantiles_agree_with_a_simulated_queue(servers: int, rate: float) -> None:
    service = Tokens(300, 500)
    simulated = waits(servers, rate, service)
    for quantile in (0.5, 0.9, 0.99):
        expected = simulated[int(quantile * len(simulated))]
        assert Wait(servers, rate, moments(service)).quantile(quantile) == pytest.approx(expected, rel=0.15, abs=0.02)


@pytest.mark.parametrize("load", [0.6, 0.9])
def test_wait_quantiles_of_exponential_service_times_are_those_of_the_closed_form(load: float) -> None:
    """M/M/1: the wait exceeds t with probability load x exp(-(1 - load) t), for a mean service time of 1."""
    for quantile in (0.5, 0.9, 0.99):
        expected = math.log(load / (1 - quantile)) / (1 - load)
        assert Wait(1, load, ServiceTime(1, 2, 6)).quantile(quantile) == pytest.approx(expected, rel=1e-6)


def test_the_median_wait_for_a_regular_server_is_that_of_erlang() -> None:
    """M/D/1: within one service time the wait is at most t with probability (1 - load) x exp(load t)."""
    load = 0.55
    expected = math.log(0.5 / (1 - load)) / load
    assert Wait(1, load, ServiceTime(1, 1, 1)).quantile(0.5) == pytest.approx(expected, rel=0.1)


def test_the_share_of_arrivals_that_wait_at_most_a_quantile_is_that_quantile() -> None:
    wait = Wait(2, 4.0, moments(Tokens(300, 500)))
    for quantile in (0.7, 0.9, 0.99):
        assert wait.share(wait.quantile(quantile)) == pytest.approx(quantile)


@pytest.mark.parametrize("rate", [0.5, 1.2, 1.7])
def test_the_median_ttft_is_that_of_a_simulated_queue_of_the_same_prompts(rate: float) -> None:
    costs = StepCostModel(token=1e-3)  # milliseconds are tokens
    workload = Workload(Tokens(200, 600), Tokens(2, 2))
    rng, now, free, ttfts = Random(1), 0.0, 0.0, []
    for _ in range(60_000):
        now += rng.expovariate(rate)
        free = max(now, free) + rng.uniform(0.2, 0.6)
        ttfts.append(free - now)
    made = Pools(Measured(costs, costs), KV_CAPACITY, workload, Overheads(latency=0.1))
    assert made.median_ttft(1, rate) == pytest.approx(0.1 + sorted(ttfts)[30_000], rel=0.04)


def test_a_pool_is_as_slow_as_the_use_of_the_other_one_makes_it() -> None:
    def at(rate: float) -> tuple[float, float]:
        made = Sizing(SPEED, KV_CAPACITY, WORKLOAD, Slo(), Overheads(contention=Contention(1.5, 2.0)))
        slowed = made.slowed(1, 1, rate).speed
        return slowed.prefill(1000), slowed.step(1, 1000)

    prefill, step = SPEED.prefill(1000), SPEED.step(1, 1000)
    assert at(1e-6) == pytest.approx((prefill, step), rel=0.01)
    assert at(1e3) == pytest.approx((1.5 * prefill, 2 * step))
    slower = Sizing(SPEED, KV_CAPACITY, WORKLOAD, Slo(), Overheads(contention=Contention(1.5, 2.0))).slowed(1, 1, 1.0)
    assert at(1.0)[1] / step - 1 == pytest.approx(slower.prefill_use(1, 1.0), rel=1e-3)


@pytest.mark.slow
def test_goodput_and_ttft_count_latency_and_contention() -> None:
    prefill = SPEED.prefill(1750)
    workload = Workload(Tokens(1750, 1750), Tokens(500, 500), rate=0.1)
    made = Sizing(SPEED, KV_CAPACITY, workload, Slo(), Overheads(0.05, 0.5, 1e-5, Contention(prefill=2.0, handoff=3.0)))
    plan = made.plan()
    assert plan.goodput == pytest.approx(1 / (2 * prefill + 0.0175), rel=0.01)  # 1,750 tokens are sent
    assert plan.ttft_median == pytest.approx(0.05 + plan.prefill_mean, rel=0.01)
    handoff = 0.5 * (1 + 2 * plan.prefill_use)
    assert plan.tpot == pytest.approx(SPEED.step(1 + plan.running, workload.context) + handoff / 499)


def test_sending_a_cache_slows_only_a_prompt_that_follows_at_once() -> None:
    """At 40 % use by prefills, 40 % of the prompts and of those that they delay follow at once: 1 / (1 - 0.4 x 0.5)."""
    prefill = SPEED.prefill(1750)
    workload = Workload(Tokens(1750, 1750), Tokens(500, 500), rate=0.1)
    made = Sizing(SPEED, KV_CAPACITY, workload, Slo(), Overheads(sending=0.5 * prefill / 1750))

    def use(rate: float) -> float:
        return made.slowed(1, 1, rate).prefill_use(1, rate)

    assert use(1e-6 / prefill) == pytest.approx(1e-6, rel=1e-3)
    assert use(0.4 / prefill) == pytest.approx(0.4 / (1 - 0.4 * 0.5), rel=1e-3)
    assert use(2 / prefill) == pytest.approx(2 * 1.5)


def test_a_rate_beyond_the_most_workers_is_refused_with_the_highest_one() -> None:
    workload = Workload(Tokens(1000, 1000), Tokens(2, 2), rate=1e9)
    with pytest.raises(InvalidPlan) as refused:
        Sizing(SPEED, KV_CAPACITY, workload, Slo()).plan()
    highest = 10_000 / SPEED.prefill(1000)
    assert str(refused.value) == f"--rate: at most {highest:.3g} requests/s, for 10,000 prefill workers, got 1e+09"


def test_a_pool_with_more_load_than_workers_waits_without_bound() -> None:
    service = ServiceTime(0.1, 0.01, 0.001)
    assert math.isinf(Wait(2, 20.0, service).quantile(0.5))
    assert Wait(50, 20.0, service).quantile(0.99) == 0.0


@pytest.mark.slow
def test_the_roofline_reproduces_a_device_s_bounds() -> None:
    """H200: 8 billion bfloat16 weights at 4.3 TB/s take 3.5 ms a token; 3,500 prompt tokens at 780 TFLOP/s, 70 ms."""
    device = Device("", 141 << 30, 4.3e12, 780e12)
    speed = roofline(known_shape(LLAMA_3_8B), device, ("bfloat16", None, "bfloat16"), Efficiency(1.0, 1.0))
    assert speed.step(1, 1) == pytest.approx(15.0e9 / 4.3e12, rel=0.01)
    assert speed.prefill(3500) == pytest.approx(0.072, rel=0.05)


def test_a_decode_step_grows_with_sequences_and_context() -> None:
    assert SPEED.step(1, 999) == pytest.approx(0.02 + 2e-4 + 1e-6)
    assert SPEED.step(10, 999) == pytest.approx(0.02 + 10 * (2e-4 + 1e-6))


def test_running_sequences_follow_little_s_law() -> None:
    running = pools().running(2.0)
    assert running == pytest.approx(2.0 * 500 * SPEED.step(running + 1, WORKLOAD.context))  # itself, among the others


def test_one_worker_less_of_either_role_would_miss_an_objective() -> None:
    slo = Slo(ttft=0.4, tpot=0.05)
    plan = sizing(slo, rate=30.0).plan()
    assert plan.prefill_workers > 1
    assert plan.decode_workers > 1
    assert pools().ttft(plan.prefill_workers, 30.0) <= 0.4 < pools().ttft(plan.prefill_workers - 1, 30.0)
    fewer = pools().running(30.0 / (plan.decode_workers - 1))
    needed = (fewer + 3 * math.sqrt(fewer)) * WORKLOAD.context
    assert needed > KV_CAPACITY.tokens or SPEED.step(fewer + 1, WORKLOAD.context) > 0.05


@pytest.mark.slow
def test_a_plan_at_its_goodput_needs_no_more_workers_and_beyond_it_does() -> None:
    slo = Slo(ttft=0.4, tpot=0.05)
    plan = sizing(slo, rate=30.0).plan()
    workers = (plan.prefill_workers, plan.decode_workers)
    at, beyond = (sizing(slo, rate=plan.goodput * factor).plan() for factor in (0.999, 1.001))
    assert (at.prefill_workers, at.decode_workers) == workers
    full = {"prefill": beyond.prefill_workers - workers[0], "decode": beyond.decode_workers - workers[1]}
    assert full[plan.goodput_limit] == 1


def test_memory_bounds_a_batch_that_has_no_objective() -> None:
    assert pools().batch_limit(None) == KV_CAPACITY.sequences(math.ceil(WORKLOAD.context))


def test_the_batch_limit_is_the_last_batch_within_the_tpot_objective() -> None:
    limit = pools().batch_limit(0.03)
    assert SPEED.step(limit, WORKLOAD.context) <= 0.03 < SPEED.step(limit + 1, WORKLOAD.context)


def test_kv_bytes_between_the_pools_are_those_of_the_prompts() -> None:
    assert sizing().plan().pool_bytes == 4.0 * 1750 * 1024


@pytest.mark.parametrize(
    ("slo", "message"),
    [
        (Slo(ttft=0.1), r"--slo ttft: a prefill of 2,000 tokens alone takes 222 ms: at least that.*2.2 times as fast"),
        (Slo(tpot=0.01), r"--slo tpot: a step of one sequence takes 20.2 ms: at least that.*2.0 times the bandwidth"),
    ],
)
def test_objectives_below_an_idle_worker_s_times_are_refused(slo: Slo, message: str) -> None:
    with pytest.raises(InvalidPlan, match=message):
        sizing(slo).plan()


@pytest.mark.parametrize(
    ("slo", "overheads", "message"),
    [
        (
            Slo(ttft=0.25),
            Overheads(latency=0.1),
            "ttft: .* alone, with latency and contention, takes 322 ms: .* 1.5 times as fast",
        ),
        (Slo(ttft=0.25), Overheads(latency=0.3), "ttft: .* takes 522 ms: at least that, got 250 ms"),
        (Slo(ttft=0.25), Overheads(contention=Contention(prefill=2.0)), "ttft: .* takes 444 ms: .* 1.8 times as fast"),
        (
            Slo(tpot=0.03),
            Overheads(contention=Contention(decode=2.0)),
            "tpot: .* with handoff and contention, takes 40.4 ms: .* 1.3 times",
        ),
        (Slo(tpot=0.03), Overheads(handoff=499.0), r"tpot: .* takes 1.02 s: at least that, got 30 ms"),
    ],
)
def test_objectives_that_overheads_alone_exceed_are_refused_by_name(
    slo: Slo, overheads: Overheads, message: str
) -> None:
    with pytest.raises(InvalidPlan, match=f"^--slo {message}"):
        Sizing(SPEED, KV_CAPACITY, replace(WORKLOAD, rate=0.001), slo, overheads).plan()


def test_a_rate_beyond_every_pool_is_refused() -> None:
    with pytest.raises(InvalidPlan, match="--rate"):
        sizing(rate=1e6).plan()
