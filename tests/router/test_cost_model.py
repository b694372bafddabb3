from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from decant.router.placement.cost_model import NEVER, PrefillTransferCosts


@dataclass
class Harness:
    now: float = 0.0
    costs: PrefillTransferCosts = field(init=False)

    def __post_init__(self) -> None:
        self.costs = PrefillTransferCosts(lambda: self.now)

    def read(self, per_token: float, times: int = 4, *, beside: bool = False) -> None:
        for _ in range(times):
            self.costs.add_prefill(100, 100 * per_token, on_decode_worker=beside)

    def moved(self, fixed: float, per_token: float, sizes: tuple[int, ...] = (100, 200, 400, 800)) -> None:
        for tokens in sizes:
            self.costs.add_transfer(tokens, fixed + per_token * tokens)

    @property
    def threshold(self) -> int:
        return self.costs.handoff_min_tokens


def test_nothing_measured_or_one_side_alone_hands_everything_over() -> None:
    harness = Harness()
    assert harness.threshold == 0
    harness.moved(0.01, 0.0)
    assert harness.threshold == 0
    alone = Harness()
    alone.read(0.001)
    assert alone.threshold == 0


def test_the_threshold_is_where_moving_and_computing_cost_the_same() -> None:
    harness = Harness()
    harness.read(0.001)
    harness.moved(0.09, 0.0001)
    assert harness.threshold == pytest.approx(100, abs=1)


def test_prompts_of_one_length_give_a_fixed_cost() -> None:
    harness = Harness()
    harness.read(0.001)
    harness.moved(0.05, 0.0, sizes=(300, 300, 300))
    assert harness.threshold == pytest.approx(50, abs=1)


def test_where_a_token_moves_as_slowly_as_it_is_computed_nothing_is_handed_over() -> None:
    harness = Harness()
    harness.read(0.001)
    harness.moved(0.01, 0.002)
    assert harness.threshold == NEVER


def test_without_a_cost_beside_decodes_all_prompts_are_handed_over() -> None:
    harness = Harness()
    harness.read(0.001)
    harness.moved(0.0, 0.0)
    assert harness.threshold == 0


def test_the_cost_beside_answers_is_what_counts_once_it_is_known() -> None:
    harness = Harness()
    harness.read(0.001)
    harness.moved(0.1, 0.0)
    assert harness.threshold == pytest.approx(100, abs=1)
    harness.read(0.01, beside=True)
    assert harness.threshold == pytest.approx(10, abs=1)


def test_estimates_follow_changing_costs() -> None:
    harness = Harness()
    harness.read(0.001)
    harness.moved(0.1, 0.0, sizes=(100,) * 100)
    for _ in range(40):
        harness.costs.add_transfer(100, 0.02)
    assert harness.threshold == pytest.approx(20, rel=0.5)


def test_old_measurements_expire_within_minutes_and_are_taken_again() -> None:
    harness = Harness()
    harness.read(0.001, times=100)
    harness.moved(5.0, 0.0, sizes=(100,) * 100)
    assert harness.threshold > 1000, "without handoffs nothing is measured"
    for _ in range(60):
        harness.now += 10
        harness.read(0.001, times=1, beside=True)
    assert harness.threshold == 0
    harness.moved(0.01, 0.0, sizes=(100,))
    assert harness.threshold == pytest.approx(10, abs=1)


def test_a_negative_slope_counts_as_zero() -> None:
    harness = Harness()
    harness.read(0.001)
    harness.costs.add_transfer(100, 0.03)
    harness.costs.add_transfer(1000, 0.01)
    assert harness.threshold == pytest.approx(20, abs=1)
