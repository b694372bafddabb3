from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from decant.bench import model_shapes
from decant.bench.batching import curve, experiment
from decant.command.app import app

BATCHING = ("bench", "batching")
COMMAND = [sys.executable, "-P", "-m", "decant.command", *BATCHING]


def batching(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=600, check=False)


@pytest.fixture
def short_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths in the same proportions as the published ones, in a quarter of the steps."""
    for name in ("QUEUE_PROMPT", "SHORT", "LONG", "EQUAL"):
        monkeypatch.setattr(experiment, name, getattr(experiment, name) // 4)
    monkeypatch.setattr(curve, "OUTPUT", curve.OUTPUT // 4)


@pytest.mark.slow
def test_the_small_model_is_measured_and_padding_costs_throughput(short_queues: None, tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    sizes = ("--requests", "32", "--caps", "64", "--prompt-tokens", "32", "--kv-tokens", "768")
    done = CliRunner().invoke(app, [*BATCHING, *sizes, "--threads", "1", "--json", "--html", str(report)])
    assert done.exit_code == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["model_id"] == "tiny-python"
    assert document["sentence"] in report.read_text()
    eighth = document["queues"][0]
    assert eighth["over_batch"]["slots"] == pytest.approx(256 / 67)
    runs, ratios = eighth["runs"], eighth["over_batch"]
    assert ratios["useful_per_step"] > 3
    shown = runs["continuous, paged"]["output_throughput"] / runs["static, padded to its batch"]["output_throughput"]
    assert ratios["throughput"] == pytest.approx(shown)


@pytest.mark.slow
def test_tables_are_printed_of_another_shape(
    short_queues: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    options = ("--model", "tiny", "--requests", "32", "--caps", "64", "--threads", "1")
    done = CliRunner().invoke(app, [*BATCHING, *options])
    assert done.exit_code == 0, done.stderr
    assert "continuous, paged, against static batches" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--caps", "x"), "--caps: whole numbers from 2, separated by commas, got x"),
        (("--model", "/nowhere"), "--model /nowhere: neither a checkpoint's folder nor one of"),
    ],
)
def test_invalid_options_are_refused_in_one_line(arguments: tuple[str, ...], message: str) -> None:
    done = batching(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_model_folder_with_other_content_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = model_shapes.cache_folder() / "tiny-0"
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    done = batching("--model", "tiny")
    assert (done.returncode, done.stderr) == (2, f"decant: folder: empty, or a checkpoint, got {folder}\n")
