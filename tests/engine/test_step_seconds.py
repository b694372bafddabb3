from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decant.engine.costs import StepCostModel
from decant.engine.engine import Engine
from decant.engine.errors import InvalidConfig
from decant.engine.scheduler import PROMPT_LOGPROB_CHUNK, STRETCH_FACTOR, Limits
from tests.engine.factories import BLOCK, make_request, prompt, run
from tests.engine.properties import nothing_is_held
from tests.engine.timed import Timed

CONTEXT_LENGTH = 2048
STEP = 0.25
COSTS = StepCostModel(fixed=0.02, token=0.001, logits=0.002, pair=2e-6)


def make(costs: StepCostModel = COSTS, *, budget: int = 512, slower: float = 1.0) -> tuple[Engine, Timed]:
    device = Timed(costs, slower, context_length=CONTEXT_LENGTH, num_slots=4 * CONTEXT_LENGTH)
    limits = Limits(token_budget=budget, max_running=8, context_length=CONTEXT_LENGTH, step_seconds=STEP)
    return Engine(device, limits, clock=lambda: device.now), device


def begin(engine: Engine, device: Timed, decodes: int) -> None:
    run(engine, *(make_request(f"d{n}", prompt(4, n + 1), 1500) for n in range(decodes)), steps=decodes + 1)
    device.plans.clear()


def chunks(device: Timed, id: str) -> list[int]:
    rows = [row for plan in device.plans for row in plan.rows if row.request.id == id]
    return [row.end - row.start for row in rows if row.start < row.request.prompt_len]


def until_written(engine: Engine, id: str) -> None:
    for _ in range(2000):
        if any(token.id == id for token in engine.step().tokens):
            return
    raise AssertionError(f"{id} never wrote")


@pytest.mark.parametrize("decodes", [1, 7])
def test_a_long_prompt_keeps_answers_waiting_no_longer_than_a_step(decodes: int) -> None:
    engine, device = make()
    begin(engine, device, decodes)
    engine.add(make_request("long", prompt(1800, 50), 1))
    until_written(engine, "long")
    seconds = [COSTS.seconds(plan.work) for plan in device.plans]
    assert max(seconds) <= STEP
    assert min(seconds[:-1]) > STEP - COSTS.token - CONTEXT_LENGTH * COSTS.pair - COSTS.logits, (
        "the time there is, is used"
    )
    sizes = chunks(device, "long")[:-1]
    assert all(later < sooner for sooner, later in pairwise(sizes)), sizes


def test_a_step_of_prompts_alone_keeps_the_limit() -> None:
    engine, device = make(StepCostModel(token=0.002, pair=2e-6), budget=2048)
    engine.add(make_request("long", prompt(1800, 50), 1))
    until_written(engine, "long")
    seconds = [device.costs.seconds(plan.work) for plan in device.plans]
    assert 0.9 * STEP < max(seconds) <= STEP


def test_prompts_fill_a_step_whose_fixed_cost_is_above_the_limit() -> None:
    engine, device = make(StepCostModel(fixed=4 * STEP, token=0.01), budget=2048)
    engine.add(make_request("long", prompt(1800, 50), 1))
    until_written(engine, "long")
    assert chunks(device, "long")[0] == pytest.approx((STRETCH_FACTOR - 1) * 4 * STEP / 0.01, abs=1)


def test_the_token_budget_caps_what_would_fit_in_the_time() -> None:
    engine, device = make(StepCostModel(token=1e-9), budget=64)
    begin(engine, device, 3)
    engine.add(make_request("long", prompt(200, 50), 1))
    until_written(engine, "long")
    assert chunks(device, "long") == [61, 61, 61, 17]


@pytest.mark.parametrize("prompts", [1, 3])
def test_prompts_progress_by_a_block_beside_slow_decodes(prompts: int) -> None:
    engine, device = make(StepCostModel(token=1.0))
    begin(engine, device, 1)
    for n in range(prompts):
        engine.add(make_request(f"p{n}", prompt(2 * BLOCK, 50 + n), 1))
    until_written(engine, f"p{prompts - 1}")
    for n in range(prompts):
        assert chunks(device, f"p{n}") == [BLOCK, BLOCK]
    assert all(plan.num_tokens - 1 <= BLOCK for plan in device.plans), "one block for all of them, not one for each"


