"""Triton kernel of a linear layer that gives a row the same bits in any batch.

A tile of the output is the sum over tiles of ``TILE_DEPTH`` inputs, in ascending order, in one accumulator. One
compiled kernel with one size of tiles computes any number of rows, and no sum is split over programs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from decant.engine.cuda.attention_kernels import product


@triton.jit(do_not_specialize=["rows", "programs"])
def linear(
    x, weight, bias, out, rows, columns, depth, x_row, programs,
    HAS_BIAS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, TILE_DEPTH: tl.constexpr,
):  # fmt: skip
    """out = x @ weight^T + bias, with weight [columns, depth]. Grid: (programs,).

    Each program takes every ``programs``-th tile. Programs that run together share weights: tiles with the same rows
    are ``row_tiles`` apart.
    """
    row_tiles = tl.cdiv(rows, TILE_ROWS)
    tile = tl.program_id(0)
    while tile < row_tiles * tl.cdiv(columns, TILE_COLUMNS):
        row = (tile % row_tiles) * TILE_ROWS + tl.arange(0, TILE_ROWS)
        column = (tile // row_tiles) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
        is_row, is_column = row < rows, column < columns
        total = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
        for start in range(0, depth, TILE_DEPTH):
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
            total += product(inputs, weights)
        if HAS_BIAS:
            total += tl.load(bias + column, is_column, other=0.0).to(tl.float32)[None, :]
        target = out + row.to(tl.int64)[:, None] * columns + column[None, :]
        tl.store(target, total.to(out.dtype.element_ty), is_row[:, None] & is_column[None, :])
        tile += programs
