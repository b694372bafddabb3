"""Triton's interpreter has no types: only compiling finds errors of type."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton")

from tests.engine.cuda.kernel_shapes import shapes

SHARED_BYTES = {"89": 99 << 10, "90": 227 << 10}
"""Shared memory of a program by compute capability: L40S and RTX 4090, H100 and H200."""

DIFFERENT_IN_EVERY_STEP = {
    "attend": {"width", "table"},
    "linear": {"rows", "programs"},
    "rotate_and_write": {"slots"},
    "write_kv": {"slots"},
}
"""Numbers and pointers that depend on the batch."""


@functools.cache
def compiled() -> dict[str, dict[str, dict[str, Any]]]:
    command = [sys.executable, "-m", "tests.engine.cuda.compile_kernels", *SHARED_BYTES]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    kernels = json.dumps(shapes())
    done = subprocess.run(command, env=environment, input=kernels, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    facts: dict[str, dict[str, dict[str, Any]]] = json.loads(done.stdout)
    return facts


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_kernels_compile_for_a_gpu_and_fit_into_its_shared_memory(capability: str) -> None:
    facts = compiled()[capability]
    assert {name.split()[0] for name in facts} >= {"attend", "merge_splits", "draw", "add_rms_norm", "gate", "linear"}
    most = max(facts, key=lambda name: facts[name]["shared"])
    assert facts[most]["shared"] <= SHARED_BYTES[capability], most


@pytest.mark.slow
def test_products_run_on_tensor_cores() -> None:
    facts = compiled()["90"]
    without = {name for name, fact in facts.items() if name.startswith(("attend", "linear")) and not fact["products"]}
    assert without == {"attend chunks in float32"}


@pytest.mark.slow
def test_no_kernel_is_compiled_again_for_another_batch() -> None:
    for name, fact in compiled()["90"].items():
        assert not set(fact["specialized"]) & DIFFERENT_IN_EVERY_STEP.get(name.split()[0], set()), name
