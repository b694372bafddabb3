from typing import Any

import pytest

from bench import medians
from bench.comparison.metrics import Served, summarise
from bench.comparison.roofline import Rates, Weights
from bench.comparison.table import Line, allowed

WEIGHTS = Weights(body=100, head=50, table=50, itemsize=2)
RATES = Rates(bandwidth=1000.0, products=4000.0)
"""Reading all takes 0.3 s, the body alone 0.2 s; a token's body takes 0.05 s, a row of the head 0.025 s."""


@pytest.mark.parametrize(
    ("tokens", "rows", "seconds"),
    [
        (1, 1, 0.3),  # bound by reads
        (4, 4, 0.3),  # both bounds are equal
        (8, 8, 0.6),  # bound by multiplication
        (2, 0, 0.2),  # no sampled rows: the head is not read
        (10, 0, 0.5),  # and not multiplied
        (10, 1, 0.525),  # one row of the head beside a chunk of a prompt
    ],
)
def test_a_step_takes_the_longer_of_reading_and_multiplying(tokens: int, rows: int, seconds: float) -> None:
    assert RATES.seconds(WEIGHTS, tokens, rows) == pytest.approx(seconds)


def test_a_tied_table_is_held_beside_the_head() -> None:
    assert WEIGHTS.held == 400


def figures(**more: Any) -> dict[str, Any]:
    weights = {"body": 100, "head": 50, "table": 50, "itemsize": 2}
    schedule = [[1.0, 10, 1], [2.0, 1, 1], [4.0, 10, 0], [6.0, 10, 1], [7.0, 8, 8]]
    return {"weights": weights, "schedule": schedule, "total_output_tokens": 11, **more}


def test_a_run_is_allowed_what_its_own_steps_are() -> None:
    least = allowed(RATES, figures(), last_sent=0.0)
    assert least is not None
    assert set(least) == {"output_throughput"}
    assert least["output_throughput"] == pytest.approx(11 / (0.525 + 0.3 + 0.5 + 0.525 + 0.6))


def test_the_last_request_waits_for_the_steps_since_its_arrival() -> None:
    least = allowed(RATES, figures(last_ttft_ms=3000.0), last_sent=3.0)
    assert least is not None
    assert least["last_ttft_ms"] == pytest.approx(1e3 * (0.5 + 0.525))
    assert least["longest_step_ms"] == pytest.approx(600)


def test_mixture_of_experts_models_have_no_bandwidth_limit() -> None:
    assert allowed(RATES, figures(weights=None), last_sent=0.0) is None


def test_lower_times_and_higher_rates_are_better() -> None:
    slow, fast = Line("", "ms", measured=20.0, limit=10.0, share_goal=0.6), Line("", "tok/s", 20.0, 10.0, 0.6)
    assert (slow.share, slow.met) == (0.5, False)
    assert (fast.share, fast.met) == (2.0, True)
    assert (Line("", "s", None, 1.0, 0.5).met, Line("", "s", 1.0, 0.5).met) == (None, None)
    assert [Line("", "%", value, most=4.0).met for value in (3.9, 4.1)] == [True, False]


def test_the_gap_that_counts_is_that_of_the_others_once_the_last_came() -> None:
    others = [Served("a", 1, 0.0, [1.0, 3.0, 3.5, 4.5]), Served("b", 1, 0.0, [1.0, 4.25])]
    late = Served("late", 1, 3.2, [6.2, 16.2])
    summary = summarise([*others, late])
    assert summary["max_itl_after_last_ms"] == pytest.approx(3250)
    assert summary["last_ttft_ms"] == pytest.approx(3000)
    assert summarise([others[0], Served("late", 1, 5.0, [6.0])])["max_itl_after_last_ms"] is None
    assert "last_ttft_ms" not in summarise(others)


def test_medians_are_taken_of_numbers_wherever_they_are() -> None:
    runs = [{"case": {"s": value, "name": "n"}, "steps": [value]} for value in (3.0, 1.0, 2.0)]
    assert medians.of(runs) == {"case": {"s": 2.0, "name": "n"}, "steps": [3.0]}


def test_the_run_of_median_throughput_is_reported_beside_the_figures_of_each() -> None:
    runs = [{"output_throughput": rate, "peak_rss_bytes": 10**9 * rate, "requests": [rate]} for rate in (3, 1, 2)]
    chosen = medians.run_of_median(runs)
    assert (chosen["output_throughput"], chosen["requests"], chosen["peak_rss_gb"]) == (2, [2], 3)
    assert [run["output_throughput"] for run in chosen["runs"]] == [3, 1, 2]
    assert all("requests" not in run for run in chosen["runs"])
