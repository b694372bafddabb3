from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from decant.engine.errors import InvalidConfig
from decant.worker.startup import cpu_build
from tests.kernel_builds import BUILDS, why_not

SCRIPT = """
import sys
from decant.worker.startup import cpu_build
cpu_build.choose(sys.argv[1])
from decant.engine.cpu.kernels import loader as native
cpu_build.check(sys.argv[1], native.kind())
print(native.kind())
"""


@pytest.mark.slow
@pytest.mark.parametrize("build", BUILDS)
def test_every_build_that_the_cpu_can_run_may_be_forced(build: str) -> None:
    if reason := why_not(build):
        pytest.skip(f"{build}: {reason}")
    command, clean = [sys.executable, "-c", SCRIPT, build], {"PATH": os.environ["PATH"]}
    done = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[1] == BUILDS[build][0]


def test_a_build_that_does_not_run_here_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="kernels"):
        cpu_build.check("avx512", "AVX2 _kernels")
    cpu_build.check("auto", "AVX2 _kernels")


def test_without_proc_cpuinfo_avx2_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="kernels"):
        cpu_build.choose("avx2", cpu_info=tmp_path / "cpuinfo")
