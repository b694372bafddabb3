from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from decant import models
from decant.command.app import app

A100 = ["--shape", "layers=40,hidden=5120,heads=40,params=13B", "--device", "a100-40gb"]
COSTS = {"fixed": 0.001, "token": 0.0002, "logits": 0.0001, "pair": 1e-8}


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plan", *arguments])
    return result.exit_code, result.output


def plan(*arguments: str) -> dict[str, Any]:
    status, output = run(*arguments, "--json")
    assert status == 0, output
    document: dict[str, Any] = json.loads(output)
    return document


def test_the_plan_has_memory_steps_workers_and_a_sentence() -> None:
    status, output = run(*A100, "--slo", "ttft=2s,tpot=50ms", "--sequence-length", "512")
    assert status == 0
    for text in ("800.0 KiB", "sequences of 512 tokens", "TTFT p99", "decode workers", "within the objectives"):
        assert text in output


def test_json_has_the_figures_of_the_table() -> None:
    document = plan(*A100, "--sequence-length", "2048", "--prompt-tokens", "100", "--output-tokens", "10-30")
    assert document["memory"]["kv_bytes_per_token"] == 819200
    assert document["memory"]["sequences_of"] == {"2048": 7}
    assert document["workload"]["output"] == {"low": 10, "high": 30, "mean": 20}
    assert document["plan"]["prefill_workers"] >= 1


def test_options_change_what_they_name() -> None:
    base, faster = plan(*A100), plan(*A100, "--bandwidth", "3TB")
    assert faster["tpot_seconds"]["1"] == pytest.approx(base["tpot_seconds"]["1"] * 1555 / 3000)
    int8 = plan(*A100, "--quantization", "int8", "--kv-dtype", "int8")
    assert int8["memory"]["weights_bytes"] < 0.52 * base["memory"]["weights_bytes"]
    with_scales = (128 + 2) / 256  # of a key or value of 128 numbers, each of two bytes in bfloat16
    assert int8["memory"]["kv_bytes_per_token"] == with_scales * base["memory"]["kv_bytes_per_token"]
    adapted = plan(*A100, "--adapter-memory", "2G")
    assert adapted["memory"]["kv_bytes"] == base["memory"]["kv_bytes"] - (2 << 30)
    assert adapted["memory"]["adapter_bytes"] == 2 << 30
    assert plan(*A100, "--compute-efficiency", "0.3")["plan"]["prefill_mean"] == pytest.approx(
        2 * base["plan"]["prefill_mean"]
    )


@pytest.mark.slow
def test_a_profile_replaces_the_rates_and_is_accepted_again(tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps({"model": "m", "costs": COSTS}))
    arguments = ("--model", str(models.path()), "--memory", "1G", "--prompt-tokens", "500", "--output-tokens", "100")
    document = plan(*arguments, "--calibrate", str(profile))
    assert document["plan"]["prefill_mean"] == pytest.approx(0.001 + 0.1 + 0.0001 + 500 * 501 / 2 * 1e-8)
    again = tmp_path / "again.json"
    again.write_text(json.dumps(document))
    assert plan(*arguments, "--calibrate", str(again)) == document


@pytest.mark.slow
def test_this_machine_is_measured_with_the_worker_s_own_calibration() -> None:
    document = plan(
        *("--model", str(models.path()), "--memory", "1G", "--prompt-tokens", "500", "--output-tokens", "100"),
        *("--calibrate", "measure"),
    )
    assert document["profile"]["dtype"] == "bfloat16"
    assert document["tpot_seconds"]["1"] > 0
    assert any(document["profile"]["prefill"].values())
    measured = ("--model", str(models.path()), "--memory", "1G", "--calibrate", "measure")
    status, output = run(*measured, "--prompt-tokens", "500", "--output-tokens", "100", "--dtype", "float16")
    assert status == 1
    assert output.startswith("decant: dtype: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--model, --shape: one of them, got neither"),
        ([*A100, "--device", "tpu"], "--device: one of l4"),
        (A100[:2], "--device, --memory: one of them"),
        ([*A100[:2], "--memory", "80G"], "with --bandwidth and --flops, or with --calibrate"),
        ([*A100, "--rate", "0"], "--rate: requests per second above 0"),
        ([*A100, "--quantile", "1"], "--quantile"),
        ([*A100, "--memory-share", "1.5"], "--memory-share: above 0, at most 1, got 1.5"),
        ([*A100, "--dtype", "int3"], "--dtype: one of bfloat16"),
        ([*A100, "--calibrate", "/nowhere"], "--calibrate: `measure` or a readable file"),
        ([*A100, "--calibrate", "measure"], "--calibrate measure: --model with a folder"),
        (["--model", "/nowhere", "--device", "l4"], "--model: a folder or a config.json"),
        (["--model", str(models.path()), "--device", "l4"], "at most 2,048 tokens with the output"),
        ([*A100, "--device", "l4"], "memory: weights of 24.2 GiB need a device of more than"),
        ([*A100, "--memory", "9" * 400 + "T"], "--memory: a size such as 40GiB"),
        ([*A100, "--prompt-tokens", "9" * 5000], "--prompt-tokens: a number from 1"),
        ([*A100, "--slo", f"ttft={'9' * 400}s"], "--slo: ttft=500ms"),
        (["--shape", "layers=1,hidden=2,heads=3", "--device", "l4"], "hidden: at least 1 for each of 3 heads, got 2"),
        ([*A100, "--threads", "2"], "--threads: with --calibrate measure, got 2"),
        ([*A100, "--calibrate", "x", "--flops", "1T"], "--flops: without --calibrate, got 1T"),
        ([*A100, "--calibrate", "x", "--compute-efficiency", "0.5"], "--compute-efficiency: without --calibrate"),
        ([*A100, "--simulate", "9", "--prefixes", "2"], "--prefixes: with --prefix-tokens, got 2"),
    ],
)
def test_inputs_are_refused_in_one_line(arguments: list[str], message: str) -> None:
    status, output = run(*arguments)
    assert status == 1
    assert message in output
    assert output.count("\n") == 1


