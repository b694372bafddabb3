"""Triton kernels of products with few rows, whose time is that of reading the weights once.

One row is multiplied without tensor cores: each thread keeps several loads of 16 bytes under way and adds to numbers of
its own, which a program reduces once. Several rows are the narrow side of a tensor-core product.
"""

from __future__ import annotations

import triton
import triton.language as tl

from decant.engine.cuda.attention_kernels import product_onto
from decant.engine.cuda.dependent_launch import prefetch, wait_for_kernel_before


@triton.jit
def multiply_row(
    x, weight, addend, out, columns, depth,
    ADD: tl.constexpr, GATED: tl.constexpr, EVEN: tl.constexpr,
    TILE_COLUMNS: tl.constexpr, TILE_DEPTH: tl.constexpr, UNROLL: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """out [columns] = weight [columns, depth] @ x [depth] + addend. Grid: (ceil(columns / TILE_COLUMNS),).

    GATED: weight has 2 * columns rows, gates and then ups; out = silu(gates) * ups.
    EVEN: no tile ends beyond columns or depth. DEPENDENT: it is a dependent launch.
    """
    column = tl.program_id(0) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    if DEPENDENT:
        prefetch(weight, column, columns, depth, TILE_DEPTH)
        if GATED:
            prefetch(weight, columns + column, 2 * columns, depth, TILE_DEPTH)
        wait_for_kernel_before()
    starts = weight + column.to(tl.int64)[:, None] * depth
    ups = starts + columns.to(tl.int64) * depth
    total = tl.zeros([TILE_COLUMNS, TILE_DEPTH], tl.float32)
    total_up = tl.zeros([TILE_COLUMNS, TILE_DEPTH], tl.float32)
    for start in tl.range(0, depth, TILE_DEPTH, loop_unroll_factor=UNROLL):
        at = start + tl.arange(0, TILE_DEPTH)
        exists = (column < columns)[:, None] & (at < depth)[None, :]
        if EVEN:
            weights = tl.load(starts + at[None, :], eviction_policy="evict_first")
            inputs = tl.load(x + at)
        else:
            weights = tl.load(starts + at[None, :], exists, other=0.0)
            inputs = tl.load(x + at, at < depth, other=0.0)
        inputs = inputs.to(tl.float32)[None, :]
        total += weights.to(tl.float32) * inputs
        if GATED:
            if EVEN:
                weights = tl.load(ups + at[None, :], eviction_policy="evict_first")
            else:
                weights = tl.load(ups + at[None, :], exists, other=0.0)
            total_up += weights.to(tl.float32) * inputs
    result = tl.sum(total, 1)
    if GATED:
        result = result / (1.0 + tl.exp(-result)) * tl.sum(total_up, 1)
    if ADD:
        result += tl.load(addend + column, column < columns, other=0.0).to(tl.float32)
    tl.store(out + column, result.to(out.dtype.element_ty), column < columns)


@triton.jit(do_not_specialize=["rows"])
def multiply_rows(
    x, weight, addend, out, rows, columns, depth, x_row,
    ADD: tl.constexpr, GATED: tl.constexpr, EVEN: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, TILE_DEPTH: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """``multiply_row`` of each of x [rows, depth], with out [rows, columns] and at most TILE_ROWS rows."""
    column = tl.program_id(0) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    row = tl.arange(0, TILE_ROWS)
    if DEPENDENT:
        prefetch(weight, column, columns, depth, TILE_DEPTH)
        if GATED:
            prefetch(weight, columns + column, 2 * columns, depth, TILE_DEPTH)
        wait_for_kernel_before()
    is_column, is_row = column < columns, row < rows
    starts = weight + column.to(tl.int64)[:, None] * depth
    ups = starts + columns.to(tl.int64) * depth
    total = tl.zeros([TILE_COLUMNS, TILE_ROWS], tl.float32)
    total_up = tl.zeros([TILE_COLUMNS, TILE_ROWS], tl.float32)
    for start in range(0, depth, TILE_DEPTH):
        at = start + tl.arange(0, TILE_DEPTH)
        exists = is_column[:, None] & (at < depth)[None, :]
        if EVEN:
            inputs = tl.load(x + row[None, :] * x_row + at[:, None], is_row[None, :], other=0.0)
            weights = tl.load(starts + at[None, :])
        else:
            inputs = tl.load(x + row[None, :] * x_row + at[:, None], is_row[None, :] & (at < depth)[:, None], other=0.0)
            weights = tl.load(starts + at[None, :], exists, other=0.0)
        total = product_onto(weights, inputs, total)
        if GATED:
            weights = tl.load(ups + at[None, :]) if EVEN else tl.load(ups + at[None, :], exists, other=0.0)
            total_up = product_onto(weights, inputs, total_up)
    if GATED:
        total = total / (1.0 + tl.exp(-total)) * total_up
    at = row[None, :].to(tl.int64) * columns + column[:, None]
    is_output = is_row[None, :] & is_column[:, None]
    if ADD:
        total += tl.load(addend + at, is_output, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), is_output)
