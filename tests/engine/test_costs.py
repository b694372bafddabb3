"""What is said of a step's seconds: what is said to fit fits, longer contexts get less, and it is kept true."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.costs import Costs, Forecast, Work, chunk

COSTS = st.builds(
    Costs,
    fixed=st.floats(0, 0.1),
    token=st.floats(0, 0.1),
    logits=st.floats(0, 0.1),
    pair=st.floats(0, 1e-3),
)
ROUNDING = 1e-9


def more(costs: Costs, work: Work) -> float:
    """Seconds that this work adds to a step that is run anyway."""
    return costs.seconds(work) - costs.fixed


@settings(deadline=None)
@given(COSTS, st.floats(0, 10), st.integers(0, 100_000), st.integers(1, 4096), st.booleans())
def test_what_is_said_to_fit_fits_and_one_more_would_not(
    costs: Costs, seconds: float, context: int, most: int, explained: bool
) -> None:
    fitting = costs.fitting(seconds, context, most, explained=explained)
    assert 0 <= fitting <= most
    if fitting:
        assert more(costs, chunk(context, fitting, explained=explained)) <= seconds + ROUNDING
    if fitting < most:
        assert more(costs, chunk(context, fitting + 1, explained=explained)) >= seconds - ROUNDING


@settings(deadline=None)
@given(COSTS, st.floats(0, 10), st.integers(0, 10_000), st.integers(1, 10_000))
def test_less_fits_behind_a_longer_context_and_clearly_less_behind_one_that_costs(
    costs: Costs, seconds: float, context: int, further: int
) -> None:
    near, far = (costs.fitting(seconds, start, 4096) for start in (context, context + further))
    assert far <= near
    assume(near > 1 and more(costs, chunk(context + further, near)) > seconds + ROUNDING)
    assert far < near


@given(st.integers(0, 500), st.integers(1, 500))
def test_a_chunks_pairs_are_what_each_of_its_tokens_sees(context: int, tokens: int) -> None:
    assert chunk(context, tokens).pairs == sum(context + place for place in range(1, tokens + 1))


@given(st.integers(0, 500), st.integers(1, 200), st.integers(1, 200))
def test_the_work_of_a_prompt_is_that_of_its_chunks(context: int, first: int, second: int) -> None:
    parts = chunk(context, first).plus(chunk(context + first, second))
    assert parts._replace(logits=1) == chunk(context, first + second)


def test_nothing_is_known_of_costs_of_nought() -> None:
    assert Costs().fitting(0.25, 100_000, 512) == 512


# -- kept true --------------------------------------------------------------------------------------------------

STEP = Work(256, 1, 40_000)
SAID = Costs(0.03, 0.001, 0.001, 1e-7)


@pytest.mark.parametrize("truth", [0.25, 0.8, 1.0, 1.3, 4.0])
def test_a_forecast_comes_to_what_steps_take(truth: float) -> None:
    forecast = Forecast(SAID)
    for _ in range(60):
        forecast.note(STEP, truth * SAID.seconds(STEP))
    assert forecast.seconds(STEP) == pytest.approx(truth * SAID.seconds(STEP), rel=0.02)
    assert forecast.fitting(0.25, 0, 4096) == SAID.fitting(0.25 / forecast.factor, 0, 4096)


def test_a_machine_that_stood_still_is_forgotten_in_a_few_steps() -> None:
    forecast = Forecast(SAID)
    usual = forecast.fitting(0.25, 1000, 4096)
    forecast.note(STEP, 10.0)
    assert forecast.fitting(0.25, 1000, 4096) > 0.85 * usual
    for _ in range(5):
        forecast.note(STEP, SAID.seconds(STEP))
    assert forecast.fitting(0.25, 1000, 4096) > 0.96 * usual


@given(st.lists(st.floats(0, 100), max_size=200))
def test_whatever_is_noted_some_tokens_fit_again_once_steps_are_as_said(noted: list[float]) -> None:
    forecast = Forecast(SAID)
    for seconds in noted:
        forecast.note(STEP, seconds)
    assert math.isfinite(forecast.factor)
    for _ in range(len(noted) + 40):
        forecast.note(STEP, SAID.seconds(STEP))
    assert forecast.factor == pytest.approx(1.0, rel=0.05)
