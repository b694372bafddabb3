"""Kernels to compile, with the constants and options of the modules that launch them."""

from __future__ import annotations

from typing import Any

import torch

from decant.engine.cuda import (
    adapters,
    attention,
    coded_kernels,
    coded_product,
    dependent_launch,
    exact,
    fused_layer,
    grouped_experts,
    sampler,
    skinny,
)
from decant.engine.cuda.attention import LaunchShape
from decant.engine.kv_layout import LayerSpec

Kernel = tuple[str, str, dict[str, Any], dict[str, int]]
"""Module and name of a kernel in ``decant.engine.cuda``, types of its arguments in order, constants, and options."""

USUAL = {"num_warps": 4, "num_stages": 3}

BLOCK = 64

TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}

HEADS = {"BLOCK": BLOCK, "KV_HEADS": 8, "KV_HEADS_PAD": 8, "KEY_DIM": 128, "VALUE_DIM": 128}


def layer_shapes() -> dict[str, Kernel]:
    return {
        "add_rms_norm": (
            "layer_kernels.add_rms_norm",
            "*bf16 *bf16 *bf16 *bf16 *bf16 i32 i32 i32 fp32",
            {"ADD": True, "PAD": 4096},
            USUAL,
        ),
        "rotary_angles": (
            "layer_kernels.rotary_angles",
            "*i64 *fp32 *bf16 *bf16 fp32",
            {"HALF": 64, "PAD": 64},
            {"num_warps": 1, "num_stages": 3},
        ),
        "gate": ("layer_kernels.gate", "*bf16 *bf16 i32", {"TILE": fused_layer.GATE_TILE}, USUAL),
        "rotate_and_write": (
            "layer_kernels.rotate_and_write",
            "*bf16 *bf16 *bf16 *bf16 *bf16 *bf16 *i64 *bf16 i32 i32 i32 i32 i32 i32",
            {**HEADS, "HEADS": 32, "HALF_PAD": 64, "VALUE_PAD": 128, "HEADS_TILE": attention.HEADS_TILE},
            USUAL,
        ),
        "write_kv": (
            "attention_kernels.write_kv",
            "*bf16 *bf16 *i64 *bf16 i32 i32 i32 i32 i32 i32 i32",
            {**HEADS, "KEY_PAD": 128, "VALUE_PAD": 128},
            USUAL,
        ),
    }


def coded(kernel: Kernel, memory: int) -> Kernel:
    """The kernel for blocks of codes, which are argument ``memory``."""
    place, types, constants, options = kernel
    each = types.split()
    each[memory] = "*i8"
    return place, " ".join(each), constants | {"CODED": True}, options


def coded_shapes(plain: dict[str, Kernel]) -> dict[str, Kernel]:
    memory = {"rotate_and_write": 7, "write_kv": 3, "attend tokens": 2, "attend chunks": 2, "attend exact": 2}
    return {f"{name} of codes": coded(plain[name], argument) for name, argument in memory.items()}


