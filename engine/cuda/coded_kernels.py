"""Triton kernels of rows times a quantized weight, whose codes become numbers in registers.

Several rows: codes less their zero point are exact in the dtype of the rows, so tensor cores multiply them, and scales
and minima are applied to the sums in float32. A number of the output is the sum over tiles of TILE_DEPTH inputs in
ascending order, for any number of rows.

One row is multiplied without tensor cores, by weights in float32.

Two tiles of int4 or e2m1 are neighbours in memory: the numbers of the first one are in the lower bits of its bytes::

    inputs   0 .. T-1   T .. 2T-1   2T .. 3T-1   3T .. 4T-1
    bytes    [ low        high ]    [ low          high ]       T bytes each
"""

from __future__ import annotations

import triton
import triton.language as tl

from decant.engine.cuda.attention_kernels import product_onto

INT8, FP8, INT4, E2M1 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
"""From INT4 on, two codes are in a byte."""


@triton.jit
def decode(codes, KIND: tl.constexpr):
    """Numbers of codes; those of fp8 are smaller by a factor of 256, as float16 has another bias of the exponent."""
    if KIND == FP8:
        bits = codes.to(tl.uint16)
        codes = (((bits & 128) << 8) | ((bits & 127) << 7)).to(tl.float16, bitcast=True)
    return codes


@triton.jit
def four_bits(codes, KIND: tl.constexpr):
    """Numbers of codes from 0 to 15: those of e2m1 doubled, of int4 not yet less a zero point."""
    if KIND == E2M1:
        rest = codes & 7
        doubled = tl.where(rest < 4, rest, (2 + (rest & 1)) << (tl.maximum(rest >> 1, 1) - 1)).to(tl.int8)
        codes = tl.where(codes < 8, doubled, -doubled)
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