def test_prompts_beside_many_decodes_get_longer_than_those() -> None:
    costs = StepCostModel(fixed=0.5, token=0.01)
    engine, device = make(costs)
    begin(engine, device, 5)
    engine.add(make_request("long", prompt(1000, 50), 1))
    until_written(engine, "long")
    decodes = 0.5 + 5 * 0.01
    assert chunks(device, "long")[0] == pytest.approx((STRETCH_FACTOR - 1) * decodes / costs.token, abs=1)
    assert max(costs.seconds(plan.work) for plan in device.plans) <= STRETCH_FACTOR * decodes * 1.001


def test_no_sequence_overtakes_a_prompt_cut_by_time() -> None:
    """A token costs more than what is left after its long context, but not at the start of another prompt."""
    engine, device = make(StepCostModel(token=0.001, pair=1e-4))
    begin(engine, device, 1)
    engine.add(make_request("first", prompt(1000, 50), 1))
    engine.add(make_request("second", prompt(1000, 60), 1))
    until_written(engine, "first")
    assert chunks(device, "first")
    assert chunks(device, "second")[:-1] == [], "it began before the first was through"


def test_tokens_whose_logits_are_all_made_count_as_such() -> None:
    engine, device = make(StepCostModel(token=0.001, logits=0.01))
    begin(engine, device, 1)
    engine.add(make_request("logprobs", prompt(100, 50), 1, prompt_logprobs=0))
    until_written(engine, "logprobs")
    assert max(chunks(device, "logprobs")) < PROMPT_LOGPROB_CHUNK
    assert max(COSTS.seconds(plan.work) for plan in device.plans) <= STEP


def test_a_device_slower_than_measured_is_learnt() -> None:
    engine, device = make(slower=3.0)
    begin(engine, device, 4)
    for n in range(4):
        engine.add(make_request(f"p{n}", prompt(1800, 50 + n), 1))
    until_written(engine, "p3")
    seconds = [3.0 * COSTS.seconds(plan.work) for plan in device.plans]
    assert seconds[0] > 2 * STEP
    predictor = engine.scheduler.predictor
    for plan, took in zip(device.plans[-10:], seconds[-10:], strict=True):
        assert predictor.seconds(plan.decodes, plan.prompts) == pytest.approx(took, rel=0.1)
        assert took <= 1.1 * max(STEP, STRETCH_FACTOR * predictor.seconds(plan.decodes))


def test_decodes_that_were_measured_far_too_slow_do_not_keep_prompts_from_going_on() -> None:
    engine, device = make(StepCostModel(token=0.07, logits=0.2))
    device.truth = COSTS
    begin(engine, device, 4)
    for _ in range(50):
        engine.step()
    for n in range(4):
        engine.add(make_request(f"p{n}", prompt(1800, 50 + n), 1))
    until_written(engine, "p3")
    seconds = [COSTS.seconds(plan.work) for plan in device.plans]
    assert max(seconds) <= 1.3 * STEP
    assert min(seconds[-11:-1]) > 0.8 * STEP


@settings(deadline=None, max_examples=40)
@given(
    costs=st.builds(StepCostModel, st.floats(0, 0.3), st.floats(0, 0.05), st.floats(0, 0.05), st.floats(0, 1e-3)),
    lengths=st.lists(st.integers(2, 120), min_size=1, max_size=8),
    budget=st.integers(8, 64),
)
def test_with_any_costs_all_sequences_end_and_every_step_keeps_both_limits(
    costs: StepCostModel, lengths: Sequence[int], budget: int
) -> None:
    engine, device = make(costs, budget=budget)
    log = run(engine, *(make_request(f"r{n}", prompt(length, n + 1), 6) for n, length in enumerate(lengths)))
    assert all(log[f"r{n}"].ended for n in range(len(lengths)))
    nothing_is_held(engine)
    for plan in device.plans:
        assert plan.num_tokens <= budget
        decodes = plan.decodes.tokens
        allowed = max(STEP, STRETCH_FACTOR * costs.seconds(plan.decodes))
        assert plan.num_tokens - decodes <= BLOCK or costs.seconds(plan.work) <= allowed * 1.001


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_a_step_of_no_time_is_refused(seconds: float) -> None:
    with pytest.raises(InvalidConfig) as refused:
        Limits(step_seconds=seconds)
    assert refused.value.field == "step_seconds"
