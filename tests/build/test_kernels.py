"""Each build of the CPU kernels that this machine can run agrees with transformers, keeps both laws of the engine
and serves; a line at the end of the suite lists the builds.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from decant.engine.cpu import kernels as native
from tests.kernel_builds import BUILDS, OTHERS, why_not

ROOT = Path(__file__).parents[2]

PARTS = {
    "parity": ("tests/engine/test_parity.py", "-k", "llama or mistral or gemma2 or gpt2 or gpt_oss or qwen2_moe"),
    "rows": ("tests/engine/test_bits.py", "-k", "small"),
    "conformance": ("tests/engine/conformance", "tests/engine/conformance_handoff"),
    "demo": ("tests/decant/test_up.py", "-k", "demo"),
}


def run(build: str, tests: Sequence[str], **environ: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]
    environment = inherited | {"DECANT_KERNELS": build} | environ
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)


def test_without_a_choice_the_best_build_runs(record_property) -> None:
    record_property("kernels", native.kind())
    best = next(build for build in BUILDS if not why_not(build))
    assert native.kind().split()[-1] == BUILDS[best][1]


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("build", OTHERS)
def test_parity_both_laws_and_the_demo_hold_with(build: str, part: str, record_property) -> None:
    reason = why_not(build)
    record_property("kernels", f"{build} ({reason})" if reason else build)
    if reason:
        pytest.skip(f"{build}: {reason}")
    done = run(build, PARTS[part])
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


@pytest.mark.slow
def test_tests_do_not_begin_with_another_build_than_they_are_asked_for() -> None:
    done = run("avx512", ("tests/engine/test_step_batch.py",), ATEN_CPU_CAPABILITY="avx2")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "kernels" in done.stderr
    assert "passed" not in done.stdout
