"""Triton kernels of a linear layer that gives a row the same bits in any batch.

A number of the output is the sum over ranges of SPLIT inputs, in ascending order; each range is the sum over tiles of
``TILE_DEPTH`` inputs, in ascending order, in one accumulator. One compiled kernel with one size of tiles computes any
number of rows. For few rows each range has its own program, and ``add_splits`` adds them in the same order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from decant.engine.cuda.attention_kernels import product_onto


@triton.jit(do_not_specialize=["rows", "programs", "splits"])
def linear(
    x, weight, bias, out, parts, rows, columns, depth, x_row, programs, splits,
    HAS_BIAS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, TILE_DEPTH: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """out = x @ weight^T + bias, with weight [columns, depth]. Grid: (programs,).

    With ``splits`` > 1, the number of ranges, writes parts [splits, rows, columns], float32, instead.

    Each program takes every ``programs``-th tile. Programs that run together share weights: tiles with the same rows
    are ``row_tiles`` apart.
    """
    row_tiles = tl.cdiv(rows, TILE_ROWS)
    work = tl.program_id(0)
    while work < row_tiles * tl.cdiv(columns, TILE_COLUMNS) * splits:
        tile, split = work // splits, work % splits
        row = (tile % row_tiles) * TILE_ROWS + tl.arange(0, TILE_ROWS)
        column = (tile // row_tiles) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
        is_row, is_column = row < rows, column < columns
        begin, end = split * SPLIT, depth
        if splits > 1:
            end = tl.minimum(begin + SPLIT, depth)
        total = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
        while begin < end:
            part = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
            for start in range(begin, tl.minimum(begin + SPLIT, depth), TILE_DEPTH):
                at = start + tl.arange(0, TILE_DEPTH)
                exists = at < depth
                inputs = tl.load(
                    x + row.to(tl.int64)[:, None] * x_row + at[None, :], is_row[:, None] & exists[None, :], other=0.0
                )
                weights = tl.load(
                    weight + column.to(tl.int64)[None, :] * depth + at[:, None],
                    is_column[None, :] & exists[:, None],
                    other=0.0,
                )
                part = product_onto(inputs, weights, part)
            total += part
            begin += SPLIT
        at = row.to(tl.int64)[:, None] * columns + column[None, :]
        is_output = is_row[:, None] & is_column[None, :]
        if splits > 1:
            tl.store(parts + split.to(tl.int64) * rows * columns + at, total, is_output)
        else:
            if HAS_BIAS:
                total += tl.load(bias + column, is_column, other=0.0).to(tl.float32)[None, :]
            tl.store(out + at, total.to(out.dtype.element_ty), is_output)
        work += programs


@triton.jit(do_not_specialize=["count", "splits"])
def add_splits(parts, bias, out, count, columns, splits, HAS_BIAS: tl.constexpr, TILE: tl.constexpr):
    """out [count] = parts [splits, count], added in order, + bias [columns]. Grid: (ceil(count / TILE),)."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    exists = at < count
    total = tl.zeros([TILE], tl.float32)
    for split in range(splits):
        total += tl.load(parts + split * count.to(tl.int64) + at, exists, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + at % columns, exists, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), exists)
