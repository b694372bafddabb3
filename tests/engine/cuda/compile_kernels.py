"""Compiles every kernel for GPUs, on a machine that needs none.

    TRITON_INTERPRET=0 python -m tests.engine.cuda.compile_kernels < KERNELS

Reads ``kernel_shapes.shapes()`` by compute capability as JSON: the modules behind it import torch and transformers,
compiling does not. Prints as JSON, by compute capability and name: registers of a thread, bytes of its stack, shared
memory in bytes, the tensor-core instructions, how many groups of copies a tile may leave under way, the arguments
whose value or alignment makes triton compile the kernel again, and the accesses of memory in the machine code before
the wait for the kernel before, if there is one.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

if TYPE_CHECKING:
    from tests.engine.cuda.kernel_shapes import Kernel

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"

WAIT = "ACQBULK"
"""Instruction of ``griddepcontrol.wait``."""


def compile_for(capability: int, shapes: Mapping[str, Kernel]) -> dict[str, dict[str, Any]]:
    target = GPUTarget("cuda", capability, 32)
    facts = {}
    for name, (place, types, given, options) in shapes.items():
        module, attribute = place.split(".")
        kernel: Any = getattr(import_module(f"decant.engine.cuda.{module}"), attribute)
        constants = {at.name: at.default for at in kernel.params if at.is_constexpr and at.has_default} | given
        arguments = [argument for argument in kernel.arg_names if argument not in constants]
        signature = dict(zip(arguments, types.split(), strict=True)) | dict.fromkeys(constants, "constexpr")
        constexprs = {(kernel.arg_names.index(argument),): value for argument, value in constants.items()}
        # Pointers and sizes are multiples of 16 in a launch: only then are loads pipelined through shared memory.
        params = [param for param in kernel.params if not param.is_constexpr]
        attrs = {
            (param.num,): [["tt.divisibility", 16]]
            for param in params
            if not (
                param.do_not_specialize
                or param.do_not_specialize_on_alignment
                or signature[param.name].startswith("fp")
            )
        }
        compiled = triton.compile(ASTSource(kernel, signature, constexprs, attrs), target=target, options=options)
        registers, stack = resources(compiled.asm["cubin"])
        ptx = compiled.asm["ptx"]
        facts[name] = {
            "registers": registers,
            "stack": stack,
            "shared": compiled.metadata.shared,
            "products": [name for name in ("wgmma.mma_async", "mma.sync") if name in ptx],
            "copies": max([int(groups) for groups in re.findall(r"cp\.async\.wait_group\s+(\d+)", ptx)], default=0),
            "specialized": [kernel.arg_names[at] for (at,) in attrs],
            "before_wait": before_wait(compiled.asm["cubin"]) if "griddepcontrol.wait" in ptx else None,
        }
    return facts


def resources(cubin: bytes) -> tuple[int, int]:
    usage = show(cubin, "cuobjdump", "-res-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    return int(found[1]), int(found[2])


def before_wait(cubin: bytes) -> list[str]:
    before, found, _ = show(cubin, "nvdisasm").partition(WAIT)
    assert found, "the machine code does not wait"
    return re.findall(r"\b(?:LD|LDG|LDGSTS|ST|STG|RED|REDG|ATOM|ATOMG|CCTL|UBLKCP|UTMALDG)\b[.\w]*", before)


def show(cubin: bytes, *command: str) -> str:
    tool, *options = command
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([TOOLS / tool, *options, file.name], capture_output=True, text=True, check=True)
    return done.stdout


if __name__ == "__main__":
    kernels = json.load(sys.stdin)
    print(json.dumps({capability: compile_for(int(capability), of) for capability, of in kernels.items()}))