@pytest.mark.parametrize(
    "change", [dict.fromkeys(COSTS, 0), {"pair": "x"}, {"fixed": -1}, {"logits": None}, {"token": 10**400}]
)
def test_profiles_with_impossible_costs_are_refused(change: dict[str, object], tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps({"costs": {**COSTS, **change}}))
    status, output = run(*A100, "--calibrate", str(profile))
    assert status == 1
    assert "--calibrate costs" in output


@pytest.mark.parametrize("threads", [float("nan"), float("inf"), -1, 2.5, True, "4"])
def test_profiles_with_impossible_threads_are_refused(threads: object, tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps({"costs": COSTS, "threads": threads}))
    status, output = run(*A100, "--calibrate", str(profile), "--json")
    assert status == 1
    assert "--calibrate threads: a whole number from 0, got " in output


@pytest.mark.parametrize(
    ("options", "message"), [((*A100, "--calibrate"), "--calibrate"), (("--device", "l4", "--model"), "--model")]
)
def test_a_file_nested_too_deep_is_refused_in_one_line(options: tuple[str, ...], message: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text("[" * 200_000)
    status, output = run(*options, str(file))
    assert status == 1
    assert f"{message}: " in output
    assert output.count("\n") == 1


@pytest.mark.slow
def test_costs_of_each_pool_and_overheads_are_read_and_accepted_again(tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    slow = {**COSTS, "token": 0.0004}
    overheads = {
        "latency": 0.005,
        "handoff": 0.01,
        "sending": 1e-5,
        "contention": {"prefill": 1.5, "decode": 1.25, "handoff": 2},
    }
    profile.write_text(json.dumps({"prefill": COSTS, "decode": slow, **overheads}))
    document = plan(*A100, "--rate", "0.1", "--calibrate", str(profile))
    assert (document["profile"]["prefill"], document["profile"]["decode"]) == (COSTS, slow)
    assert {name: document["profile"][name] for name in overheads} == overheads
    profile.write_text(json.dumps(document))
    assert plan(*A100, "--rate", "0.1", "--calibrate", str(profile)) == document


@pytest.mark.parametrize(
    ("change", "message"),
    [({"latency": -1}, "latency"), ({"contention": {"decode": 0.5}}, "contention.decode"), ({"decode": 3}, "decode")],
)
def test_profiles_with_impossible_overheads_are_refused(
    change: dict[str, object], message: str, tmp_path: Path
) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps({"prefill": COSTS, "decode": COSTS, **change}))
    status, output = run(*A100, "--calibrate", str(profile))
    assert status == 1
    assert message in output


SIMULATED = (*A100, "--rate", "1", "--simulate", "40", "--slo", "ttft=2s,tpot=50ms")


def test_a_simulation_runs_the_planned_workers_and_is_part_of_the_json() -> None:
    document = plan(*SIMULATED, "--routers", "2", "--prefix-tokens", "800", "--prefixes", "2")
    simulated = document["simulation"]
    assert simulated["requests"] == 40
    assert 0.3 < simulated["cached_share"] < 0.6
    assert simulated["ttft"]["p50"] < document["plan"]["ttft"]
    assert simulated["tpot"]["p50"] == pytest.approx(document["plan"]["tpot"], rel=0.2)
    assert plan(*A100)["simulation"] is None


def test_a_simulation_of_single_tokens_has_no_tpot() -> None:
    status, output = run(*SIMULATED, "--output-tokens", "1", "--json")
    assert status == 0
    assert "NaN" not in output
    assert json.loads(output)["simulation"]["tpot"] == {"p50": None, "p90": None, "p99": None}
    assert "- / - / -" in run(*SIMULATED, "--output-tokens", "1")[1]


def test_a_simulation_is_shown_as_a_table() -> None:
    status, output = run(*SIMULATED, "--burstiness", "0.2")
    assert status == 0
    for text in ("simulated: 40 requests", "TTFT, p50 / p90 / p99", "busiest worker over the mean"):
        assert text in output


def test_a_simulated_trace_arrives_at_its_own_times(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,1000,5\n0.01,1000,5\n50,1000,5\n")
    simulated = plan(*A100, "--trace", str(trace), "--simulate", "99")["simulation"]
    assert simulated["requests"] == 3
    assert simulated["seconds"] > 50


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--routers", "2"), "--routers: with --simulate, got 2"),
        (("--prefix-tokens", "9"), "--prefix-tokens: with --simulate, got 9"),
        (("--simulate", "9", "--prefix-tokens", "1500"), "below the shortest prompt (1,500 tokens)"),
        (("--simulate", "9", "--burstiness", "0"), "--burstiness: 1e-09 to 1e+09, got 0"),
    ],
)
def test_options_of_a_simulation_that_cannot_be_are_refused(arguments: tuple[str, ...], message: str) -> None:
    status, output = run(*A100, *arguments)
    assert status == 1
    assert message in output
