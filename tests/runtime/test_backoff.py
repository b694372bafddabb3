from __future__ import annotations

from decant.runtime.backoff import Backoff


def test_a_backoff_doubles_up_to_its_longest() -> None:
    backoff = Backoff(first_s=0.5, longest_s=3.0)
    assert [backoff.seconds(failures) for failures in (1, 2, 3, 4, 5, 100_000)] == [0.5, 1.0, 2.0, 3.0, 3.0, 3.0]


def test_no_backoff_is_above_its_longest() -> None:
    assert Backoff(first_s=2.0, longest_s=1.0).seconds(1) == 1.0
