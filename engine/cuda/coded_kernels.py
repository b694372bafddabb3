"""Triton kernel of rows times a quantized weight, whose codes become numbers in registers.

Codes less their zero point are exact in the dtype of the rows, so tensor cores multiply them, and scales and minima are
applied to the sums in float32. A number of the output is the sum over tiles of TILE_DEPTH inputs in ascending order,
for any number of rows.

Two tiles of int4 are neighbours in memory: the numbers of the first one are in the lower bits of its bytes::

    inputs   0 .. T-1   T .. 2T-1   2T .. 3T-1   3T .. 4T-1
    bytes    [ low        high ]    [ low          high ]       T bytes each
"""

from __future__ import annotations

import triton
import triton.language as tl

from decant.engine.cuda.attention_kernels import product_onto

INT8, INT4, FP8 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def decode(codes, KIND: tl.constexpr):
    """Numbers of codes; those of fp8 are smaller by a factor of 256, as float16 has another bias of the exponent."""
    if KIND == FP8:
        bits = codes.to(tl.uint16)
        codes = (((bits & 128) << 8) | ((bits & 127) << 7)).to(tl.float16, bitcast=True)
    return codes


@triton.jit
def add_tile(
    total, numbers, x, scales, zeros, mins, row, is_row, x_row, start, depth, group,
    ZEROS: tl.constexpr, MINS: tl.constexpr, WHOLE: tl.constexpr, TILE_DEPTH: tl.constexpr,
):  # fmt: skip
    """total + weights @ x, of the inputs from ``start`` on, whose weights have the ``numbers`` [columns, TILE_DEPTH].

    Scales, zero points and minima are pointers to those of the columns; those of the inputs are ``group`` behind them.
    """
    at = start + tl.arange(0, TILE_DEPTH)
    inputs = tl.load(x + row.to(tl.int64)[None, :] * x_row + at[:, None], is_row[None, :] & (at < depth)[:, None], 0.0)
    if ZEROS:
        numbers = numbers.to(tl.int16) - tl.load(zeros + group).to(tl.int16)[:, None]
    weights = numbers.to(tl.float32).to(inputs.dtype)
    if WHOLE:
        return product_onto(weights, inputs, total)
    part = product_onto(weights, inputs, tl.zeros_like(total))
    total += part * tl.load(scales + group).to(tl.float32)[:, None]
    if MINS:
        total -= tl.load(mins + group)[:, None] * tl.sum(inputs.to(tl.float32), 0)[None, :]
    return total


@triton.jit(do_not_specialize=["rows"])
def multiply_codes(
    x, codes, scales, zeros, mins, bias, out, rows, columns, depth, x_row, codes_row, group, group_row,
    KIND: tl.constexpr, ZEROS: tl.constexpr, MINS: tl.constexpr, BIAS: tl.constexpr, WHOLE: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, TILE_DEPTH: tl.constexpr,
):  # fmt: skip
    """out [rows, columns] = x [rows, depth] @ weight^T + bias. Grid: (tiles of rows times tiles of columns,).

    codes                [columns, codes_row] bytes, whole tiles of inputs
    scales, zeros, mins  [groups, columns], with ``group_row`` from one to the next; a group is whole tiles of inputs
    KIND                 of the codes; ZEROS: the zero point is in ``zeros``, else 8 for int4 and 0 for others, and for
                         int4 with minima
    WHOLE                all inputs are one group without minima
    """
    row_tiles = tl.cdiv(rows, TILE_ROWS)
    row = tl.program_id(0) % row_tiles * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = tl.program_id(0) // row_tiles * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    is_row, is_column = row < rows, column < columns
    existing = tl.minimum(column, columns - 1)
    starts = codes + existing.to(tl.int64)[:, None] * codes_row + tl.arange(0, TILE_DEPTH)[None, :]
    scales, zeros, mins = scales + existing, zeros + existing, mins + existing
    total = tl.zeros([TILE_COLUMNS, TILE_ROWS], tl.float32)
    if KIND == INT4:
        for start in range(0, depth, 2 * TILE_DEPTH):
            pairs = tl.load(starts + start // 2)
            low, high = pairs & 15, pairs >> 4
            if not ZEROS and not MINS:
                low, high = low.to(tl.int8) - 8, high.to(tl.int8) - 8
            total = add_tile(
                total, low, x, scales, zeros, mins, row, is_row, x_row, start, depth,
                start // group * group_row, ZEROS, MINS, WHOLE, TILE_DEPTH,
            )  # fmt: skip
            second = tl.minimum(start + TILE_DEPTH, depth - 1) // group * group_row
            total = add_tile(
                total, high, x, scales, zeros, mins, row, is_row, x_row, start + TILE_DEPTH, depth,
                second, ZEROS, MINS, WHOLE, TILE_DEPTH,
            )  # fmt: skip
    else:
        for start in range(0, depth, TILE_DEPTH):
            numbers = decode(tl.load(starts + start), KIND)
            total = add_tile(
                total, numbers, x, scales, zeros, mins, row, is_row, x_row, start, depth,
                start // group * group_row, ZEROS, MINS, WHOLE, TILE_DEPTH,
            )  # fmt: skip
    if WHOLE:
        total *= tl.load(scales).to(tl.float32)[:, None]
    if BIAS:
        total += tl.load(bias + existing).to(tl.float32)[:, None]
    at = row[None, :].to(tl.int64) * columns + column[:, None]
    tl.store(out + at, total.to(out.dtype.element_ty), is_row[None, :] & is_column[:, None])
