from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from decant.engine.cpu.kernels import loader as native
from tests.kernel_builds import BUILDS, OTHERS, why_not

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 1200

PARTS = (
    "tests/engine/test_parity.py",
    "tests/engine/test_bits.py",
    "tests/engine/conformance/",
    "tests/engine/conformance_handoff/",
    "tests/decant/test_up.py",
)
SELECTED = (
    "not fake"  # that engine has no kernels
    " and (not test_parity or llama or mistral or gemma2 or gpt2 or gpt_oss or qwen2_moe)"
    " and (not test_bits or small) and (not test_up or demo)"
)


def run(build: str, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-v", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments]
    environment = inherited | {"DECANT_KERNELS": build} | environ
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S - 20)


def test_without_a_choice_the_best_build_runs(record_property) -> None:
    record_property("kernels", native.kind())
    best = next(build for build in BUILDS if not why_not(build))
    assert native.kind().split()[-1] == BUILDS[best][1]


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("build", OTHERS)
def test_parity_both_laws_and_the_demo_hold_with(build: str, record_property) -> None:
    reason = why_not(build)
    record_property("kernels", f"{build} ({reason})" if reason else build)
    if reason:
        pytest.skip(f"{build}: {reason}")
    # One process for all parts: importing torch and transformers takes it longer than most of the tests.
    done = run(build, *PARTS, "-k", SELECTED)
    assert done.returncode == 0, done.stdout + done.stderr
    for part in PARTS:
        assert re.search(rf"^{part}.* PASSED", done.stdout, re.MULTILINE), f"{part}: no test ran\n{done.stdout}"


@pytest.mark.slow
def test_tests_do_not_begin_with_another_build_than_they_are_asked_for() -> None:
    done = run("avx512", "tests/engine/test_step_batch.py", ATEN_CPU_CAPABILITY="avx2")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "kernels" in done.stderr
    assert "passed" not in done.stdout
