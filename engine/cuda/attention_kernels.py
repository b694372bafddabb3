"""Triton kernels of paged attention over KV blocks in place, and of writing keys and values to their blocks.

A work item is a tile of query rows of one sequence and a range of splits of its keys. Query rows are a position's query
heads of one KV head, position-major::

    keys ->       split 0        split 1        split 2       SPLIT positions each, at multiples of SPLIT
    chunk tile   [======================================]     one item walks all splits
    decode       [======]        [======]        [==]         one item per split, then ``merge_splits``

Both compute the same numbers in the same order: each split by itself, tile after tile of ``TILE`` keys, then merged in
order of position. A tile or split that a row does not see leaves its state unchanged to the bit. So a row's result
depends on neither the other rows nor the number of splits of the batch. Online softmax: Milakov and Gimelshein 2018;
tiles: FlashAttention, Dao et al. 2022; splits: Flash-Decoding, Dao et al. 2023. Scores are in units of log2.

``do_not_specialize`` names what differs from step to step: triton would compile again, within a step, for a number that
is 1 or a multiple of 16, and for an aligned pointer.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)

LOWEST = tl.constexpr(-1e30)
"""Below any score; finite for rows without visible keys."""


WIDEN = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""triton's interpreter multiplies the bit patterns of bfloat16; widening changes no product."""


@triton.jit
def product(left, right):
    if WIDEN:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, input_precision="ieee")


@triton.jit(do_not_specialize_on_alignment=["slots"])
def write_kv(
    key, value, slots, memory, key_token, key_head,
    value_token, value_head, block_elements, key_offset, value_offset,
    BLOCK: tl.constexpr, KV_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_PAD: tl.constexpr, VALUE_PAD: tl.constexpr,
):  # fmt: skip
    """Write a token's key and value of one head. Grid: (T, KV_HEADS).

    ``slots`` [T]: block * BLOCK + slot in the block.
    """
    token, head = tl.program_id(0), tl.program_id(1)
    place = tl.load(slots + token)
    block, slot = place // BLOCK, place % BLOCK
    start = memory + block * block_elements
    token = token.to(tl.int64)
    dims = tl.arange(0, KEY_PAD)
    number = tl.load(key + token * key_token + head * key_head + dims, dims < KEY_DIM)
    tl.store(start + key_offset + (slot * KV_HEADS + head) * KEY_DIM + dims, number, dims < KEY_DIM)
    dims = tl.arange(0, VALUE_PAD)
    number = tl.load(value + token * value_token + head * value_head + dims, dims < VALUE_DIM)
    tl.store(start + value_offset + (slot * KV_HEADS + head) * VALUE_DIM + dims, number, dims < VALUE_DIM)


@triton.jit
def merge(highest, total, output, highest_of, total_of, output_of):
    """Add the softmax state of one split to the running state.

    The compiler may contract either product of a * b + c * d, in each kernel another one: ``fma`` makes the choice.
    """
    most = tl.maximum(highest, highest_of)
    decay, weight = tl.exp2(highest - most), tl.exp2(highest_of - most)
    output = tl.fma(output, decay[:, None], output_of * weight[:, None])
    return most, tl.fma(total, decay, total_of * weight), output


@triton.jit
def finish(highest, total, output, sink):
    """Normalize the output of a state. ``sink``: a score in the softmax without a value, -inf for none."""
    most = tl.maximum(highest, sink)
    decay = tl.exp2(highest - most)
    divisor = tl.fma(total, decay, tl.exp2(sink - most))
    return output * decay[:, None] / tl.where(divisor == 0.0, 1.0, divisor)[:, None]


