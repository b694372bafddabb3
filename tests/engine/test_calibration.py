from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decant.engine.costs import StepCostModel, StepWork, chunk
from decant.engine.engine import Engine
from decant.engine.model.calibration import choose_threads, fit, measure
from decant.engine.plan import StepPlan, StepResult
from decant.engine.scheduler import (
    MAX_TOKEN_BUDGET,
    MIN_TOKEN_BUDGET,
    STRETCH_FACTOR,
    TOKEN_BUDGET,
    Limits,
    choose_token_budget,
)
from tests.engine.factories import make_request, run
from tests.engine.properties import nothing_is_held
from tests.engine.timed import Timed

COSTS = StepCostModel(fixed=0.03, token=0.001, logits=0.0004, pair=2e-7)
DECODES = StepWork(16, 16, 16 * 500)
MIXED = chunk(1500, 200).plus(DECODES)


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
@given(
    st.builds(
        StepCostModel, st.floats(0.001, 0.1), st.floats(1e-5, 0.01), st.floats(1e-5, 0.01), st.floats(1e-8, 1e-5)
    ),
)
def test_unmeasured_steps_take_the_stated_costs(costs: StepCostModel) -> None:
    device = Timed(costs)
    found = measure(device, time_limit_s=1e9, clock=device.clock)
    for work in (DECODES, MIXED, chunk(0, 512), chunk(1800, 16)):
        assert found.seconds(work) == pytest.approx(costs.seconds(work), rel=0.01)


@pytest.mark.slow
def test_noise_changes_the_measured_costs_only_slightly() -> None:
    class Noisy(Timed):
        def run(self, plan: StepPlan) -> StepResult:
            self.slower = chance.choice([1.0, 1.02, 1.05, 1.1, 1.3, 3.0])
            return super().run(plan)

    for seed in range(20):
        chance, device = random.Random(seed), Noisy(COSTS)
        found = measure(device, time_limit_s=1e9, clock=device.clock)
        assert found.seconds(MIXED) == pytest.approx(COSTS.seconds(MIXED), rel=0.5)


@pytest.mark.parametrize("slower", [0.1, 1.0, 10.0, 100.0, 1000.0])
def test_measuring_ends_in_time_and_a_slow_machine_runs_less(slower: float) -> None:
    """Three steps always run: one that lays out memory, a decode, a chunk."""
    device = Timed(COSTS, slower)
    found = measure(device, time_limit_s=3.0, clock=device.clock)
    needed = slower * (2 * COSTS.seconds(chunk(0, 1)) + COSTS.seconds(chunk(0, 32)))
    assert device.now <= max(needed, 3.0 + slower * COSTS.seconds(chunk(0, 1))) + 1e-6
    assert len(device.plans) >= 3
    assert found.seconds(chunk(0, 300)) == pytest.approx(slower * COSTS.seconds(chunk(0, 300)), rel=0.25)


def test_measuring_leaves_nothing_behind() -> None:
    device = Timed(COSTS, context_length=96, num_slots=512)
    device.costs = measure(device, clock=device.clock)
    engine = Engine(device, Limits(token_budget=64, max_running=8, context_length=96))
    engine.check_integrity()
    assert engine.load().cached_blocks == 0
    again = Engine(Timed(COSTS, context_length=96, num_slots=512), engine.limits)
    assert run(engine, make_request("a", 40, 20))["a"].text == run(again, make_request("a", 40, 20))["a"].text
    nothing_is_held(engine)


@pytest.mark.parametrize(("context_length", "num_slots"), [(4, 4), (96, 96), (2048, 2048)])
def test_a_device_with_few_blocks_is_measured_with_the_shapes_that_fit(context_length: int, num_slots: int) -> None:
    device = Timed(COSTS, context_length=context_length, num_slots=num_slots)
    found = measure(device, clock=device.clock)
    assert found.seconds(chunk(0, 1)) == pytest.approx(COSTS.seconds(chunk(0, 1)), rel=0.01)
    assert choose_threads(device, 4, lambda _: None, clock=device.clock) == 4


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(
            st.builds(StepWork, st.integers(1, 4096), st.integers(1, 256), st.integers(1, 10**7)), st.floats(1e-4, 100)
        ),
        min_size=1,
        max_size=12,
    )
)
def test_no_cost_is_negative_whatever_was_measured(samples: list[tuple[StepWork, float]]) -> None:
    found = fit(samples)
    assert min(found.fixed, found.token, found.logits, found.pair) >= 0
    assert found != StepCostModel(), "something was measured, so something is known"


# -- what is chosen ---------------------------------------------------------------------------------------------


@given(
    st.builds(StepCostModel, st.floats(0, 1), st.floats(1e-6, 0.1), st.floats(0, 0.1), st.floats(0, 1e-4)),
    st.floats(0.01, 10),
)
def test_a_token_budget_is_what_a_prefill_only_step_has_time_for(costs: StepCostModel, step_seconds: float) -> None:
    budget = choose_token_budget(costs, step_seconds)
    allowed = max(step_seconds, STRETCH_FACTOR * costs.fixed)
    assert MIN_TOKEN_BUDGET <= budget <= MAX_TOKEN_BUDGET
    assert budget.bit_count() == 1
    if budget > MIN_TOKEN_BUDGET:
        assert costs.seconds(chunk(0, budget)) <= allowed * (1 + 1e-9)
    if budget < MAX_TOKEN_BUDGET:
        assert costs.seconds(chunk(0, 2 * budget)) >= allowed * (1 - 1e-9)


def test_the_token_budget_has_its_default_without_measured_costs() -> None:
    assert choose_token_budget(StepCostModel(), 0.25) == TOKEN_BUDGET


@pytest.mark.parametrize(
    ("slower", "chosen"),
    [
        ({8: 1.0, 4: 1.9, 2: 3.8}, 8),
        ({8: 1.5, 4: 1.0, 2: 1.9}, 4),  # two threads of each core are slower than one
        ({8: 1.05, 4: 1.0, 2: 1.9}, 8),  # noise
        ({8: 9.0, 4: 3.0, 2: 1.0}, 2),
        ({1: 1.0}, 1),
        ({3: 1.0, 1: 2.0}, 3),
    ],
)
def test_the_fastest_number_of_threads_is_used(slower: dict[int, float], chosen: int) -> None:
    device, used = Timed(COSTS), list[int]()

    def use(threads: int) -> None:
        device.slower = slower[threads] / 10
        used.append(threads)

    assert choose_threads(device, max(slower), use, clock=device.clock) == chosen
    assert used[-1] == chosen


def test_a_slow_machine_tries_fewer_threads() -> None:
    device, used = Timed(COSTS, 100.0), list[int]()
    assert choose_threads(device, 8, used.append, clock=device.clock) == 8
    assert used == [8, 8]
    assert len(device.plans) == 4, "each step once, after the one that makes the threads"
