from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest

from decant.bench.records import Record
from decant.bench.reports.figures import PERCENTILES, details, distribution, meets, percentile, summarise
from decant.bench.reports.verdict import bottleneck, missed, sentence
from decant.client.results import Receipt

RECEIPT = Receipt(queue_ms=40.0, prefill_ms=100.0)


def record(sent: float, tokens: Sequence[float], *, error: str = "", receipt: Receipt | None = RECEIPT) -> Record:
    return Record(sent, sent, 10, 4, list(tokens), error, receipt)


@pytest.mark.parametrize("count", [1, 2, 3, 50, 101])
def test_percentiles_and_moments_are_numpy_s(count: int) -> None:
    rng = Random(count)
    values = [rng.expovariate(1.0) for _ in range(count)]
    figures = distribution("x", values)
    expected = np.array(values) * 1e3
    assert figures["mean_x_ms"] == pytest.approx(expected.mean())
    assert figures["std_x_ms"] == pytest.approx(expected.std())
    assert figures["max_x_ms"] == expected.max()
    for percent in PERCENTILES:
        assert figures[f"p{percent}_x_ms"] == pytest.approx(np.percentile(expected, percent))
    assert figures["median_x_ms"] == figures["p50_x_ms"]


def test_no_values_give_zeros() -> None:
    assert percentile([], 99) == 0.0
    assert set(distribution("x", []).values()) == {0.0}


def test_figures_of_two_requests_are_those_computed_by_hand() -> None:
    runs = [record(0.0, [1.0, 1.5, 2.5]), record(1.0, [1.25])]
    figures = summarise(runs, {"ttft": 0.5})
    assert figures["duration"] == 2.5
    assert (figures["completed"], figures["failed"]) == (2, 0)
    assert (figures["total_input_tokens"], figures["total_output_tokens"], figures["total_cached_tokens"]) == (20, 4, 8)
    assert figures["request_throughput"] == pytest.approx(2 / 2.5)
    assert figures["output_throughput"] == pytest.approx(4 / 2.5)
    assert figures["total_token_throughput"] == pytest.approx(24 / 2.5)
    assert figures["mean_ttft_ms"] == pytest.approx((1000 + 250) / 2)
    assert figures["mean_tpot_ms"] == pytest.approx(750)  # the request of one token has none
    assert figures["mean_itl_ms"] == pytest.approx((500 + 1000) / 2)
    assert figures["mean_e2el_ms"] == pytest.approx((2500 + 250) / 2)
    assert figures["mean_second_token_ms"] == pytest.approx(500)
    assert figures["mean_tps"] == pytest.approx((3 / 2.5 + 1 / 0.25) / 2)
    assert figures["request_goodput"] == pytest.approx(1 / 2.5)
    assert figures["slo_attainment"] == 0.5
    assert figures["max_output_tokens_per_s"] == 3  # from 1.0 to 1.5
    assert figures["max_concurrent_requests"] == 2
    assert figures["mean_queue_ms"] == 40.0
    assert figures["max_handoff_ms"] == 0.0  # neither entered that phase


def test_failed_requests_count_by_reason_and_give_no_latency() -> None:
    runs = [record(0.0, [1.0, 2.0]), record(0.0, [9.0], error="QUEUE_FULL"), record(0.0, [], error="QUEUE_FULL")]
    figures = summarise(runs, {"ttft": 100.0})
    assert figures["errors_by_reason"] == {"QUEUE_FULL": 2}
    assert (figures["max_ttft_ms"], figures["total_output_tokens"], figures["duration"]) == (1000.0, 2, 2.0)
    assert figures["slo_attainment"] == pytest.approx(1 / 3)


def test_a_run_without_a_success_has_no_rates() -> None:
    figures = summarise([record(5.0, [], error="NO_WORKER")], {})
    assert (figures["duration"], figures["request_throughput"], figures["request_goodput"]) == (0.0, 0.0, None)
    assert (figures["max_output_tokens_per_s"], figures["max_concurrent_requests"]) == (0.0, 0)
    assert figures["p99_ttft_ms"] == figures["mean_tps"] == 0.0
    assert sentence([{"request_rate": 1.0, **figures}], {}) == "1 of 1 requests fail (NO_WORKER)"
    assert "does not keep" in sentence([{"request_rate": 1.0, **figures}], SLOS)


