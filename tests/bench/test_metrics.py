import pytest

from bench.baselines.static import Pace
from bench.comparison.metrics import Served, details, summarise
from bench.workloads import Item

TWO = [
    Served("a", 10, sent=1.0, tokens=[2.0, 2.5, 4.0]),  # ttft 1, e2el 3, tpot 1, itl 0.5 and 1.5
    Served("b", 30, sent=3.0, tokens=[5.0]),  # ttft 2, e2el 2, one token: neither tpot nor itl
]


def test_throughput_is_from_the_first_sending_to_the_last_token() -> None:
    summary = summarise(TWO)
    assert summary["duration"] == 4.0
    assert summary["completed"] == 2
    assert (summary["total_input_tokens"], summary["total_output_tokens"]) == (40, 4)
    assert summary["request_throughput"] == 0.5
    assert summary["output_throughput"] == 1.0
    assert summary["total_token_throughput"] == 11.0


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("mean_ttft_ms", 1500),
        ("median_ttft_ms", 1500),
        ("p99_ttft_ms", 1990),
        ("mean_e2el_ms", 2500),
        ("p99_e2el_ms", 2990),
        ("mean_tpot_ms", 1000),
        ("std_tpot_ms", 0),
        ("mean_itl_ms", 1000),
        ("median_itl_ms", 1000),
        ("p99_itl_ms", 1490),
        ("max_itl_ms", 1500),
    ],
)
def test_latencies_are_those_computed_by_hand(key: str, expected: float) -> None:
    assert summarise(TWO)[key] == pytest.approx(expected)


def test_gaps_are_pooled_and_requests_are_not_weighted() -> None:
    summary = summarise([Served("a", 1, 0.0, [1.0, 2.0, 3.0, 4.0]), Served("b", 1, 0.0, [1.0, 5.0])])
    assert summary["mean_itl_ms"] == pytest.approx((1 + 1 + 1 + 4) / 4 * 1e3)
    assert summary["mean_tpot_ms"] == pytest.approx((1 + 4) / 2 * 1e3)


def test_each_request_is_reported() -> None:
    first, second = details(TWO)
    assert (first["ttft_ms"], first["e2el_ms"], first["max_itl_ms"]) == (1000, 3000, 1500)
    assert (second["output_len"], second["max_itl_ms"]) == (1, 0)


def test_a_batch_is_predicted_by_its_padded_prompt_and_its_steps() -> None:
    pace = Pace()
    measured = [Item("a", [1] * 10, 3, 0.0), Item("b", [1] * 4, 1, 0.0)]
    pace.note(measured, [2.0, 2.1, 2.3])  # 20 padded tokens in 2 s, two steps of 0.15 s on average
    predicted = pace.predict([Item("c", [1] * 5, 1, 0.0), Item("d", [1] * 5, 4, 0.0)])
    assert predicted == pytest.approx([1.0, 1.15, 1.3, 1.45])