@triton.jit
def tile_product(
    x, starts, scales, zeros, mins, row, is_row, x_row, depth, group, group_row,
    KIND: tl.constexpr, ZEROS: tl.constexpr, MINS: tl.constexpr, WHOLE: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, TILE_DEPTH: tl.constexpr,
):  # fmt: skip
    """Products [TILE_COLUMNS, TILE_ROWS] of weights and rows, in float32. Sizes: see ``multiply_codes``.

    ``starts`` [TILE_COLUMNS, TILE_DEPTH] are pointers to the first codes of the columns, others to what they have.
    """
    total = tl.zeros([TILE_COLUMNS, TILE_ROWS], tl.float32)
    if KIND >= INT4:
        for start in range(0, depth, 2 * TILE_DEPTH):
            pairs = tl.load(starts + start // 2)
            low, high = four_bits(pairs & 15, KIND), four_bits(pairs >> 4, KIND)
            if KIND == INT4 and not ZEROS and not MINS:
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
    total = tile_product(
        x, starts, scales + existing, zeros + existing, mins + existing, row, is_row, x_row, depth, group, group_row,
        KIND, ZEROS, MINS, WHOLE, TILE_ROWS, TILE_COLUMNS, TILE_DEPTH,
    )  # fmt: skip
    if BIAS:
        total += tl.load(bias + existing).to(tl.float32)[:, None]
    at = row[None, :].to(tl.int64) * columns + column[:, None]
    tl.store(out + at, total.to(out.dtype.element_ty), is_row[None, :] & is_column[:, None])


@triton.jit
def numbers_to_weights(
    numbers, scales, zeros, mins, column, start, depth, group, group_row,
    KIND: tl.constexpr, ZEROS: tl.constexpr, MINS: tl.constexpr,
):  # fmt: skip
    """Weights [columns, tiles, inputs] in float32 of numbers, whose tiles begin at the inputs ``start`` [tiles]."""
    at = column[:, None] + (tl.minimum(start, depth - 1) // group * group_row)[None, :]
    scale = tl.load(scales + at).to(tl.float32)
    weights = numbers.to(tl.float32) * scale[:, :, None]
    if ZEROS:
        weights -= (scale * tl.load(zeros + at).to(tl.float32))[:, :, None]
    elif MINS:
        weights -= tl.load(mins + at)[:, :, None]
    elif KIND == INT4:
        weights -= (scale * 8)[:, :, None]
    return weights


@triton.jit
def row_products(
    numbers, x, scales, zeros, mins, column, start, depth, group, group_row,
    KIND: tl.constexpr, ZEROS: tl.constexpr, MINS: tl.constexpr, WHOLE: tl.constexpr, TILE_DEPTH: tl.constexpr,
):  # fmt: skip
    """Weights times the inputs of a row; with WHOLE, of a weight of one group, without its scale."""
    at = start[:, None] + tl.arange(0, TILE_DEPTH)[None, :]
    inputs = tl.load(x + at, at < depth, 0.0).to(tl.float32)
    if WHOLE:
        return numbers.to(tl.float32) * inputs[None, :, :]
    weights = numbers_to_weights(
        numbers, scales, zeros, mins, column, start, depth, group, group_row, KIND, ZEROS, MINS
    )
    return weights * inputs[None, :, :]


@triton.jit
def multiply_row_codes(
    x, codes, scales, zeros, mins, bias, out, columns, depth, codes_row, group, group_row,
    KIND: tl.constexpr, ZEROS: tl.constexpr, MINS: tl.constexpr, BIAS: tl.constexpr, WHOLE: tl.constexpr,
    TILE_COLUMNS: tl.constexpr, TILES: tl.constexpr, TILE_DEPTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out [columns] = weight @ x [depth] + bias, as ``multiply_codes``. Grid: (ceil(columns / TILE_COLUMNS),).

    Each iteration takes TILES tiles of the codes. WHOLE: all inputs are one group without zero point and minima.
    """
    column = tl.program_id(0) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    existing = tl.minimum(column, columns - 1)
    tile = tl.arange(0, TILES) * TILE_DEPTH
    places = tile[:, None] + tl.arange(0, TILE_DEPTH)[None, :]
    starts = codes + existing.to(tl.int64)[:, None, None] * codes_row + places[None, :, :]
    total = tl.zeros([TILE_COLUMNS, TILES, TILE_DEPTH], tl.float32)
    for first in tl.range(0, codes_row, TILES * TILE_DEPTH, num_stages=STAGES):
        start = first + tile
        loaded = tl.load(starts + first, (start < codes_row)[None, :, None], 0)
        if KIND >= INT4:
            low, high = four_bits(loaded & 15, KIND), four_bits(loaded >> 4, KIND)
            total += row_products(
                low, x, scales, zeros, mins, existing, 2 * start, depth, group, group_row,
                KIND, ZEROS, MINS, WHOLE, TILE_DEPTH,
            )  # fmt: skip
            total += row_products(
                high, x, scales, zeros, mins, existing, 2 * start + TILE_DEPTH, depth, group, group_row,
                KIND, ZEROS, MINS, WHOLE, TILE_DEPTH,
            )  # fmt: skip
        else:
            total += row_products(
                decode(loaded, KIND), x, scales, zeros, mins, existing, start, depth, group, group_row,
                KIND, ZEROS, MINS, WHOLE, TILE_DEPTH,
            )  # fmt: skip
    result = tl.sum(tl.sum(total, 2), 1)
    if WHOLE:
        result *= tl.load(scales + existing).to(tl.float32)
    if BIAS:
        result += tl.load(bias + existing).to(tl.float32)
    tl.store(out + column, result.to(out.dtype.element_ty), column < columns)


@triton.jit
def dequantize(
    codes, scales, zeros, mins, out, columns, depth, codes_row, group, group_row,
    KIND: tl.constexpr, ZEROS: tl.constexpr, MINS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr, TILES: tl.constexpr, TILE_DEPTH: tl.constexpr,
):  # fmt: skip
    """out [columns, depth] = the weight of ``multiply_codes``. Grid: (tiles of columns, groups of TILES tiles)."""
    column = tl.program_id(0) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    existing, is_column = tl.minimum(column, columns - 1), column < columns
    inside = tl.arange(0, TILE_DEPTH)
    start = (tl.program_id(1) * TILES + tl.arange(0, TILES)) * TILE_DEPTH
    places = start[:, None] + inside[None, :]
    exists = (start < codes_row)[None, :, None]
    loaded = tl.load(codes + existing.to(tl.int64)[:, None, None] * codes_row + places[None, :, :], exists, 0)
    rows = out + existing.to(tl.int64)[:, None, None] * depth
    for half in tl.static_range(2 if KIND >= INT4 else 1):
        if KIND >= INT4:
            first, numbers = 2 * start + half * TILE_DEPTH, four_bits(loaded >> 4 if half else loaded & 15, KIND)
        else:
            first, numbers = start, decode(loaded, KIND)
        weights = numbers_to_weights(
            numbers, scales, zeros, mins, existing, first, depth, group, group_row, KIND, ZEROS, MINS
        )
        at = first[:, None] + inside[None, :]
        stored = is_column[:, None, None] & (at < depth)[None, :, :]
        tl.store(rows + at[None, :, :], weights.to(out.dtype.element_ty), stored)
