from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.gpu import __main__ as command
from bench.gpu import shapes
from bench.gpu.idle import gaps_share
from bench.gpu.rows import Row, measure


@pytest.mark.slow
def test_a_tiny_model_is_measured_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.json"
    monkeypatch.setattr("bench.gpu.ceilings.RUNS", 1)
    assert command.main(["--device", "cpu", "--tiny", "--json", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result["note"] == "a tiny model: the figures mean nothing"
    assert result["bandwidth_gb_s"] > 0
    assert result["product_tflop_s"] > 0
    rows = {row["name"]: row for row in result["rows"]}
    unmeasured = {name for name, row in rows.items() if row["value"] is None}
    assert all(name.startswith(("device idle", "transformers")) for name in unmeasured), rows
    assert len(rows) == 11
    assert all(row["value"] is None or row["value"] > 0 for row in rows.values())


@pytest.mark.slow
def test_the_command_needs_no_package_of_the_servers() -> None:
    loaded = "import sys, bench.gpu.__main__; print(*{name.partition('.')[0] for name in sys.modules})"
    run = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, timeout=120, check=True)
    servers = {"grpc", "redis", "pydantic", "structlog", "xxhash", "prometheus_client", "cryptography"}
    assert not servers & set(run.stdout.split())


def test_a_part_that_fails_or_is_late_is_a_row_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    class Broken:
        def parts(self) -> object:
            return {"decode": lambda: (_ for _ in ()).throw(RuntimeError("no kernel image"))}

    (row,) = measure(Broken(), ["decode"], 60)  # type: ignore[arg-type]
    assert row.verdict == "not measured: RuntimeError: no kernel image"
    (row,) = measure(Broken(), ["decode"], -1)  # type: ignore[arg-type]
    assert row.verdict == "not measured: -1 s were over"
    assert "not measured" in command.line(row)
    with pytest.raises(SystemExit):
        command.main(["--parts", "decode,other"])
    assert "got other" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "is_most", "verdict"), [(0.8, False, "reached"), (0.4, False, "missed"), (0.4, True, "reached")]
)
def test_a_figure_is_compared_with_its_limit(value: float, is_most: bool, verdict: str) -> None:
    assert Row("r", value, "", 0.5, is_most=is_most).verdict == verdict


def test_idle_time_is_what_no_kernel_covers() -> None:
    assert gaps_share([(0, 4), (2, 5), (10, 12), (11, 20)]) == pytest.approx(0.25)
    assert gaps_share([]) == 0.0


def test_bytes_and_products_of_a_step_are_those_of_the_shape() -> None:
    model = shapes.make_model("tiny", 64, torch.device("cpu"))
    layer = 64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 128
    assert shapes.products(model) == 2 * (2 * layer + 64 * 512)
    assert shapes.weight_bytes(model) == 2 * (2 * (layer + 2 * 64) + 64 + 64 * 512)
    assert shapes.kv_bytes(model, 10) == 10 * 2 * 2 * 2 * 16 * 2
