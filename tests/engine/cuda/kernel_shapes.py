"""Kernels to compile, with the constants of the modules that launch them."""

from __future__ import annotations

from typing import Any

from decant.engine.cuda import attention, exact, fused_layer, sampler

Kernel = tuple[str, str, dict[str, Any]]
"""Module and name of a kernel in ``decant.engine.cuda``, types of its arguments in order, and constants."""


def shapes() -> dict[str, Kernel]:
    """Return kernels in shapes of Llama-3.1-8B, then with other heads."""
    heads = {"BLOCK": 16, "KV_HEADS": 8, "KEY_DIM": 128, "VALUE_DIM": 128}
    kernels: dict[str, Kernel] = {
        "add_rms_norm": (
            "layer_kernels.add_rms_norm",
            "*bf16 *bf16 *bf16 *bf16 *bf16 i32 fp32",
            {"ADD": True, "PAD": 4096},
        ),
        "gate": ("layer_kernels.gate", "*bf16 *bf16 *bf16 i32", {"TILE": fused_layer.GATE_TILE}),
        "rotate_and_write": (
            "layer_kernels.rotate_and_write",
            "*bf16 *bf16 *bf16 *bf16 *bf16 *bf16 *i64 *bf16 i32 i32 i32",
            {**heads, "HEADS": 32, "HALF_PAD": 64, "VALUE_PAD": 128},
        ),
        "linear": (
            "gemm_kernels.linear",
            "*bf16 *bf16 *bf16 *bf16 i32 i32 i32 i32 i32",
            {
                "HAS_BIAS": True,
                "TILE_ROWS": exact.TILE_ROWS,
                "TILE_COLUMNS": exact.TILE_COLUMNS,
                "TILE_DEPTH": exact.TILE_DEPTH,
            },
        ),
        "draw": (
            "sampler_kernels.draw",
            "*fp32 *i64 *fp32 *i32 *fp64 *fp32 *fp64 i32",
            {"TILE": sampler.TILE},
        ),
        "write_kv": (
            "attention_kernels.write_kv",
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


def attention_shapes(name: str, width: int, rows: int, *, dtype: str = "bf16", group: int = 4) -> dict[str, Kernel]:
    pad = attention.power_of_two(width)
    shape = {"KV_HEADS": 8, "GROUP": group, "VALUE_DIM": width, "VALUE_PAD": pad, "TILE_ROWS": rows, "SINKS": True}
    keys = {"BLOCK": 16, "KEY_DIM": width, "KEY_PAD": pad, "TILE": attention.TILE, "SPLIT": attention.SPLIT}
    types = f"{f'*{dtype} ' * 4}*i32 *i32 *i32 *i32 *fp32 i32 i32 i32 i32 i32 i32 fp32 fp32"
    return {
        f"attend {name}": ("attention_kernels.attend", types, {**shape, **keys, "SOFTCAP": True}),
        f"merge_splits {name}": ("attention_kernels.merge_splits", f"*fp32 *{dtype} *{dtype} *i32", shape),
    }
