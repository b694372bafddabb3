"""Compiles every kernel for a GPU, which needs none.

    TRITON_INTERPRET=0 python -m tests.engine.cuda.compile_kernels 90

Prints the shared memory of each in bytes, as JSON.
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
    """By name: kernel, types of its arguments in order, constants. Shapes of Llama-3.1-8B, then the widest heads."""
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
    kernels |= attention_shapes("tokens", 128, attention.LEAST_ROWS)
    return kernels | attention_shapes("chunks", 256, attention.CHUNK_ROWS)


def attention_shapes(name: str, width: int, rows: int) -> dict[str, tuple[Any, str, dict[str, Any]]]:
    shape = {"KV_HEADS": 8, "GROUP": 4, "VALUE_DIM": width, "VALUE_PAD": width, "TILE_ROWS": rows, "SINKS": True}
    keys = {"BLOCK": 16, "KEY_DIM": width, "KEY_PAD": width, "TILE": attention.TILE, "SPLIT": attention.SPLIT}
    types = "*bf16 *bf16 *bf16 *bf16 *i32 *i32 *i32 *i32 *fp32 i32 i32 i32 i32 i32 i32 fp32 fp32"
    return {
        f"attend {name}": (attention_kernels.attend, types, {**shape, **keys, "SOFTCAP": True}),
        f"merge_splits {name}": (attention_kernels.merge_splits, "*fp32 *bf16 *bf16 *i32", shape),
    }


def main() -> None:
    target = GPUTarget("cuda", int(sys.argv[1]), 32)
    shared = {}
    for name, (kernel, types, constants) in shapes().items():
        arguments = [argument for argument in kernel.arg_names if argument not in constants]
        signature = dict(zip(arguments, types.split(), strict=True)) | dict.fromkeys(constants, "constexpr")
        constexprs = {(kernel.arg_names.index(argument),): value for argument, value in constants.items()}
        compiled = triton.compile(ASTSource(kernel, signature, constexprs), target=target)
        assert compiled.asm["cubin"], name
        shared[name] = compiled.metadata.shared
    print(json.dumps(shared))


if __name__ == "__main__":
    main()
