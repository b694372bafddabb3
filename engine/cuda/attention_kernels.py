"""Triton kernels of paged attention over KV blocks in place, and of writing keys and values to their blocks.

A work item is a tile of query rows of one sequence and a range of its keys. Query rows are a position's query heads of
one KV head, position-major; the programs of an item's heads run side by side, as a token's heads do in a block::

    keys ->       0              SPLIT          2 SPLIT
    chunk tile   [================================================]   one item sees all keys
    decode       [=============][=============][=======]              items of few keys, the last to end merges

Online softmax: Milakov and Gimelshein 2018; tiles: FlashAttention, Dao et al. 2022; items of few keys: Flash-Decoding,
Dao et al. 2023. Scores are in units of log2.

With SPLIT, a row's result depends on neither the other rows nor the number of items: each range of SPLIT keys is
computed by itself, tile after tile of ``TILE`` keys, then merged in order of position, by an item that has several or
by the last of several items. A tile that a row does not see leaves its state unchanged to the bit. The compiler may
contract either product of a * b + c * d, at each place another one, so ``fma`` makes the choice.

``do_not_specialize`` names what differs from step to step or from model to model: triton would compile again, within a
step, for a number that is 1 or a multiple of 16, and for an aligned pointer.
"""

from __future__ import annotations

import triton
import triton.language as tl

from decant.engine.cuda.kv_kernels import codes_of, scale_of, scales_of

LOG2E = tl.constexpr(1.4426950408889634)

LOWEST = tl.constexpr(-1e30)
"""Below any score; finite for rows without visible keys."""


STATES_AT_ONCE = tl.constexpr(4)
"""States that a merge loads before it waits: one after the other, each would take the latency of the L2 cache."""

SMALL_STATE = tl.constexpr(2048)
"""Numbers of a state of which registers hold several."""

WIDEN = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""triton's interpreter multiplies the bit patterns of bfloat16; widening changes no product."""


@triton.jit
def product(left, right):
    if WIDEN:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def product_onto(left, right, total):
    """total + left @ right."""
    if WIDEN:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, total, input_precision="ieee")