def test_one_request_of_one_token_has_figures() -> None:
    figures = summarise([record(1.0, [1.5])], SLOS)
    assert (figures["completed"], figures["max_concurrent_requests"], figures["output_throughput"]) == (1, 1, 2.0)
    assert figures["median_ttft_ms"] == figures["p99_ttft_ms"] == figures["max_ttft_ms"] == 500.0
    assert (figures["p99_tpot_ms"], figures["max_itl_ms"], figures["slo_attainment"]) == (0.0, 0.0, 1.0)


def test_requests_that_touch_are_not_concurrent_and_a_second_is_half_open() -> None:
    figures = summarise([record(0.0, [0.5, 1.0]), record(1.0, [1.5, 2.0])], {})
    assert (figures["max_concurrent_requests"], figures["max_output_tokens_per_s"]) == (1, 2)


def test_details_list_every_request_in_seconds() -> None:
    lists = details([record(1.0, [1.5, 2.5]), record(0.0, [], error="X")])
    assert lists == {
        "spans": [[1.0, 1.5, 2.5]],
        "input_lens": [10, 10],
        "output_lens": [2, 0],
        "start_times": [1.0, 0.0],
        "ttfts": [0.5, 0.0],
        "itls": [[1.0], []],
        "errors": ["", "X"],
    }


def test_an_objective_is_met_at_its_limit_and_missed_above_it() -> None:
    one = record(0.0, [0.5, 1.0])
    assert meets(one, {"ttft": 0.5, "tpot": 0.5, "e2el": 1.0})
    for name in ("ttft", "tpot", "e2el"):
        assert not meets(one, {name: 0.49})
    assert meets(record(0.0, [0.1]), {"tpot": 1e-9})


def run_at(rate: float, *, ttft: float = 0.1, tpot: float = 0.01, queue_ms: float = 0.0, **fails: str) -> dict:  # type: ignore[type-arg]
    receipt = Receipt(queue_ms=queue_ms, prefill_ms=50.0)
    records = [record(0.0, [ttft, ttft + tpot], receipt=receipt)]
    records += [record(0.0, [], error=reason, receipt=None) for reason in fails.values()]
    return {"request_rate": rate, **summarise(records, SLOS), "total_cached_tokens": 0}


SLOS = {"ttft": 0.5, "tpot": 0.05}
KEEPS = "keeps TTFT p99 under 500 ms and TPOT p99 under 50 ms"


@pytest.mark.parametrize(
    ("last", "reason"),
    [
        ({"ttft": 0.6, "queue_ms": 400.0}, "the prefill pool is full"),
        ({"ttft": 0.6, "queue_ms": 10.0}, "a prefill alone takes too long"),
        ({"tpot": 0.06}, "the decode pool is full"),
        ({"first": "QUEUE_FULL"}, "1 of 2 requests fail (QUEUE_FULL)"),
    ],
)
def test_the_answer_names_the_highest_rate_and_what_gives_way(last: dict[str, object], reason: str) -> None:
    runs = [run_at(2.0), run_at(5.6), run_at(6.0, **last)]  # type: ignore[arg-type]
    assert sentence(runs, SLOS) == f"{KEEPS} up to 5.6 requests/s; beyond that {reason}"
    assert missed(runs[-1], SLOS)
    assert bottleneck(runs[-1], SLOS) == reason


def test_the_answer_of_a_single_run_says_whether_it_keeps_them() -> None:
    assert sentence([run_at(2.0)], SLOS) == f"{KEEPS} at 2 requests/s"
    assert sentence([run_at(2.0, tpot=1.0)], SLOS).startswith("does not keep TTFT p99 under 500 ms and TPOT")
    assert "all requests at once" in sentence([run_at(float("inf"))], SLOS)
    assert sentence([run_at(2.0)], {}).startswith("9.09 requests/s and 18.2 output tokens/s, TTFT p99 100 ms")
    assert sentence([run_at(2.0, first="X")], {}).endswith("; 1 of 2 requests fail (X)")
    traced = {**run_at(float("inf")), "trace": True}
    assert sentence([traced], SLOS).endswith("at the times of the trace (9.09 requests/s)")


def test_the_answer_says_how_many_prompt_tokens_were_cached() -> None:
    few, many = ({**run_at(2.0), "total_input_tokens": 100, "total_cached_tokens": count} for count in (9, 60))
    assert sentence([few], SLOS) == f"{KEEPS} at 2 requests/s"
    assert sentence([many], SLOS) == f"{KEEPS} at 2 requests/s; 60% of the prompt tokens were cached"
    assert sentence([many], {}).endswith("; 60% of the prompt tokens were cached")
    assert sentence([few, many], SLOS).endswith("; up to 60% of a run's prompt tokens were cached")
