"""Compiles every kernel for GPUs, on a machine that needs none.

    TRITON_INTERPRET=0 python -m tests.engine.cuda.compile_kernels 89 90 < KERNELS

Reads ``kernel_shapes.shapes()`` as JSON: the modules behind it import torch and transformers, compiling does not.
Prints as JSON, by compute capability and name: the shared memory in bytes, the tensor-core instructions, and the
arguments whose value or alignment makes triton compile the kernel again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

if TYPE_CHECKING:
    from tests.engine.cuda.kernel_shapes import Kernel


def compile_for(capability: int, shapes: Mapping[str, Kernel]) -> dict[str, dict[str, Any]]:
    target = GPUTarget("cuda", capability, 32)
    facts = {}
    for name, (place, types, constants) in shapes.items():
        module, attribute = place.split(".")
        kernel: Any = getattr(import_module(f"decant.engine.cuda.{module}"), attribute)
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
        compiled = triton.compile(ASTSource(kernel, signature, constexprs, attrs), target=target)
        assert compiled.asm["cubin"], name
        ptx = compiled.asm["ptx"]
        facts[name] = {
            "shared": compiled.metadata.shared,
            "products": [name for name in ("wgmma.mma_async", "mma.sync") if name in ptx],
            "specialized": [kernel.arg_names[at] for (at,) in attrs],
        }
    return facts


if __name__ == "__main__":
    of_stdin = json.load(sys.stdin)
    print(json.dumps({capability: compile_for(int(capability), of_stdin) for capability in sys.argv[1:]}))
