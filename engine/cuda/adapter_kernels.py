"""Triton kernels of adapters: low-rank changes of rows, each with the matrices of its own adapter.

    sums [part, split, place]   = x[rows[place]] @ down^T        shrink
    out[rows[place]]           += sums[part, :, place] @ up^T    expand

Rows have places in tiles of TILE_ROWS, each tile of one adapter::

    rows        4  9  -  |  0  1  2  |  7  -  -      -1 at a place without a row
    adapters       0     |     2     |     2         of the tiles

``table`` [parts, columns, 3], int64, has a column for each adapter: the addresses of down [rank, depth] and of up
[outputs, rank], and the rank, a multiple of TILE_RANK; 0 if the adapter does not change the part.

A row's numbers are sums in one order whatever is in the batch: over ranges of SPLIT inputs, each over tiles of
TILE_DEPTH inputs, then over tiles of TILE_RANK.
"""

from __future__ import annotations

import triton
import triton.language as tl

from decant.engine.cuda.attention_kernels import product_onto


@triton.jit(do_not_specialize=["columns", "tiles", "rank_tiles", "splits"])
def shrink(
    x, rows, adapters, table, sums, depth, x_row, columns, tiles, rank_tiles, splits,
    TILE_ROWS: tl.constexpr, TILE_RANK: tl.constexpr, TILE_DEPTH: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Write sums [parts, splits, tiles * TILE_ROWS, rank_tiles * TILE_RANK], float32.

    Grid: (tiles * rank_tiles, splits, parts).

    With ``splits`` > 1, the number of ranges, each range has its own sum; with one they are added here.
    """
    tile, rank_tile = tl.program_id(0) // rank_tiles, tl.program_id(0) % rank_tiles
    split, part = tl.program_id(1), tl.program_id(2)
    entry = table + (part * columns + tl.load(adapters + tile)) * 3
    if rank_tile * TILE_RANK < tl.load(entry + 2):
        place = tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
        rank = rank_tile * TILE_RANK + tl.arange(0, TILE_RANK)
        row = tl.load(rows + place)
        inputs_of = x + row.to(tl.int64)[:, None] * x_row
        down = tl.multiple_of(tl.load(entry).to(tl.pointer_type(x.dtype.element_ty)), 16)
        numbers_of = down + rank.to(tl.int64)[None, :] * depth
        begin, end = split * SPLIT, depth
        if splits > 1:
            end = tl.minimum(begin + SPLIT, depth)
        total = tl.zeros([TILE_ROWS, TILE_RANK], tl.float32)
        while begin < end:
            of_range = tl.zeros([TILE_ROWS, TILE_RANK], tl.float32)
            for start in range(begin, tl.minimum(begin + SPLIT, depth), TILE_DEPTH):
                at = start + tl.arange(0, TILE_DEPTH)
                exists = at < depth
                inputs = tl.load(inputs_of + at[None, :], (row >= 0)[:, None] & exists[None, :], other=0.0)
                numbers = tl.load(numbers_of + at[:, None], exists[:, None], other=0.0)
                of_range = product_onto(inputs, numbers, of_range)
            total += of_range
            begin += SPLIT
        at_place = (part * splits + split).to(tl.int64) * tiles * TILE_ROWS + place
        tl.store(sums + at_place[:, None] * (rank_tiles * TILE_RANK) + rank[None, :], total)


@triton.jit(do_not_specialize=["columns", "tiles", "rank_tiles", "splits"])
def expand(
    sums, rows, adapters, table, spans, out, out_row, columns, tiles, rank_tiles, splits,
    TILE_ROWS: tl.constexpr, TILE_OUTPUTS: tl.constexpr, TILE_RANK: tl.constexpr,
):  # fmt: skip
    """Add to ``out``, which is rounded once. Grid: (tiles, tiles of the outputs of the widest part, parts).

    spans [parts, 2], int32: the first output of each part, and their number.
    """
    tile, part = tl.program_id(0), tl.program_id(2)
    entry = table + (part * columns + tl.load(adapters + tile)) * 3
    rank = tl.multiple_of(tl.load(entry + 2).to(tl.int32), 16)
    first, count = tl.load(spans + part * 2), tl.load(spans + part * 2 + 1)
    if (rank > 0) & (tl.program_id(1) * TILE_OUTPUTS < count):
        output = tl.program_id(1) * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
        is_output = output < count
        place = tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
        row = tl.load(rows + place)
        dtype = out.dtype.element_ty
        up = tl.multiple_of(tl.load(entry + 1).to(tl.pointer_type(dtype)), 16)
        total = tl.zeros([TILE_ROWS, TILE_OUTPUTS], tl.float32)
        for start in range(0, rank, TILE_RANK):
            at = start + tl.arange(0, TILE_RANK)
            inner = tl.zeros([TILE_ROWS, TILE_RANK], tl.float32)
            for split in range(splits):
                at_place = (part * splits + split).to(tl.int64) * tiles * TILE_ROWS + place
                inner += tl.load(sums + at_place[:, None] * (rank_tiles * TILE_RANK) + at[None, :])
            numbers = tl.load(up + output.to(tl.int64)[None, :] * rank + at[:, None], is_output[None, :], other=0.0)
            total = product_onto(inner.to(dtype), numbers, total)
        target = out + row.to(tl.int64)[:, None] * out_row + first + output[None, :]
        exists = (row >= 0)[:, None] & is_output[None, :]
        total += tl.load(target, exists, other=0.0).to(tl.float32)
        tl.store(target, total.to(dtype), exists)
