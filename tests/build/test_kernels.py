from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from decant.engine.cpu.kernels import loader as native
from tests.kernel_builds import BUILDS, why_not

ROOT = Path(__file__).parents[2]


def test_without_a_choice_the_best_build_runs(record_property) -> None:
    record_property("kernels", native.kind())
    best = next(build for build in BUILDS if not why_not(build))
    assert native.kind().split()[-1] == BUILDS[best][1]


@pytest.mark.slow
def test_tests_do_not_begin_with_another_build_than_they_are_asked_for() -> None:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = inherited | {"DECANT_KERNELS": "avx512", "ATEN_CPU_CAPABILITY": "avx2"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, "tests/engine/test_step_batch.py"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "kernels" in done.stderr
    assert "passed" not in done.stdout
