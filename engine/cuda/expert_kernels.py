"""Triton kernels of a mixture's experts, whose rows are found on the device: no launch depends on what a router chose.

A pair is a token and one of its ``top_k`` experts; pair p is of token p // top_k. They are placed by expert::

    chosen   2 0   0 1   2 0      of 3 tokens
    starts   0 3 4 6
    places   1 2 5   3   0 4      pairs of expert 0, 1 and 2, ascending
"""

from __future__ import annotations

import triton
import triton.language as tl

from decant.engine.cuda.coded_kernels import tile_product


@triton.jit(do_not_specialize=["pairs"])
def place_pairs(chosen, starts, places, pairs, TILE: tl.constexpr):
    """Write starts [experts + 1] and places [pairs], int32, from chosen [pairs], int64. Grid: (experts,)."""
    expert = tl.program_id(0)
    smaller = tl.zeros([TILE], tl.int32)
    for start in range(0, pairs, TILE):
        pair = start + tl.arange(0, TILE)
        smaller += (tl.load(chosen + pair, pair < pairs, expert) < expert).to(tl.int32)
    place = tl.sum(smaller)
    if expert == 0:
        tl.store(starts, 0)
    for start in range(0, pairs, TILE):
        pair = start + tl.arange(0, TILE)
        is_own = ((pair < pairs) & (tl.load(chosen + pair, pair < pairs, -1) == expert)).to(tl.int32)
        tl.store(places + place + tl.cumsum(is_own) - is_own, pair, is_own > 0)
        place += tl.sum(is_own)
    tl.store(starts + expert + 1, place)


@triton.jit
def multiply_expert_codes(
    x, codes, scales, zeros, mins, bias, out, starts, places, columns, depth, x_row, codes_row, group, groups,
    TOP_K: tl.constexpr, KIND: tl.constexpr, ZEROS: tl.constexpr, MINS: tl.constexpr, BIAS: tl.constexpr,
    WHOLE: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, TILE_DEPTH: tl.constexpr,
):  # fmt: skip
    """out [pairs, columns] = row p // TOP_K of x, times the weight of the expert of pair p, + its bias.

    Grid: (experts * tiles of columns,). Weights are those of ``multiply_codes``, of one expert after the other:
    codes [experts, columns, codes_row]; scales, zeros, mins [experts, groups, columns]; bias [experts, columns].
    """
    tiles = tl.cdiv(columns, TILE_COLUMNS)
    expert = (tl.program_id(0) // tiles).to(tl.int64)
    first, last = tl.load(starts + expert), tl.load(starts + expert + 1)
    column = tl.program_id(0) % tiles * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    existing = tl.minimum(column, columns - 1)
    row_codes = codes + (expert * columns + existing)[:, None] * codes_row + tl.arange(0, TILE_DEPTH)[None, :]
    of_groups = expert * groups * columns + existing
    for start in range(first, last, TILE_ROWS):
        place = start + tl.arange(0, TILE_ROWS)
        is_row = place < last
        pair = tl.load(places + place, is_row, 0)
        total = tile_product(
            x, row_codes, scales + of_groups, zeros + of_groups, mins + of_groups, pair // TOP_K, is_row, x_row, depth,
            group, columns, KIND, ZEROS, MINS, WHOLE, TILE_ROWS, TILE_COLUMNS, TILE_DEPTH,
        )  # fmt: skip
        if BIAS:
            total += tl.load(bias + expert * columns + existing).to(tl.float32)[:, None]
        at = pair.to(tl.int64)[None, :] * columns + column[:, None]
        tl.store(out + at, total.to(out.dtype.element_ty), is_row[None, :] & (column < columns)[:, None])


@triton.jit
def add_experts(outputs, shares, out, width, TOP_K: tl.constexpr, TILE: tl.constexpr):
    """out [tokens, width] = the sum of outputs [tokens * TOP_K, width], each times its share, in float32.

    Grid: (tokens, ceil(width / TILE)). A token's experts are added in the router's order.
    """
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    total = tl.zeros([TILE], tl.float32)
    for rank in tl.static_range(TOP_K):
        pair = token * TOP_K + rank
        output = tl.load(outputs + pair * width + at, at < width, 0.0).to(tl.float32)
        total += output * tl.load(shares + pair).to(tl.float32)
    tl.store(out + token * width + at, total.to(out.dtype.element_ty), at < width)
