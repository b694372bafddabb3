from __future__ import annotations

import pytest

from decant.router.placement.batch_rules import ASSUMED_TRANSFER_S, MARGIN, MAX_MOVES, BatchMove, expected_steps


@pytest.mark.parametrize(
    ("here", "there", "count"),
    [(6, 0, 3), (4, 0, 2), (3, 0, 0), (40, 36, 0), (40, 20, 8), (40, 19, 8), (12, 6, 3), (0, 0, 0)],
)
def test_half_of_a_large_difference_moves(here: int, there: int, count: int) -> None:
    assert BatchMove(here, there, 0.001).count == count <= MAX_MOVES


def test_no_number_of_moves_makes_the_other_batch_the_larger_one() -> None:
    for here in range(100):
        for there in range(here):
            count = BatchMove(here, there, 0.001).count
            assert here - count >= there + count


def test_a_move_is_worth_its_pause_when_the_steps_left_save_more() -> None:
    move = BatchMove(10, 0, 0.001)
    saved_s_per_step = 2 * 0.001 * 9
    enough = MARGIN * 0.5 / saved_s_per_step
    assert move.is_worth(int(enough) + 1, 0.5)
    assert not move.is_worth(int(enough), 0.5)
    assert move.is_worth(1000, None) == (1000 * saved_s_per_step > MARGIN * ASSUMED_TRANSFER_S)
    assert not BatchMove(10, 0, 0.0).is_worth(10**6, None), "without a measured cost of batches nothing is known"


def test_a_sequence_is_expected_to_go_on_for_as_long_as_it_has_within_its_limit() -> None:
    assert expected_steps(50, 1000) == 50
    assert expected_steps(50, 3) == 3