@triton.jit(do_not_specialize_on_alignment=["slots"])
def write_kv(
    key, value, slots, memory, key_token, key_head,
    value_token, value_head, block_elements, key_offset, value_offset,
    BLOCK: tl.constexpr, KV_HEADS: tl.constexpr, KV_HEADS_PAD: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_PAD: tl.constexpr, VALUE_PAD: tl.constexpr,
    CODED: tl.constexpr = False,
):  # fmt: skip
    """Write a token's keys and values, as codes if CODED. Grid: (T,).

    ``slots`` [T]: block * BLOCK + slot in the block.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    start = memory + slot // BLOCK * block_elements
    slot = slot % BLOCK
    heads = tl.arange(0, KV_HEADS_PAD)
    if CODED:
        key_scales, value_scales = scales_of(start, value_offset, BLOCK, KV_HEADS, VALUE_DIM)
    dims = tl.arange(0, KEY_PAD)
    exists = (heads < KV_HEADS)[:, None] & (dims < KEY_DIM)[None, :]
    number = tl.load(key + token * key_token + heads[:, None] * key_head + dims[None, :], exists, other=0.0)
    if CODED:
        scales = scale_of(number.to(tl.float32))
        tl.store(key_scales + slot * KV_HEADS + heads, scales.to(tl.bfloat16), heads < KV_HEADS)
        number = codes_of(number.to(tl.float32), scales)
    tl.store(start + key_offset + (slot * KV_HEADS + heads)[:, None] * KEY_DIM + dims[None, :], number, exists)
    dims = tl.arange(0, VALUE_PAD)
    exists = (heads < KV_HEADS)[:, None] & (dims < VALUE_DIM)[None, :]
    number = tl.load(value + token * value_token + heads[:, None] * value_head + dims[None, :], exists, other=0.0)
    if CODED:
        scales = scale_of(number.to(tl.float32))
        tl.store(value_scales + slot * KV_HEADS + heads, scales.to(tl.bfloat16), heads < KV_HEADS)
        number = codes_of(number.to(tl.float32), scales)
    tl.store(start + value_offset + (slot * KV_HEADS + heads)[:, None] * VALUE_DIM + dims[None, :], number, exists)


@triton.jit
def merge(highest, total, output, highest_of, total_of, output_of):
    """Add the softmax state of other keys to the running state."""
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
def attend_keys(
    highest, total, output, queries, memory, blocks, position, first, kv_head, begin, end,
    block_elements, key_offset, value_offset, scaling, softcap,
    BLOCK: tl.constexpr, KV_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr, VALUE_PAD: tl.constexpr, TILE: tl.constexpr,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, CODED: tl.constexpr,
):  # fmt: skip
    """Continue a softmax state over the keys from ``begin``, a multiple of TILE, to ``end``.

    CODED: scores are products with codes, which the queries' dtype holds exactly, times the scales of their keys.
    MASKED: rows see keys up to their ``position``, and from ``first`` on if WINDOW; else all, and ``end`` is a multiple
    of TILE.
    """
    key_dims, value_dims, in_tile = tl.arange(0, KEY_PAD), tl.arange(0, VALUE_PAD), tl.arange(0, TILE)
    for key_start in range(begin, end, TILE):
        keys_at = key_start + in_tile
        exists = keys_at < end
        if BLOCK >= TILE:  # one block has all keys of the tile
            block = tl.load(blocks + key_start // BLOCK).to(tl.int64)
            start, slots = memory + block * block_elements, key_start % BLOCK + in_tile
        else:
            block = tl.load(blocks + keys_at // BLOCK, exists, other=0).to(tl.int64)
            start, slots = memory + block * block_elements, keys_at % BLOCK
        key_at = start + key_offset + (slots * KV_HEADS + kv_head) * KEY_DIM
        value_at = start + value_offset + (slots * KV_HEADS + kv_head) * VALUE_DIM
        keys_of = key_at[None, :] + key_dims[:, None]
        values_of = value_at[:, None] + value_dims[None, :]
        if MASKED:
            keys = tl.load(keys_of, exists[None, :] & (key_dims < KEY_DIM)[:, None], other=0.0)
        elif KEY_DIM == KEY_PAD:
            keys = tl.load(keys_of)
        else:
            keys = tl.load(keys_of, (key_dims < KEY_DIM)[:, None], other=0.0)
        if CODED:
            key_scales, value_scales = scales_of(start, value_offset, BLOCK, KV_HEADS, VALUE_DIM)
            scale_at = slots * KV_HEADS + kv_head
            key_scale = tl.load(key_scales + scale_at, exists, other=0.0).to(tl.float32)
            codes = keys.to(tl.float32).to(queries.dtype)  # the interpreter converts no integers to bfloat16
            scores = product(queries, codes) * key_scale[None, :]
        else:
            scores = product(queries, keys)
        scale = scaling * LOG2E
        if SOFTCAP:
            scores = (2.0 / (1.0 + tl.exp2(scores * (scale * -2.0) / softcap)) - 1.0) * (softcap * LOG2E)
            scale = 1.0
        if MASKED:
            seen = (keys_at[None, :] <= position[:, None]) & exists[None, :]
            if WINDOW:
                seen = seen & (keys_at[None, :] >= first[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        most = tl.maximum(highest, tl.max(scores, 1) * scale)
        weights, decay = tl.exp2(tl.fma(scores, tl.zeros_like(scores) + scale, -most[:, None])), tl.exp2(highest - most)
        if MASKED:
            values = tl.load(values_of, exists[:, None] & (value_dims < VALUE_DIM)[None, :], other=0.0)
        elif VALUE_DIM == VALUE_PAD:
            values = tl.load(values_of)
        else:
            values = tl.load(values_of, (value_dims < VALUE_DIM)[None, :], other=0.0)
        total = tl.fma(total, decay, tl.sum(weights, 1))
        if CODED:  # weights times scales would leave the range of float16
            value_scale = tl.load(value_scales + scale_at, exists, other=0.0).to(tl.float32)
            values = (values.to(tl.float32) * value_scale[:, None]).to(queries.dtype)
        output = product_onto(weights.to(values.dtype), values, output * decay[:, None])
        highest = most
    return highest, total, output


@triton.jit(do_not_specialize=["width", "group"], do_not_specialize_on_alignment=["table"])
def attend(
    query, out, memory, sinks, visible, items, merges, ended, rows, table,
    states, query_token, query_head, block_elements, key_offset, value_offset, width, group,
    scaling, softcap,
    BLOCK: tl.constexpr, KV_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr, VALUE_PAD: tl.constexpr, TILE_ROWS: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr,
    CHUNK: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
    CODED: tl.constexpr = False,
):  # fmt: skip
    """Attend a tile of query rows over a range of keys. Grid: (items * KV_HEADS,).

    items [n, 6]   row or -1: no work; first query position; first key, a multiple of TILE or SPLIT, and last + 1; index
                   of its first state, or -1: writes ``out``; index of its merge
    merges [m, 3]  first state, number of states, and number of items of a single token
    ended [m, KV_HEADS]  items that have written their states: 0 before and after
    rows [B, 3]    of each sequence: flattened position of its first query, that query's position, its end
    table [B, width]  blocks;  states [s, KV_HEADS, group, 2 + VALUE_DIM]  highest, total and output
    visible [T]    first position that each token sees, if WINDOW
    SPLIT          keys of a state; 0: an item has one

    CHUNK          items write ``out``; keys that all positions of an item see need no mask, if not WINDOW
    """
    kv_head, item = tl.program_id(0) % KV_HEADS, items + tl.program_id(0) // KV_HEADS * 6
    row = tl.load(item)
    if row < 0:
        return
    first_position, begin, end = tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    state = tl.load(item + 4).to(tl.int64)
    flat, start, stop = tl.load(rows + row * 3), tl.load(rows + row * 3 + 1), tl.load(rows + row * 3 + 2)
    folded = tl.arange(0, TILE_ROWS)
    position = first_position + folded // group
    is_row = (folded // group < TILE_ROWS // group) & (position < stop)
    head = kv_head * group + folded % group
    token = (flat + position - start).to(tl.int64)
    first = position
    if WINDOW:
        first = tl.load(visible + token, is_row, other=0)
    key_dims, value_dims = tl.arange(0, KEY_PAD), tl.arange(0, VALUE_PAD)
    queries = tl.load(
        query + token[:, None] * query_token + head[:, None] * query_head + key_dims[None, :],
        is_row[:, None] & (key_dims < KEY_DIM)[None, :],
        other=0.0,
    )
    highest = tl.full([TILE_ROWS], LOWEST, tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    output = tl.zeros([TILE_ROWS, VALUE_PAD], tl.float32)
    seen_by_all = begin
    if CHUNK and not WINDOW:
        seen_by_all = (first_position + 1) // TILE * TILE
    blocks = table + row.to(tl.int64) * width
    state_at = states + ((state * KV_HEADS + kv_head) * group + folded) * (2 + VALUE_DIM)
    is_value = is_row[:, None] & (value_dims < VALUE_DIM)[None, :]
    if SPLIT == 0:
        highest, total, output = attend_range(
            highest, total, output, queries, memory, blocks, position, first, kv_head, begin, end, seen_by_all,
            block_elements, key_offset, value_offset, scaling, softcap, BLOCK, KV_HEADS, KEY_DIM, VALUE_DIM, KEY_PAD,
            VALUE_PAD, TILE, CHUNK, WINDOW, SOFTCAP, CODED,
        )  # fmt: skip
        if not CHUNK and state >= 0:
            store_state(state_at, highest, total, output, is_row, is_value, value_dims)
    else:
        while begin < end:
            highest_of, total_of, output_of = attend_range(
                tl.full([TILE_ROWS], LOWEST, tl.float32), tl.zeros([TILE_ROWS], tl.float32),
                tl.zeros([TILE_ROWS, VALUE_PAD], tl.float32), queries, memory, blocks, position, first, kv_head, begin,
                tl.minimum(begin + SPLIT, end), seen_by_all, block_elements, key_offset, value_offset, scaling, softcap,
                BLOCK, KV_HEADS, KEY_DIM, VALUE_DIM, KEY_PAD, VALUE_PAD, TILE, CHUNK, WINDOW, SOFTCAP, CODED,
            )  # fmt: skip
            if state >= 0:
                store_state(state_at, highest_of, total_of, output_of, is_row, is_value, value_dims)
                state_at += KV_HEADS * group * (2 + VALUE_DIM)
            else:
                highest, total, output = merge(highest, total, output, highest_of, total_of, output_of)
            begin += SPLIT
    is_output = state < 0
    if not CHUNK and state >= 0:
        index = tl.load(item + 5)
        merge_of, counter = merges + index * 3, ended + index * KV_HEADS + kv_head
        tl.debug_barrier()  # all threads have written the states, which the atomic then releases
        if tl.atomic_add(counter, 1, sem="acq_rel") == tl.load(merge_of + 2) - 1:
            tl.store(counter, 0)
            highest, total, output = merge_states(
                states, tl.load(merge_of).to(tl.int64), tl.load(merge_of + 1), kv_head, group, folded, is_row, is_value,
                value_dims, KV_HEADS, VALUE_DIM, VALUE_PAD, TILE_ROWS,
            )  # fmt: skip
            is_output = True
    if is_output:
        sink = tl.full([TILE_ROWS], float("-inf"), tl.float32)
        if SINKS:
            sink = tl.load(sinks + head, is_row, other=0.0).to(tl.float32) * LOG2E
        result = finish(highest, total, output, sink).to(out.dtype.element_ty)
        at = out + (token * (KV_HEADS * group) + head)[:, None] * VALUE_DIM + value_dims[None, :]
        tl.store(at, result, is_value)


@triton.jit
def attend_range(
    highest, total, output, queries, memory, blocks, position, first, kv_head, begin, end, seen_by_all,
    block_elements, key_offset, value_offset, scaling, softcap,
    BLOCK: tl.constexpr, KV_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr, VALUE_PAD: tl.constexpr, TILE: tl.constexpr,
    CHUNK: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, CODED: tl.constexpr,
):  # fmt: skip
    """``attend_keys`` over keys before ``seen_by_all``, a multiple of TILE, without a mask, then over the rest."""
    if CHUNK and not WINDOW:
        border = tl.maximum(begin, tl.minimum(seen_by_all, end // TILE * TILE))
        highest, total, output = attend_keys(
            highest, total, output, queries, memory, blocks, position, first, kv_head, begin, border, block_elements,
            key_offset, value_offset, scaling, softcap, BLOCK, KV_HEADS, KEY_DIM, VALUE_DIM, KEY_PAD, VALUE_PAD, TILE,
            False, WINDOW, SOFTCAP, CODED,
        )  # fmt: skip
        begin = border
    return attend_keys(
        highest, total, output, queries, memory, blocks, position, first, kv_head, begin, end, block_elements,
        key_offset, value_offset, scaling, softcap, BLOCK, KV_HEADS, KEY_DIM, VALUE_DIM, KEY_PAD, VALUE_PAD, TILE,
        True, WINDOW, SOFTCAP, CODED,
    )  # fmt: skip


@triton.jit
def store_state(state_at, highest, total, output, is_row, is_value, value_dims):
    tl.store(state_at, highest, is_row)
    tl.store(state_at + 1, total, is_row)
    tl.store(state_at[:, None] + 2 + value_dims[None, :], output, is_value)


@triton.jit
def merge_states(
    states, first, count, kv_head, group, folded, is_row, is_value, value_dims,
    KV_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr, TILE_ROWS: tl.constexpr,
):  # fmt: skip
    """Merge ``count`` states in order of position. Other programs wrote them: they are not in this one's L1 cache."""
    highest = tl.full([TILE_ROWS], LOWEST, tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    output = tl.zeros([TILE_ROWS, VALUE_PAD], tl.float32)
    at_once: tl.constexpr = STATES_AT_ONCE if TILE_ROWS * VALUE_PAD <= SMALL_STATE else 1
    for begin in range(0, count, at_once):
        for index in tl.static_range(at_once):  # without a branch, so that all loads start before the first merge
            exists = begin + index < count
            at = states + (((first + begin + index) * KV_HEADS + kv_head) * group + folded) * (2 + VALUE_DIM)
            highest_of = tl.load(at, is_row & exists, other=LOWEST, cache_modifier=".cg")
            total_of = tl.load(at + 1, is_row & exists, other=0.0, cache_modifier=".cg")
            output_at = at[:, None] + 2 + value_dims[None, :]
            output_of = tl.load(output_at, is_value & exists, other=0.0, cache_modifier=".cg")
            highest, total, output = merge(highest, total, output, highest_of, total_of, output_of)
    return highest, total, output
