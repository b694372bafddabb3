"""Triton's interpreter has no types and no registers: only compiling finds errors of type, and spills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton")

from tests.engine.cuda.kernel_shapes import shapes

SHARED_BYTES = {"80": 163 << 10, "89": 99 << 10, "90": 227 << 10}
"""Shared memory of a program by compute capability: A100; L40S and RTX 4090; H100 and H200."""

COMPILED_AS = {"89": "80"}
"""Capability 8.9 has the instructions of 8.0 that the kernels use, and less shared memory."""

REGISTERS = {
    "90": {
        "attend tokens": 128,
        "attend chunks": 240,
        "attend exact": 160,
        "rotate_and_write": 48,
        "linear": 168,
        "draw": 80,
    }
}
"""Most registers with which as many programs run on a processor as the kernels need to wait for memory."""

STACK = {"rotary_angles": 32}
"""Bytes of a thread's stack: the digits of pi for cos and sin of large angles. Other kernels would spill registers."""

PIPELINED = {"attend exact", "attend tokens of wide heads, all options", "linear", "shrink"}
"""They copy a tile while they multiply the one before."""

DIFFERENT_IN_EVERY_STEP = {
    "attend": {"width", "table", "group"},
    "linear": {"rows", "programs", "splits"},
    "add_splits": {"count", "splits"},
    "multiply_rows": {"rows"},
    "multiply_codes": {"rows"},
    "place_pairs": {"pairs"},
    "shrink": {"columns", "tiles", "rank_tiles", "splits"},
    "expand": {"columns", "tiles", "rank_tiles", "splits"},
    "rotate_and_write": {"slots"},
    "rotary_angles": {"positions"},
    "write_kv": {"slots"},
}
"""Numbers and pointers that depend on the batch, and the group: a trial of a kernel does not know the model's."""


def compiled() -> dict[str, dict[str, dict[str, Any]]]:
    command = [sys.executable, "-m", "tests.engine.cuda.compile_kernels"]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    capabilities = [capability for capability in SHARED_BYTES if capability not in COMPILED_AS]
    kernels = json.dumps({capability: shapes((int(capability[0]), int(capability[1]))) for capability in capabilities})
    done = subprocess.run(command, env=environment, input=kernels, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    facts: dict[str, dict[str, dict[str, Any]]] = json.loads(done.stdout)
    return {capability: facts[COMPILED_AS.get(capability, capability)] for capability in SHARED_BYTES}


def show(facts: dict[str, dict[str, dict[str, Any]]]) -> None:
    for capability, kernels in facts.items():
        for name, fact in kernels.items():
            numbers = f"{fact['registers']:>4} registers {fact['stack']:>5} B stack {fact['shared']:>7} B shared"
            print(f"{capability}  {name:<42} {numbers}  {', '.join(fact['products'])}")


@pytest.mark.slow
def test_kernels_compile_for_gpus_without_spills_and_fit_into_their_shared_memory() -> None:
    """One test, as its processes would each compile."""
    facts = compiled()
    show(facts)
    for capability, kernels in facts.items():
        assert {name: fact["stack"] for name, fact in kernels.items() if fact["stack"]} == STACK, capability
        most = max(kernels, key=lambda name: kernels[name]["shared"])
        assert kernels[most]["shared"] <= SHARED_BYTES[capability], (capability, most)
        for name, registers in REGISTERS.get(capability, {}).items():
            assert kernels[name]["registers"] <= registers, (capability, name)
        products = ("attend", "linear", "multiply_codes", "multiply_expert_codes", "shrink", "expand")
        without = {name for name, fact in kernels.items() if name.startswith(products) and not fact["products"]}
        assert without == {"attend chunks in float32"}, "the others run on tensor cores"
        pipelined = PIPELINED | {name for name in kernels if "_codes " in name and not name.startswith("multiply_row")}
        assert {name for name in pipelined if kernels[name]["copies"] < 2} == set(), capability
        waits = {name: fact["before_wait"] for name, fact in kernels.items() if fact["before_wait"] is not None}
        assert waits.keys() == {name for name in kernels if name.endswith(" dependent")}
        assert all(access.startswith("CCTL") for accesses in waits.values() for access in accesses), waits
        for name, fact in kernels.items():
            different = DIFFERENT_IN_EVERY_STEP.get(name.split()[0], set())
            assert not set(fact["specialized"]) & different, f"{name} is compiled again for another batch"