@triton.jit
def attend_split(
    queries, memory, blocks, position, first, is_row, kv_head, begin, end, stop,
    block_elements, key_offset, value_offset, scaling, softcap,
    BLOCK: tl.constexpr, KV_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr, VALUE_PAD: tl.constexpr, TILE_ROWS: tl.constexpr, TILE: tl.constexpr,
    SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Softmax state (highest, total, output) of a tile of query rows over the keys from ``begin`` to ``end``."""
    key_dims, value_dims = tl.arange(0, KEY_PAD), tl.arange(0, VALUE_PAD)
    highest = tl.full([TILE_ROWS], LOWEST, tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    output = tl.zeros([TILE_ROWS, VALUE_PAD], tl.float32)
    for key_start in range(begin, end, TILE):
        keys_at = key_start + tl.arange(0, TILE)
        exists = keys_at < stop
        block = tl.load(blocks + keys_at // BLOCK, exists, other=0).to(tl.int64)
        slot = memory + block * block_elements
        key_at = slot + key_offset + (keys_at % BLOCK * KV_HEADS + kv_head) * KEY_DIM
        keys = tl.load(key_at[None, :] + key_dims[:, None], exists[None, :] & (key_dims < KEY_DIM)[:, None], other=0.0)
        scores = product(queries, keys) * scaling
        if SOFTCAP:
            scores = (2.0 / (1.0 + tl.exp2(scores * LOG2E * -2.0 / softcap)) - 1.0) * softcap
        seen = (keys_at[None, :] <= position[:, None]) & (keys_at[None, :] >= first[:, None]) & is_row[:, None]
        scores = tl.where(seen, scores * LOG2E, float("-inf"))
        most = tl.maximum(highest, tl.max(scores, 1))
        weights, decay = tl.exp2(scores - most[:, None]), tl.exp2(highest - most)
        value_at = slot + value_offset + (keys_at % BLOCK * KV_HEADS + kv_head) * VALUE_DIM
        values = tl.load(
            value_at[:, None] + value_dims[None, :], exists[:, None] & (value_dims < VALUE_DIM)[None, :], other=0.0
        )
        total = total * decay + tl.sum(weights, 1)
        output = output * decay[:, None] + product(weights.to(values.dtype), values)
        highest = most
    return highest, total, output


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["table"])
def attend(
    query, out, memory, sinks, visible, items, rows, table,
    states, query_token, query_head, block_elements, key_offset, value_offset, width,
    scaling, softcap,
    BLOCK: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr, VALUE_PAD: tl.constexpr, TILE_ROWS: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Attend a tile of query rows over a range of splits. Grid: (items, KV_HEADS).

    items [n, 5]   row, first query position, first split, last split + 1, index of its state or -1: writes ``out``
    rows [B, 3]    of each sequence: flattened position of its first query, that query's position, its end
    table [B, width]  blocks;  states [s, KV_HEADS, TILE_ROWS, 2 + VALUE_DIM]  highest, total and output
    visible [T]    first position that each token sees
    """
    item, kv_head = items + tl.program_id(0) * 5, tl.program_id(1)
    row = tl.load(item)
    first_position = tl.load(item + 1)
    split, last_split, state = tl.load(item + 2), tl.load(item + 3), tl.load(item + 4)
    flat, start, end = tl.load(rows + row * 3), tl.load(rows + row * 3 + 1), tl.load(rows + row * 3 + 2)
    folded = tl.arange(0, TILE_ROWS)
    position = first_position + folded // GROUP
    is_row = (folded // GROUP < TILE_ROWS // GROUP) & (position < end)
    head = kv_head * GROUP + folded % GROUP
    token = (flat + position - start).to(tl.int64)
    first = tl.load(visible + token, is_row, other=0)
    # The last position of the tile bounds the keys that are read.
    stop = tl.minimum(first_position + TILE_ROWS // GROUP, end)
    key_dims, value_dims = tl.arange(0, KEY_PAD), tl.arange(0, VALUE_PAD)
    queries = tl.load(
        query + token[:, None] * query_token + head[:, None] * query_head + key_dims[None, :],
        is_row[:, None] & (key_dims < KEY_DIM)[None, :],
        other=0.0,
    )
    highest = tl.full([TILE_ROWS], LOWEST, tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    output = tl.zeros([TILE_ROWS, VALUE_PAD], tl.float32)
    while split < last_split:
        highest_of, total_of, output_of = attend_split(
            queries, memory, table + row * width, position, first, is_row, kv_head, split * SPLIT,
            tl.minimum((split + 1) * SPLIT, stop), stop, block_elements, key_offset, value_offset, scaling, softcap,
            BLOCK, KV_HEADS, KEY_DIM, VALUE_DIM, KEY_PAD, VALUE_PAD, TILE_ROWS, TILE, SOFTCAP,
        )  # fmt: skip
        highest, total, output = merge(highest, total, output, highest_of, total_of, output_of)
        split += 1
    if state < 0:
        sink = tl.full([TILE_ROWS], float("-inf"), tl.float32)
        if SINKS:
            sink = tl.load(sinks + head, is_row, other=0.0).to(tl.float32) * LOG2E
        result = finish(highest, total, output, sink).to(out.dtype.element_ty)
        at = out + (token * (KV_HEADS * GROUP) + head)[:, None] * VALUE_DIM + value_dims[None, :]
        tl.store(at, result, is_row[:, None] & (value_dims < VALUE_DIM)[None, :])
    else:
        state_at = states + ((state.to(tl.int64) * KV_HEADS + kv_head) * TILE_ROWS + folded) * (2 + VALUE_DIM)
        tl.store(state_at, highest, is_row)
        tl.store(state_at + 1, total, is_row)
        tl.store(
            state_at[:, None] + 2 + value_dims[None, :], output, is_row[:, None] & (value_dims < VALUE_DIM)[None, :]
        )


@triton.jit
def merge_splits(
    states, out, sinks, merges,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr,
    TILE_ROWS: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Merge the states of a query token in order of position. Grid: (n, KV_HEADS).

    merges [n, 3]: flattened position of the query, first state, number of states; 0: no output.
    """
    entry, kv_head = merges + tl.program_id(0) * 3, tl.program_id(1)
    token, state, count = tl.load(entry).to(tl.int64), tl.load(entry + 1).to(tl.int64), tl.load(entry + 2)
    folded, dims = tl.arange(0, TILE_ROWS), tl.arange(0, VALUE_PAD)
    head, is_row = kv_head * GROUP + folded % GROUP, (folded < GROUP) & (count > 0)
    highest = tl.full([TILE_ROWS], LOWEST, tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    output = tl.zeros([TILE_ROWS, VALUE_PAD], tl.float32)
    index = 0
    while index < count:
        at = states + (((state + index) * KV_HEADS + kv_head) * TILE_ROWS + folded) * (2 + VALUE_DIM)
        highest_of, total_of = tl.load(at, is_row, other=0.0), tl.load(at + 1, is_row, other=0.0)
        is_value = is_row[:, None] & (dims < VALUE_DIM)[None, :]
        output_of = tl.load(at[:, None] + 2 + dims[None, :], is_value, other=0.0)
        highest, total, output = merge(highest, total, output, highest_of, total_of, output_of)
        index += 1
    sink = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    if SINKS:
        sink = tl.load(sinks + head, is_row, other=0.0).to(tl.float32) * LOG2E
    result = finish(highest, total, output, sink).to(out.dtype.element_ty)
    at = out + (token * (KV_HEADS * GROUP) + head)[:, None] * VALUE_DIM + dims[None, :]
    tl.store(at, result, is_row[:, None] & (dims < VALUE_DIM)[None, :])
