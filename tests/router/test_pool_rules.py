from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from decant.protos import worker_pb2 as wire
from decant.router.placement.pool_demand import DemandMeter, PoolDemand, Report
from decant.router.placement.pool_rules import MoveDecision, PoolRules, growing_role, wanted_workers
from decant.state.ids import Incarnation
from tests.router.pool_simulation import DECODE, PREFILL, RECORDED_S, Request, Simulation, arrivals, recorded

RULES = PoolRules()
OVERLAPPING = PoolRules(low=0.9, high=0.5, hold_s=0.0, settle_s=0.0)


def demands(prefill: tuple[int, float], decode: tuple[int, float]) -> dict[wire.Role, PoolDemand]:
    return {PREFILL: PoolDemand(*prefill), DECODE: PoolDemand(*decode)}


def report(at: float, role: wire.Role = PREFILL, **load: int) -> Report:
    values: dict[str, Any] = {"total_blocks": 100, "free_blocks": 100, **load}
    return Report(Incarnation("w", 1), wire.Load(role=role, **values), max_running=10, at=at)


def test_a_prefill_worker_that_always_computes_demands_itself_and_its_queue_within_the_recovery_time() -> None:
    meter = DemandMeter()
    for second in range(100):
        busy = second * 1_000_000
        seen = meter.observe([report(second, queued_tokens=5000, busy_us=busy, busy_tokens=second * 1000)])
    assert seen[PREFILL].workers == 1
    assert seen[PREFILL].demand == pytest.approx(1.5, abs=0.01)


def test_a_decode_worker_demands_the_larger_of_blocks_and_batch_with_what_waits() -> None:
    for load, expected in (
        ({"free_blocks": 40, "cached_blocks": 20, "running": 2}, 0.4),
        ({"free_blocks": 90, "running": 5}, 0.5),
        ({"free_blocks": 40, "running": 3, "waiting": 3}, 1.2),
        ({"waiting": 10}, 1.0),
    ):
        seen = DemandMeter().observe([report(0.0, DECODE, **load)])
        assert seen[DECODE].demand == pytest.approx(expected)


def test_caches_that_wait_at_prefill_workers_demand_decode_workers() -> None:
    waiting = Report(Incarnation("p", 1), wire.Load(role=PREFILL, total_blocks=100, leased_blocks=50), 10, 0.0)
    seen = DemandMeter().observe([waiting, report(0.0, DECODE)])
    assert (seen[PREFILL].demand, seen[DECODE].demand) == (0.0, 0.5)


def test_a_draining_worker_is_in_no_pool() -> None:
    seen = DemandMeter().observe([report(0.0, DECODE, running=5, draining=True)])
    assert (seen[PREFILL], seen[DECODE]) == (PoolDemand(0, 0.0), PoolDemand(0, 0.0))


@pytest.mark.parametrize(
    ("workers", "demand", "wanted"),
    [
        (2, 1.4, 2),
        (2, 1.8, 3),
        (2, 9.0, 4),
        (4, 1.2, 2),
        (4, 3.0, 4),
        (1, 0.0, 1),
        (3, 0.0, 1),
        (0, 0.5, 1),
        (0, 0.0, 0),
    ],
    ids=str,
)
def test_an_advice_brings_a_pool_to_its_target_and_at_most_doubles_it(workers: int, demand: float, wanted: int) -> None:
    assert wanted_workers(PoolDemand(workers, demand), RULES) == wanted


@pytest.mark.parametrize(
    ("prefill", "decode", "role"),
    [
        ((2, 1.9), (2, 0.5), PREFILL),
        ((2, 0.5), (2, 1.9), DECODE),
        ((2, 1.9), (2, 0.6), None),  # the other would be at 0.6 with one worker less
        ((2, 1.9), (2, 1.9), None),
        ((2, 1.6), (2, 0.1), None),
        ((2, 1.9), (1, 0.0), None),  # a pool keeps its last worker
    ],
    ids=str,
)
def test_a_worker_moves_only_from_a_pool_that_stays_well_below_its_limit(
    prefill: tuple[int, float], decode: tuple[int, float], role: wire.Role | None
) -> None:
    assert growing_role(demands(prefill, decode), RULES) == role


