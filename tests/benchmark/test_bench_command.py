from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.deployment import deployment
from tests.e2e.fork_server import completed

COMMAND = [sys.executable, "-P", "-m", "decant.command", "bench"]
SMALL = ("--prompt-tokens", "20-40", "--output-tokens", "8", "--requests", "12", "--warm-up", "1")

VLLM_KEYS = {
    *("label", "endpoint_type", "tokenizer_id", "start_times", "max_output_tokens_per_s", "max_concurrent_requests"),
    *("date", "backend", "model_id", "num_prompts", "request_rate", "burstiness", "max_concurrency", "duration"),
    *("completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput", "request_goodput"),
    *("output_throughput", "total_token_throughput", "input_lens", "output_lens", "ttfts", "itls", "errors"),
    *(f"{column}_{name}_ms" for name in ("ttft", "tpot", "itl", "e2el") for column in ("mean", "median", "std", "p99")),
}


pytestmark = pytest.mark.slow


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return completed("decant.command", "bench", *arguments, timeout=600)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with deployment(dtype="auto", handoff_min_tokens=None) as running:
        yield running.address


def measured(address: str, *arguments: str) -> dict[str, Any]:
    done = bench("--address", address, "--json", *arguments)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_up_starts_a_deployment_and_prints_tables_and_the_answer() -> None:
    """The logs of 250 requests fill a pipe twice. A prefill worker, as by default, would be one more start of torch."""
    workers = ("--prefill", "0", "--decode", "1")
    options = ("--up", *workers, "--rate", "100", "--slo", "ttft=30s,tpot=10s", *SMALL, "--requests", "250")
    done = subprocess.run([*COMMAND, *options], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    for text in ("250 completed, 0 failed", "TTFT", "100% of the requests meet"):
        assert text in done.stdout
    assert "keeps TTFT p99 under 30000 ms and TPOT p99 under 10000 ms at 100 requests/s" in done.stdout


def test_tables_have_the_parts_of_the_time_to_the_second_token(address: str) -> None:
    done = bench("--address", address, "--rate", "50", *SMALL)
    assert done.returncode == 0, done.stderr
    for text in ("12 completed, 0 failed", "TTFT", "second token", "handoff"):
        assert text in done.stdout


def test_an_open_loop_has_the_keys_of_vllm_and_forced_lengths(address: str) -> None:
    run = measured(address, "--rate", "50", *SMALL)
    assert set(run) >= VLLM_KEYS
    assert (run["completed"], run["failed"], run["request_rate"]) == (12, 0, 50.0)
    assert run["output_lens"] == [8] * 12
    assert all(20 <= length <= 40 for length in run["input_lens"])
    assert all(ttft > 0 for ttft in run["ttfts"])
    assert all(len(gaps) == 7 for gaps in run["itls"])
    assert run["mean_prefill_ms"] > 0
    assert run["p50_ttft_ms"] <= run["p99_ttft_ms"] <= run["max_e2el_ms"]


def test_a_closed_loop_has_as_many_requests_at_a_time_as_clients(address: str, tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    run = measured(address, "--concurrency", "1", "--html", str(report), *SMALL)
    assert run["sentence"] in report.read_text()
    assert run["max_concurrency"] == 1
    # one after another: the latencies add up
    assert run["duration"] * 1e3 >= 12 * run["mean_e2el_ms"] * 0.999


def test_a_shared_prefix_is_found_in_the_cache(address: str) -> None:
    run = measured(address, "--concurrency", "1", "--prefix-tokens", "128", *SMALL)
    assert run["total_cached_tokens"] >= 8 * 112
    assert "of the prompt tokens were cached" in run["sentence"]


def test_each_call_has_prompts_that_no_worker_has_cached_unless_its_seed_is_repeated(address: str) -> None:
    first, second = (measured(address, "--concurrency", "1", *SMALL) for _ in range(2))
    assert first["total_cached_tokens"] == second["total_cached_tokens"] == 0
    assert first["seed"] != second["seed"]
    again = measured(address, "--concurrency", "1", "--seed", str(first["seed"]), *SMALL)
    assert again["input_lens"] == first["input_lens"]
    assert again["total_cached_tokens"] > 0.1 * again["total_input_tokens"]
    assert again["sentence"].endswith(" % of the prompt tokens were cached".replace(" %", "%"))


def test_a_trace_is_sent_at_its_times(address: str, tmp_path: Path) -> None:
    def write(gap_s: float) -> str:
        lines = [
            {"id": f"{n}", "prompt_token_ids": [5, 6, n], "output_len": 2, "arrival_s": n * gap_s} for n in range(3)
        ]
        trace.write_text("\n".join(map(json.dumps, lines)))
        return str(trace)

    trace = tmp_path / "trace.jsonl"
    run = measured(address, "--dataset", write(0.5), "--trace", "--warm-up", "1")
    assert run["completed"] == 3
    first, second, third = run["start_times"]
    lag = run["max_send_lag_ms"] / 1e3 + 1e-6
    assert second - first >= 0.5 - lag
    assert third - first >= 1.0 - lag
    assert run["trace"] is True
    hours = measured(address, "--dataset", write(3600.0))
    assert hours["completed"] == 3, "without --trace its times are not waited for"


def test_conversations_of_a_file_are_sent_as_text(address: str, tmp_path: Path) -> None:
    file = tmp_path / "sharegpt.json"
    turns = [{"from": "human", "value": "def add(a, b):"}, {"from": "gpt", "value": "    return a + b"}]
    too_long = [{"from": "human", "value": "x = 1\n" * 100_000}, turns[1]]
    file.write_text(json.dumps([{"conversations": too_long}, *[{"conversations": turns}] * 2]))
    run = measured(address, "--dataset", str(file))
    assert (run["completed"], run["not_sent"]) == (2, 0)
    assert run["input_lens"][0] > 3
    assert run["output_lens"][0] == run["output_lens"][1] > 2


def test_all_turns_of_a_conversation_are_sent_one_after_the_other(address: str, tmp_path: Path) -> None:
    file = tmp_path / "sharegpt.json"
    turns = [
        ("human", "def add(a, b):" * 4),
        ("gpt", "    return a + b"),
        ("human", "def sub(a, b):"),
        ("gpt", "x - y"),
    ]
    document = {"conversations": [{"from": role, "value": value} for role, value in turns]}
    file.write_text(json.dumps([document, document]))
    run = measured(address, "--dataset", str(file), "--multi-turn", "--warm-up", "0")
    assert (run["num_prompts"], run["completed"]) == (4, 4)
    first, second, _, _ = run["input_lens"]
    assert second > first
    # The second turn finds the first question in the prefix cache.
    assert run["total_cached_tokens"] >= 2 * (first // 16 * 16)
    # Each conversation is alone in its order: its second turn is sent after its first has ended.
    assert run["spans"][1][0] >= run["spans"][0][2]
    assert run["spans"][3][0] >= run["spans"][2][2]


def test_a_ramp_names_both_rates(address: str) -> None:
    run = measured(address, "--rate", "20", "--ramp-to", "60", "--slo", "ttft=60s", *SMALL)
    assert (run["completed"], run["ramp_to"]) == (12, 60.0)
    assert run["sentence"] == "keeps TTFT p99 under 60000 ms at 20 to 60 requests/s"


def test_a_sweep_ends_with_the_answer(address: str) -> None:
    run = measured(address, "--rate", "20", "--sweep", "--slo", "ttft=1ms", *SMALL)
    assert run["sentence"].startswith("does not keep TTFT p99 under 1 ms at 20 requests/s")


def test_failures_are_counted_by_reason_and_end_with_1(address: str) -> None:
    done = bench("--address", address, "--timeout", "0.001", "--json", *SMALL[:-1], "0")
    run = json.loads(done.stdout)
    assert done.returncode == 1
    assert (run["completed"], run["failed"]) == (0, 12)
    assert sum(run["errors_by_reason"].values()) == 12
    assert "DEADLINE_EXCEEDED" in run["errors_by_reason"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--prompt-tokens", "3000"), "prompt tokens: at most 2,048 with the output"),
        (("--rate", "-1"), "--rate: 1e-09 to 1e+09, got -1.0"),
        (("--up",), "--up, --address: one of them"),
        (("--dataset", "/nowhere.jsonl"), "--dataset: a file of JSON lines"),
    ],
)
def test_invalid_options_are_refused_in_one_line(address: str, arguments: tuple[str, ...], message: str) -> None:
    done = bench("--address", address, *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
