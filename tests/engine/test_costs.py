from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from decant.engine.costs import NO_WORK, StepCostModel, StepTimePredictor, StepWork, chunk

COSTS = st.builds(
    StepCostModel,
    fixed=st.floats(0, 0.1),
    token=st.floats(0, 0.1),
    logits=st.floats(0, 0.1),
    pair=st.floats(0, 1e-3),
)
ROUNDING = 1e-9


def added_seconds(costs: StepCostModel, work: StepWork) -> float:
    return costs.seconds(work) - costs.fixed


@settings(deadline=None)
@given(COSTS, st.floats(0, 10), st.integers(0, 100_000), st.integers(1, 4096), st.booleans())
def test_the_tokens_within_a_time_fit_and_one_more_does_not(
    costs: StepCostModel, seconds: float, context: int, most: int, all_logits: bool
) -> None:
    fitting = costs.max_tokens_within(seconds, context, most, all_logits=all_logits)
    assert 0 <= fitting <= most
    if fitting:
        assert added_seconds(costs, chunk(context, fitting, all_logits=all_logits)) <= seconds + ROUNDING
    if fitting < most:
        assert added_seconds(costs, chunk(context, fitting + 1, all_logits=all_logits)) >= seconds - ROUNDING


@pytest.mark.slow
@settings(deadline=None)
@given(COSTS, st.floats(0, 10), st.integers(0, 10_000), st.integers(1, 10_000))
def test_fewer_tokens_fit_behind_a_longer_context(
    costs: StepCostModel, seconds: float, context: int, further: int
) -> None:
    near, far = (costs.max_tokens_within(seconds, start, 4096) for start in (context, context + further))
    assert far <= near
    assume(near > 1 and added_seconds(costs, chunk(context + further, near)) > seconds + ROUNDING)
    assert far < near


@given(st.integers(0, 500), st.integers(1, 500))
def test_a_chunks_pairs_are_what_each_of_its_tokens_sees(context: int, tokens: int) -> None:
    assert chunk(context, tokens).pairs == sum(context + place for place in range(1, tokens + 1))


@given(st.integers(0, 500), st.integers(1, 200), st.integers(1, 200))
def test_the_work_of_a_prompt_is_that_of_its_chunks(context: int, first: int, second: int) -> None:
    parts = chunk(context, first).plus(chunk(context + first, second))
    assert parts._replace(logits=1) == chunk(context, first + second)


def test_costs_of_zero_count_as_unknown() -> None:
    assert StepCostModel().max_tokens_within(0.25, 100_000, 512) == 512


# -- kept true --------------------------------------------------------------------------------------------------

DECODES, PROMPT = StepWork(8, 8, 4_000), StepWork(248, 1, 36_000)
MEASURED = StepCostModel(0.03, 0.001, 0.001, 1e-7)


def step_seconds(truth: StepCostModel, decodes: StepWork, prompts: StepWork) -> float:
    return truth.seconds(decodes.plus(prompts))


def teach(predictor: StepTimePredictor, truth: StepCostModel, times: int = 60) -> None:
    for _ in range(times):
        predictor.note(DECODES, PROMPT, step_seconds(truth, DECODES, PROMPT))
        predictor.note(DECODES, NO_WORK, truth.seconds(DECODES))


def slower(times: float) -> StepCostModel:
    return StepCostModel(MEASURED.fixed * times, MEASURED.token * times, MEASURED.logits * times, MEASURED.pair * times)


@pytest.mark.parametrize(
    "truth", [slower(0.25), slower(0.8), MEASURED, slower(1.3), slower(4), StepCostModel(0.2, 3e-4, 0.01, 0)]
)
def test_a_forecast_comes_to_what_steps_take_with_prompts_and_without(truth: StepCostModel) -> None:
    predictor = StepTimePredictor(MEASURED)
    teach(predictor, truth, 150)
    assert predictor.seconds(DECODES, PROMPT) == pytest.approx(step_seconds(truth, DECODES, PROMPT), rel=0.03)
    assert predictor.seconds(DECODES) == pytest.approx(truth.seconds(DECODES), rel=0.03)


def test_prefill_only_steps_are_enough_to_learn() -> None:
    truth, predictor = MEASURED, StepTimePredictor(StepCostModel(0.3, 0.001, 0.01, 1e-7))
    for _ in range(100):
        predictor.note(DECODES, PROMPT, step_seconds(truth, DECODES, PROMPT))
    assert predictor.seconds(DECODES, PROMPT) == pytest.approx(step_seconds(truth, DECODES, PROMPT), rel=0.03)


def test_an_outlier_changes_the_predicted_step_time_for_a_few_steps_only() -> None:
    predictor = StepTimePredictor(MEASURED)
    usual = predictor.max_tokens_within(0.25, 1000, 4096)
    predictor.note(DECODES, PROMPT, 10.0)
    assert predictor.max_tokens_within(0.25, 1000, 4096) > 0.85 * usual
    for _ in range(5):
        predictor.note(DECODES, PROMPT, step_seconds(MEASURED, DECODES, PROMPT))
    assert predictor.max_tokens_within(0.25, 1000, 4096) > 0.96 * usual


@pytest.mark.slow
@given(st.lists(st.tuples(st.floats(0, 100), st.booleans()), max_size=100))
def test_estimates_converge_to_the_true_costs(noted: list[tuple[float, bool]]) -> None:
    predictor = StepTimePredictor(MEASURED)
    for seconds, run_alone in noted:
        predictor.note(DECODES, NO_WORK if run_alone else PROMPT, seconds)
    teach(predictor, MEASURED, len(noted) + 60)
    assert predictor.seconds(DECODES, PROMPT) == pytest.approx(step_seconds(MEASURED, DECODES, PROMPT), rel=0.05)
    assert predictor.seconds(DECODES) == pytest.approx(MEASURED.seconds(DECODES), rel=0.05)
