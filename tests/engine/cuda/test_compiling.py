"""Triton's interpreter has no types: only compiling finds errors of type."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

SHARED_BYTES = 227 << 10
"""Of a program on compute capability 9.0."""


@pytest.mark.slow
def test_kernels_compile_for_a_gpu() -> None:
    command = [sys.executable, "-m", "tests.engine.cuda.compile_kernels", "90"]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    shared = json.loads(done.stdout)
    assert {name.split()[0] for name in shared} >= {"attend", "merge_splits", "draw", "add_rms_norm", "gate"}
    assert max(shared.values()) <= SHARED_BYTES
