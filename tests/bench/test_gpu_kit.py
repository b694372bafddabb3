"""What runs first on a GPU, rehearsed without one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytest.importorskip("triton")

from bench.gpu import __main__ as goals

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "bench/gpu/first_run.sh"
PARTS = ["environment", "correctness", "kernels", "goals", "queue"]
PACKAGES = ("torch", "triton", "transformers", "numpy", "pytest")


def packages_with_needs(names: tuple[str, ...]) -> set[str]:
    """The packages and what they require, without extras."""
    found, waiting = set[str](), list(names)
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in found:
            continue
        found.add(name)
        try:
            needs = [Requirement(text) for text in metadata.requires(name) or ()]
        except metadata.PackageNotFoundError:
            continue
        waiting += [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    return found


def other_modules() -> set[str]:
    """Modules of this environment that a machine with ``PACKAGES`` alone lacks."""
    packages = packages_with_needs(PACKAGES)
    others = {
        module
        for module, owners in metadata.packages_distributions().items()
        if not packages & {canonicalize_name(owner) for owner in owners}
    }
    return others - {"bench", "decant", "tests"}


def run(out: Path, python: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = os.environ | {"PYTHON": str(python), "OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "0"} | environment
    command = ["bash", str(SCRIPT), str(out), *arguments]
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=600)


@pytest.mark.slow
def test_the_first_run_is_rehearsed_on_a_cpu_with_the_packages_of_the_kit_alone(tmp_path: Path) -> None:
    """It collects every test that runs on a GPU, runs some, and times every kernel."""
    blocked = sorted(other_modules())  # an import of a module that is None finds none
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules |= dict.fromkeys({blocked})\n")
    out = tmp_path / "out"
    options = {"PYTHONPATH": str(tmp_path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = run(out, Path(sys.executable), "--rehearse", **options)
    assert done.returncode == 0, done.stdout[-3000:]
    summary = (out / "summary.txt").read_text().splitlines()
    assert [line.partition(" after")[0] for line in summary] == [f"{name}: exit status 0" for name in PARTS[:3]]
    ended = re.search(r"(\d+) passed, (\d+) deselected", (out / "correctness.log").read_text())
    assert ended
    assert int(ended[1]) >= 9
    assert int(ended[2]) >= 200
    rows = json.loads((out / "kernels.json").read_text())["rows"]
    assert not [row for row in rows if row["why"]]
    assert all(row["share"] > 0 for row in rows)
    names = " ".join(row["name"] for row in rows)
    assert all(
        part in names for part in ("attend 1x", "prompt", "torch down", "exact down", "rotate", "draw", "fp8 gate")
    )


def test_a_part_that_fails_leaves_the_others_their_results(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$@"\ncase "$*" in *gpu.kernels*) exit 3;; esac\n')
    python.chmod(0o755)
    done = run(tmp_path / "out", python)
    assert done.returncode == 1
    summary = (tmp_path / "out/summary.txt").read_text()
    assert [line.partition(" after")[0] for line in summary.splitlines()] == [
        f"{name}: exit status {3 if name == 'kernels' else 0}" for name in PARTS
    ]
    for name in ("goals", "queue"):
        arguments = (tmp_path / f"out/{name}.log").read_text().split()
        assert arguments[:2] == ["-m", "bench.gpu"]
        options = goals.make_parser().parse_args(arguments[2:])
        assert options.device == "cuda"
        assert set(options.parts.split(",")) < set(goals.PARTS)
        assert options.json.endswith(f"out/{name}.json")
    tested = (tmp_path / "out/correctness-7.log").read_text()
    assert "test_attention" in tested
    assert "test_compiling" not in tested


def test_the_limits_of_the_parts_are_less_than_eight_minutes() -> None:
    lines = [line.split() for line in SCRIPT.read_text().splitlines() if line.strip().startswith("part ")]
    assert [line[1] for line in lines] == PARTS
    assert sum(int(line[2]) for line in lines) < 480