def product_shapes() -> dict[str, Kernel]:
    return {
        "linear": (
            "gemm_kernels.linear",
            "*bf16 *bf16 *bf16 *bf16 *fp32 i32 i32 i32 i32 i32 i32",
            {
                "HAS_BIAS": True,
                "TILE_ROWS": exact.TILE_ROWS,
                "TILE_COLUMNS": exact.TILE_COLUMNS,
                "TILE_DEPTH": exact.TILE_DEPTH,
                "SPLIT": exact.SPLIT,
            },
            {"num_warps": exact.WARPS, "num_stages": exact.STAGES},
        ),
        "add_splits": (
            "gemm_kernels.add_splits",
            "*fp32 *bf16 *bf16 i32 i32 i32",
            {"HAS_BIAS": True, "TILE": exact.ADD_TILE},
            USUAL,
        ),
        "multiply_row": (
            "skinny_kernels.multiply_row",
            "*bf16 *bf16 *bf16 *bf16 i32 i32",
            {
                "ADD": False,
                "GATED": True,
                "EVEN": True,
                "TILE_COLUMNS": skinny.ROW.columns // 2,
                "TILE_DEPTH": skinny.ROW.depth,
                "UNROLL": skinny.ROW.unroll,
            },
            {"num_warps": skinny.ROW.num_warps, "num_stages": 1},
        ),
        "multiply_rows": (
            "skinny_kernels.multiply_rows",
            "*bf16 *bf16 *bf16 *bf16 i32 i32 i32 i32",
            {
                "ADD": False,
                "GATED": True,
                "EVEN": True,
                "TILE_ROWS": skinny.TILE_ROWS,
                "TILE_COLUMNS": max(skinny.ROWS.columns // 2, skinny.LEAST_SIDE),
                "TILE_DEPTH": skinny.ROWS.depth,
            },
            {"num_warps": skinny.ROWS.num_warps, "num_stages": skinny.ROWS.num_stages},
        ),
    }


def coded_product_shapes() -> dict[str, Kernel]:
    int8, int4, fp8 = (kind.value for kind in (coded_kernels.INT8, coded_kernels.INT4, coded_kernels.FP8))
    off = dict.fromkeys(("ZEROS", "MINS", "BIAS", "WHOLE"), False)
    kernels: dict[str, Kernel] = {}
    for name, code, scale, shape, changes in (
        ("int8", "*i8", "*fp16", coded_product.MANY, {"KIND": int8, "WHOLE": True, "BIAS": True}),
        ("int4", "*u8", "*fp16", coded_product.MANY, {"KIND": int4, "ZEROS": True}),
        ("int4 of few rows", "*u8", "*fp16", coded_product.FEW, {"KIND": int4, "ZEROS": True}),
        ("int4 with minima", "*u8", "*fp32", coded_product.FEW, {"KIND": int4, "MINS": True, "TILE_DEPTH": 32}),
        ("int4 exact", "*u8", "*fp16", coded_product.EXACT, {"KIND": int4, "ZEROS": True}),
        ("fp8 of few rows", "*u8", "*fp32", coded_product.FEW, {"KIND": fp8}),
        ("e2m1", "*u8", "*fp16", coded_product.MANY, {"KIND": coded_kernels.E2M1.value, "TILE_DEPTH": 32}),
    ):
        tiles = {"TILE_ROWS": shape.rows, "TILE_COLUMNS": shape.columns, "TILE_DEPTH": coded_product.DEEPEST}
        zeros = "*u8" if changes.get("ZEROS") else scale
        types = f"*bf16 {code} {scale} {zeros} {'*fp32' if changes.get('MINS') else scale} *bf16 *bf16{' i32' * 7}"
        options = {"num_warps": shape.num_warps, "num_stages": shape.num_stages}
        kernels[f"multiply_codes {name}"] = "coded_kernels.multiply_codes", types, off | tiles | changes, options
    return kernels | coded_row_shapes()


def expert_shapes() -> dict[str, Kernel]:
    """Experts of Qwen3-30B-A3B's shape, 8 of them for each token."""
    int8, int4, e2m1 = (kind.value for kind in (coded_kernels.INT8, coded_kernels.INT4, coded_kernels.E2M1))
    constants = {"MINS": False, "BIAS": True, "TOP_K": 8, "TILE_DEPTH": coded_product.DEEPEST}
    kernels: dict[str, Kernel] = {
        "place_pairs": (
            "expert_kernels.place_pairs",
            "*i64 *i32 *i32 i32",
            {"TILE": grouped_experts.PLACE_TILE},
            USUAL,
        ),
        "add_experts": (
            "expert_kernels.add_experts",
            "*bf16 *bf16 *bf16 i32",
            {"TOP_K": 8, "TILE": grouped_experts.ADD_TILE},
            USUAL,
        ),
    }
    for name, code, scale, shape, changes in (
        ("int4", "*u8", "*fp16", grouped_experts.MANY, {"KIND": int4, "ZEROS": True, "WHOLE": False}),
        ("int4 of few rows", "*u8", "*fp16", coded_product.FEW, {"KIND": int4, "ZEROS": True, "WHOLE": False}),
        ("int4 exact", "*u8", "*fp16", grouped_experts.EXACT, {"KIND": int4, "ZEROS": True, "WHOLE": False}),
        (
            "e2m1",
            "*u8",
            "*fp16",
            grouped_experts.MANY,
            {"KIND": e2m1, "ZEROS": False, "WHOLE": False, "TILE_DEPTH": 32},
        ),
        ("int8 exact", "*i8", "*fp32", grouped_experts.EXACT, {"KIND": int8, "ZEROS": False, "WHOLE": True}),
    ):
        tiles = {"TILE_ROWS": shape.rows, "TILE_COLUMNS": shape.columns}
        zeros = "*u8" if changes["ZEROS"] else scale
        types = f"*bf16 {code} {scale} {zeros} {scale} *bf16 *bf16 *i32 *i32{' i32' * 6}"
        options = {"num_warps": shape.num_warps, "num_stages": shape.num_stages}
        place = "expert_kernels.multiply_expert_codes"
        kernels[f"multiply_expert_codes {name}"] = place, types, constants | tiles | changes, options
    return kernels


def coded_row_shapes() -> dict[str, Kernel]:
    int8, int4, fp8 = (kind.value for kind in (coded_kernels.INT8, coded_kernels.INT4, coded_kernels.FP8))
    row, row_int4, weights = coded_product.ROW, coded_product.ROW_INT4, coded_product.DEQUANTIZE
    kernels: dict[str, Kernel] = {}
    for name, code, zero, of_row, kind, is_whole in (
        ("int8", "*i8", None, row, int8, True),
        ("int4", "*u8", None, row_int4, int4, False),
        ("int4 with zero points", "*u8", "*u8", row_int4, int4, False),
        ("fp8", "*u8", None, row, fp8, True),
        ("e2m1", "*u8", None, row_int4, coded_kernels.E2M1.value, False),
    ):
        kinds = {"KIND": kind, "ZEROS": zero is not None, "MINS": False, "TILE_DEPTH": coded_product.DEEPEST}
        parts = f"{code} *fp16 {zero or '*fp16'} *fp16"
        for kernel, shape, types, constants in (
            (
                "multiply_row_codes",
                of_row,
                f"*bf16 {parts} *bf16 *bf16",
                {"BIAS": False, "WHOLE": is_whole, "STAGES": of_row.num_stages},
            ),
            ("dequantize", weights, f"{parts} *bf16", {}),
        ):
            tiles = {"TILE_COLUMNS": shape.columns, "TILES": shape.depth // coded_product.DEEPEST}
            options = {"num_warps": shape.num_warps, "num_stages": 1}
            place = f"coded_kernels.{kernel}"
            kernels[f"{kernel} {name}"] = place, types + " i32" * 5, kinds | constants | tiles, options
    return kernels


def adapter_shapes() -> dict[str, Kernel]:
    tiles = {"TILE_ROWS": adapters.TILE_ROWS, "TILE_RANK": adapters.TILE_RANK}
    return {
        "shrink": (
            "adapter_kernels.shrink",
            f"*bf16 *i32 *i32 *i64 *fp32{' i32' * 6}",
            {**tiles, "TILE_DEPTH": adapters.TILE_DEPTH, "SPLIT": adapters.SPLIT},
            {"num_warps": adapters.WARPS, "num_stages": adapters.STAGES},
        ),
        "expand": (
            "adapter_kernels.expand",
            f"*fp32 *i32 *i32 *i64 *i32 *bf16{' i32' * 5}",
            {**tiles, "TILE_OUTPUTS": adapters.TILE_OUTPUTS},
            USUAL,
        ),
    }


def sampler_shapes() -> dict[str, Kernel]:
    return {
        "top_token": (
            "sampler_kernels.top_token",
            "*bf16 *i64 *i8 i32 i32",
            {"TILE": sampler.TILE},
            {"num_warps": sampler.WARPS, "num_stages": 3},
        ),
        "draw": (
            "sampler_kernels.draw",
            "*fp32 *i64 *fp32 *i32 *fp64 *fp32 *fp64 i32",
            {"TILE": sampler.TILE},
            {"num_warps": sampler.WARPS, "num_stages": 3},
        ),
    }


def attention_shapes(capability: tuple[int, int]) -> dict[str, Kernel]:
    kernels: dict[str, Kernel] = {}
    bfloat16, float16 = torch.bfloat16, torch.float16
    for name, width, group, dtype, block, changes in (
        ("tokens", 128, 4, bfloat16, BLOCK, {}),
        ("chunks", 128, 4, bfloat16, BLOCK, {}),
        ("exact", 128, 4, bfloat16, BLOCK, {"WINDOW": True}),
        (
            "tokens of wide heads, all options",
            256,
            4,
            bfloat16,
            BLOCK,
            {"WINDOW": True, "SOFTCAP": True, "SINKS": True},
        ),
        ("chunks of wide heads, all options", 256, 4, bfloat16, BLOCK, {"SOFTCAP": True, "SINKS": True}),
        ("chunks of padded heads in small blocks", 96, 4, float16, 16, {"WINDOW": True, "SINKS": True}),
        ("tokens of 71 heads for one key", 64, 71, bfloat16, BLOCK, {}),
        ("chunks in float32", 128, 4, torch.float32, BLOCK, {}),
    ):
        spec = LayerSpec(8, width, width)
        if name.startswith("chunks"):
            shape = attention.chunk_shape(spec, group, dtype, capability)
        else:
            shape = attention.token_shape(spec, group, dtype, block, is_exact=name == "exact")
        kernels[f"attend {name}"] = attend(spec, shape, TYPES[dtype], block, changes)
    return kernels


def shapes(capability: tuple[int, int]) -> dict[str, Kernel]:
    """Return kernels in shapes of Llama-3.1-8B, then with other heads."""
    kernels = layer_shapes() | product_shapes() | coded_product_shapes() | expert_shapes()
    kernels |= adapter_shapes() | sampler_shapes()
    if capability >= dependent_launch.LEAST_CAPABILITY:
        for name in ("add_rms_norm", "multiply_row", "multiply_rows"):
            place, types, constants, options = kernels[name]
            dependent = constants | {"DEPENDENT": True}
            kernels[f"{name} dependent"] = place, types, dependent, options | {"launch_pdl": True}
    kernels |= attention_shapes(capability)
    return kernels | coded_shapes(kernels)


def attend(spec: LayerSpec, shape: LaunchShape, dtype: str, block: int, changes: dict[str, bool]) -> Kernel:
    pad = attention.power_of_two(spec.key_dim, attention.MIN_ROWS)
    constants = {
        "BLOCK": block,
        "KV_HEADS": spec.kv_heads,
        "KEY_DIM": spec.key_dim,
        "VALUE_DIM": spec.value_dim,
        "KEY_PAD": pad,
        "VALUE_PAD": pad,
        "TILE_ROWS": shape.tile_rows,
        "TILE": shape.tile,
        "SPLIT": shape.split,
        "CHUNK": shape.is_chunk,
        "WINDOW": False,
        "SOFTCAP": False,
        "SINKS": False,
    }
    types = f"{f'*{dtype} ' * 4}*i32 *i32 *i32 *i32 *i32 *i32 *fp32 i32 i32 i32 i32 i32 i32 i32 fp32 fp32"
    options = {"num_warps": shape.num_warps, "num_stages": shape.num_stages}
    return "attention_kernels.attend", types, constants | changes, options
