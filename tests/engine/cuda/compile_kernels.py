"""Compiles every kernel for GPUs, on a machine that needs none.

    TRITON_INTERPRET=0 python -m tests.engine.cuda.compile_kernels 89 90

Prints as JSON, by compute capability and name: the shared memory in bytes, the tensor-core instructions, and the
arguments whose value or alignment makes triton compile the kernel again.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from decant.engine.cuda import (
    attention,
    attention_kernels,
    exact,
    fused_layer,
    gemm_kernels,
    layer_kernels,
    sampler,
    sampler_kernels,
)


def shapes() -> dict[str, tuple[Any, str, dict[str, Any]]]:
    """Return kernel, types of arguments in order, and constants: in shapes of Llama-3.1-8B, then with other heads."""
    heads = {"BLOCK": 16, "KV_HEADS": 8, "KEY_DIM": 128, "VALUE_DIM": 128}
    kernels: dict[str, tuple[Any, str, dict[str, Any]]] = {
        "add_rms_norm": (
            layer_kernels.add_rms_norm,
            "*bf16 *bf16 *bf16 *bf16 *bf16 i32 fp32",
            {"ADD": True, "PAD": 4096},
        ),
        "gate": (layer_kernels.gate, "*bf16 *bf16 *bf16 i32", {"TILE": fused_layer.GATE_TILE}),
        "rotate_and_write": (
            layer_kernels.rotate_and_write,
            "*bf16 *bf16 *bf16 *bf16 *bf16 *bf16 *i64 *bf16 i32 i32 i32",
            {**heads, "HEADS": 32, "HALF_PAD": 64, "VALUE_PAD": 128},
        ),
        "linear": (
            gemm_kernels.linear,
            "*bf16 *bf16 *bf16 *bf16 i32 i32 i32 i32 i32",
            {
                "HAS_BIAS": True,
                "TILE_ROWS": exact.TILE_ROWS,
                "TILE_COLUMNS": exact.TILE_COLUMNS,
                "TILE_DEPTH": exact.TILE_DEPTH,
            },
        ),
        "draw": (
            sampler_kernels.draw,
            "*fp32 *i64 *fp32 *i32 *fp64 *fp32 *fp64 i32",
            {"TILE": sampler.TILE},
        ),
        "write_kv": (
            attention_kernels.write_kv,
            "*bf16 *bf16 *i64 *bf16 i32 i32 i32 i32 i32 i32 i32",
            {**heads, "KEY_PAD": 128, "VALUE_PAD": 128},
        ),
    }
    tokens, chunks = attention.MIN_ROWS, attention.CHUNK_ROWS
    kernels |= attention_shapes("tokens", 128, tokens) | attention_shapes("chunks", 256, chunks)
    kernels |= attention_shapes("tokens, padded heads of fp16", 80, tokens, dtype="fp16")
    kernels |= attention_shapes("chunks, padded heads of fp16", 96, chunks, dtype="fp16")
    kernels |= attention_shapes("chunks in float32", 128, chunks, dtype="fp32")
    return kernels | attention_shapes("tokens of 71 heads for one key", 64, 128, group=71)


def attention_shapes(
    name: str, width: int, rows: int, *, dtype: str = "bf16", group: int = 4
) -> dict[str, tuple[Any, str, dict[str, Any]]]:
    pad = attention.power_of_two(width)
    shape = {"KV_HEADS": 8, "GROUP": group, "VALUE_DIM": width, "VALUE_PAD": pad, "TILE_ROWS": rows, "SINKS": True}
    keys = {"BLOCK": 16, "KEY_DIM": width, "KEY_PAD": pad, "TILE": attention.TILE, "SPLIT": attention.SPLIT}
    types = f"{f'*{dtype} ' * 4}*i32 *i32 *i32 *i32 *fp32 i32 i32 i32 i32 i32 i32 fp32 fp32"
    return {
        f"attend {name}": (attention_kernels.attend, types, {**shape, **keys, "SOFTCAP": True}),
        f"merge_splits {name}": (attention_kernels.merge_splits, f"*fp32 *{dtype} *{dtype} *i32", shape),
    }


def compile_for(capability: int) -> dict[str, dict[str, Any]]:
    target = GPUTarget("cuda", capability, 32)
    facts = {}
    for name, (kernel, types, constants) in shapes().items():
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
    print(json.dumps({capability: compile_for(int(capability)) for capability in sys.argv[1:]}))
