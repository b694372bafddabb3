import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from bench import engine, machine, workloads
from bench.comparison import subprocess_runner as child
from bench.comparison.subprocess_runner import ChildFailed
from bench.engine import Bench
from bench.workloads import Item
from tests.bench import fork_server as forked

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]

KEYS = {
    "duration",
    "completed",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "output_throughput",
    *(f"{kind}_{name}_ms" for kind in ("mean", "median", "p99") for name in ("ttft", "tpot", "itl", "e2el")),
    "steps",
    "mean_batch",
    "peak_rss_bytes",
}


def bench(*arguments: str | Path, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bench.engine", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "GOMP_SPINCOUNT": "0", "COLUMNS": "200"},
        text=True,
        capture_output=True,
        timeout=timeout,
    )


@pytest.fixture(scope="module")
def measured(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("bench") / "w.jsonl"
    lengths = [(20, 6), (9, 3), (33, 5), (4, 1)]
    items = [Item(f"r{n}", list(range(prompt)), output, 0.0) for n, (prompt, output) in enumerate(lengths)]
    workloads.write([*items, Item("late", [1, 2, 3], 4, 0.3)], path)
    options = ("--threads", "1", "--no-limits", "--batch-size", "2", "--static-batches", "2", "--kv-bytes", "4000000")
    command = ["engine", "--model", str(tiny), "--workload", str(path), "--json", "-", *options]
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as output:
        patch.setattr(child, "run", forked.run)
        patch.setattr("signal.signal", lambda *_: None)
        patch.setattr(sys, "argv", command)
        assert engine.main() == 0
    result: dict[str, Any] = json.loads(output.getvalue())
    return result


def test_both_contenders_answer_everything(measured: dict[str, Any]) -> None:
    assert set(measured["contenders"]) == {"decant", "static"}
    for figures in measured["contenders"].values():
        assert set(figures) >= KEYS
        assert figures["completed"] == 5
        assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (69, 19)
        assert [request["output_len"] for request in figures["requests"]] == [6, 3, 5, 1, 4]
        assert figures["requests"][4]["sent_ms"] == 300
        assert figures["peak_rss_bytes"] > 50e6


def test_static_batches_are_run_to_the_longest_and_the_report_says_what_was_run(measured: dict[str, Any]) -> None:
    static = measured["contenders"]["static"]
    assert (static["batches"], static["measured_batches"]) == (3, 2)
    assert static["steps"] == 6 + 5 + 4
    assert static["mean_batch"] == pytest.approx(19 / 15)


def test_the_engine_batches_continuously_and_its_bookkeeping_is_reported(measured: dict[str, Any]) -> None:
    ours = measured["contenders"]["decant"]
    assert ours["steps"] <= 6 + 4
    assert 0 < ours["median_outside_model_ms"] < ours["median_step_ms"]
    assert ours["max_model_ms"] <= ours["max_step_ms"]


def test_the_report_has_the_machine_and_the_ratio(measured: dict[str, Any]) -> None:
    rates = {name: figures["output_throughput"] for name, figures in measured["contenders"].items()}
    assert measured["ratio"]["output_throughput"] == pytest.approx(rates["decant"] / rates["static"])
    assert set(measured["machine"]) >= {"cpu", "flags", "cores", "torch", "transformers", "date"}
    assert (measured["threads"], measured["dtype"], measured["num_prompts"]) == (1, "bfloat16", 5)


@pytest.mark.parametrize(
    ("model", "workload", "summary"),
    [("nowhere", "exponential", "neither a checkpoint"), (None, "bad.jsonl", "line 1: output_len")],
)
def test_an_unavailable_baseline_is_reported_in_one_line(
    model: str | None, workload: str, summary: str, tiny: Path, tmp_path: Path
) -> None:
    bad = {"id": "a", "prompt_token_ids": [1], "output_len": 0, "arrival_s": 0}
    (tmp_path / "bad.jsonl").write_text(json.dumps(bad))
    path = tmp_path / workload if workload.endswith("jsonl") else workload
    run = bench("--model", model or tiny, "--workload", path)
    assert run.returncode == 1
    assert summary in " ".join(run.stderr.split())
    assert "Traceback" not in run.stderr


def test_measurements_are_kept_when_a_later_one_fails(tiny: Path, tmp_path: Path, monkeypatch: Any) -> None:
    def workload(_: Bench, name: str) -> dict[str, Any]:
        if name == "mixed":
            raise ChildFailed("bench.comparison.own_engine", -9, "")
        return {"num_prompts": len(name)}

    out = tmp_path / "out.json"
    monkeypatch.setattr(Bench, "_part", lambda *_: {"rate": 1.0})
    monkeypatch.setattr(Bench, "workload", workload)
    monkeypatch.setattr(sys, "argv", ["engine", "--model", str(tiny), "--runs", "1", "--json", str(out)])
    assert engine.main() == 1
    kept = json.loads(out.read_text())
    assert kept["workloads"] == {"exponential": {"num_prompts": 11}, "long-prompts": {"num_prompts": 12}}
    assert kept["steps"] == {"rate": 1.0, "limits": {"rate": 1.0}}


def test_limits_are_rates() -> None:
    assert machine.read_bandwidth(1 << 20) > 1e6
    assert machine.product_rate("float32", (8, 16, 32)) > 1e3