def test_the_rules_ask_for_no_move_back() -> None:
    for twentieths in range(20, 200):
        for others in range(80):
            before = demands((3, twentieths / 20), (3, others / 20))
            if (role := growing_role(before, RULES)) is not None:
                sizes = (4, 2) if role == PREFILL else (2, 4)
                after = demands((sizes[0], twentieths / 20), (sizes[1], others / 20))
                assert growing_role(after, RULES) in (role, None)


def test_a_reason_lasts_before_it_moves_a_worker_and_then_waits_for_its_effect() -> None:
    decision, hot, cool = MoveDecision(RULES), demands((2, 2.0), (2, 0.1)), demands((2, 0.1), (2, 0.1))
    assert decision.decide(hot, 0.0) is None
    assert decision.decide(cool, 4.0) is None
    assert decision.decide(hot, 5.0) is None, "it began anew"
    assert decision.decide(hot, 10.0) == PREFILL
    decision.mark_moved(10.0)
    assert [decision.decide(hot, at) for at in (15.0, 39.0, 40.0)] == [None, None, PREFILL]


def swings(simulation: Simulation) -> int:
    return sum(one.role != next.role for one, next in pairwise(simulation.moves))


def alternating(period: float, seconds: float) -> list[Request]:
    """Long prompts in one half of each period, long answers in the other."""
    prompts = arrivals(lambda at: 5.0 if at % period < period / 2 else 0.3, seconds, 2000, 40, seed=3)
    answers = arrivals(lambda at: 0.3 if at % period < period / 2 else 3.5, seconds, 200, 350, seed=4)
    return sorted(prompts + answers, key=lambda request: request.arrival)


@pytest.mark.slow
def test_bursts_do_not_swing_the_pools_and_overlapping_thresholds_do() -> None:
    counts = []
    for rules in (RULES, OVERLAPPING):
        simulation = Simulation(2, 2, rules)
        simulation.run(alternating(20.0, 400.0), 400.0)
        counts.append(swings(simulation))
    well, wrong = counts
    assert well == 0
    assert wrong >= 5, "the simulation shows what the hysteresis is for"


@pytest.mark.slow
def test_bursts_of_a_recorded_service_are_served_sooner_and_do_not_swing_the_pools() -> None:
    waits = {}
    for rules in (None, RULES):
        requests, simulation = recorded(4), Simulation(2, 2, rules)
        simulation.run(requests, 5 * RECORDED_S)
        assert len(simulation.ended) == len(requests)
        assert swings(simulation) == 0
        waits[rules] = sorted(one.first_token - one.arrival for one in requests)
    assert waits[RULES][-13] < 0.8 * waits[None][-13], "p95 of 252 requests"


@pytest.mark.slow
def test_a_load_that_turns_from_prompts_to_answers_is_served_in_time_where_a_fixed_split_is_late() -> None:
    in_time = {}
    for rules in (None, RULES):
        requests = arrivals(lambda _: 4.0, 120.0, 2500, 20)
        requests += arrivals(lambda _: 3.0, 180.0, 200, 600, seed=1, start=120.0)
        simulation = Simulation(2, 2, rules)
        simulation.run(requests, 400.0)
        assert len(simulation.ended) == len(requests), "no request is lost by a move"
        in_time[rules] = sum(one.first_token - one.arrival < 5.0 for one in requests) / len(requests)
        assert [move.role for move in simulation.moves] == ([] if rules is None else [PREFILL, DECODE])
    assert in_time[RULES] > 0.95
    assert in_time[None] < 0.6


@pytest.mark.slow
def test_after_five_times_the_prompts_the_pools_recover_within_two_minutes() -> None:
    late = {}
    for rules in (None, RULES):
        simulation = Simulation(2, 4, rules)
        requests = arrivals(lambda at: 1.2 if at < 60 else 6.0, 240.0, 2000, 30)
        simulation.run(requests, 400.0)
        after = [one for one in requests if one.arrival >= 180.0]
        late[rules] = sum(one.first_token - one.arrival > 3.0 for one in after) / len(after)
        assert swings(simulation) == 0
        assert simulation.size(DECODE) >= RULES.min_workers
    assert late[RULES] < 0.05
    assert late[None] > 0.9
