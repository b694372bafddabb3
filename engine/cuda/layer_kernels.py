"""Triton kernels of a decoder layer around attention. One program computes at most a row, in float32."""

from __future__ import annotations

import triton
import triton.language as tl

from decant.engine.cuda.dependent_launch import wait_for_kernel_before
from decant.engine.cuda.kv_kernels import codes_of, scale_of, scales_of


@triton.jit
def add_rms_norm(
    hidden, addend, weight, total, out, width, heads, token, eps,
    ADD: tl.constexpr, PAD: tl.constexpr, DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """out = weight * (total / rms(total)), with total = hidden + addend, or hidden if not ADD. Grid: (rows,).

    weight [width]; addend, total and out [rows, width]; hidden [rows / heads, heads, width] with a stride ``token``.
    The sum, written if ADD, and the normalized row are rounded to the dtype, as in transformers.
    """
    if DEPENDENT:
        wait_for_kernel_before()
    index = tl.program_id(0)
    start = index.to(tl.int64) * width
    source = hidden + (index // heads).to(tl.int64) * token + index % heads * width
    at = tl.arange(0, PAD)
    is_in_row = at < width
    row = tl.load(source + at, is_in_row, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    if ADD:
        row += tl.load(addend + start + at, is_in_row, other=0.0).to(tl.float32)
        rounded = row.to(dtype)
        tl.store(total + start + at, rounded, is_in_row)
        row = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(row * row, 0) / width + eps)
    normalized = (row * scale).to(dtype).to(tl.float32)
    factor = tl.load(weight + at, is_in_row, other=0.0).to(tl.float32)
    tl.store(out + start + at, (normalized * factor).to(dtype), is_in_row)


@triton.jit
def gate(pairs, out, width, TILE: tl.constexpr):
    """out [rows, width] = silu(gates) * up, with silu rounded to the dtype. Grid: (rows, ceil(width / TILE)).

    pairs [rows, 2 * width]: the gates of a row, then up.
    """
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    exists = at < width
    pairs += row * 2 * width
    number = tl.load(pairs + at, exists, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    activated = (number / (1.0 + tl.exp(-number))).to(dtype).to(tl.float32)
    up = tl.load(pairs + width + at, exists, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, (activated * up).to(dtype), exists)


@triton.jit(do_not_specialize_on_alignment=["positions"])
def rotary_angles(positions, frequencies, cos, sin, scaling, HALF: tl.constexpr, PAD: tl.constexpr):
    """cos and sin [T, 2 * HALF] of positions [T] times frequencies [HALF], twice, times ``scaling``. Grid: (T,)."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, PAD)
    exists = at < HALF
    angles = tl.load(positions + token).to(tl.float32) * tl.load(frequencies + at, exists, other=0.0)
    target = token * (2 * HALF) + at
    dtype = cos.dtype.element_ty
    cosines, sines = (tl.cos(angles) * scaling).to(dtype), (tl.sin(angles) * scaling).to(dtype)
    tl.store(cos + target, cosines, exists)
    tl.store(cos + target + HALF, cosines, exists)
    tl.store(sin + target, sines, exists)
    tl.store(sin + target + HALF, sines, exists)


@triton.jit
def rotate_heads(source, target, cos, sin, heads, HEADS: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr):
    """Rotate ``heads`` [n] of a token, each [2 * HALF]: dimension i pairs with i + HALF."""
    low = tl.arange(0, HALF_PAD)
    in_half = low < HALF
    exists = (heads < HEADS)[:, None] & in_half[None, :]
    at = heads[:, None] * (2 * HALF) + low[None, :]
    first = tl.load(source + at, exists, other=0.0).to(tl.float32)
    second = tl.load(source + at + HALF, exists, other=0.0).to(tl.float32)
    cos_low = tl.load(cos + low, in_half, other=0.0).to(tl.float32)[None, :]
    sin_low = tl.load(sin + low, in_half, other=0.0).to(tl.float32)[None, :]
    cos_high = tl.load(cos + HALF + low, in_half, other=0.0).to(tl.float32)[None, :]
    sin_high = tl.load(sin + HALF + low, in_half, other=0.0).to(tl.float32)[None, :]
    dtype = target.dtype.element_ty
    tl.store(target + at, (first * cos_low - second * sin_low).to(dtype), exists)
    tl.store(target + at + HALF, (second * cos_high + first * sin_high).to(dtype), exists)


@triton.jit
def rotated_heads(source, cos, sin, heads, HEADS: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr):
    """Rotate as ``rotate_heads`` does.

    Return both halves in float32, their offsets from the token's first head, and which of them exist.
    """
    low = tl.arange(0, HALF_PAD)
    in_half = low < HALF
    exists = (heads < HEADS)[:, None] & in_half[None, :]
    at = heads[:, None] * (2 * HALF) + low[None, :]
    first = tl.load(source + at, exists, other=0.0).to(tl.float32)
    second = tl.load(source + at + HALF, exists, other=0.0).to(tl.float32)
    cos_low = tl.load(cos + low, in_half, other=0.0).to(tl.float32)[None, :]
    sin_low = tl.load(sin + low, in_half, other=0.0).to(tl.float32)[None, :]
    cos_high = tl.load(cos + HALF + low, in_half, other=0.0).to(tl.float32)[None, :]
    sin_high = tl.load(sin + HALF + low, in_half, other=0.0).to(tl.float32)[None, :]
    return first * cos_low - second * sin_low, second * cos_high + first * sin_high, at, exists


@triton.jit(do_not_specialize_on_alignment=["slots"])
def rotate_and_write(
    query, key, value, cos, sin, rotated, slots, memory,
    query_token, key_token, value_token, block_elements, key_offset, value_offset,
    BLOCK: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, HALF_PAD: tl.constexpr, VALUE_PAD: tl.constexpr,
    HEADS_TILE: tl.constexpr, KV_HEADS_PAD: tl.constexpr, CODED: tl.constexpr = False,
):  # fmt: skip
    """Rotate queries into ``rotated``, and keys into their slots; copy values there. As codes if CODED.

    Grid: (T, ceil(HEADS / HEADS_TILE) + 1): tiles of query heads, then all keys and values of a token. query
    [T, HEADS, KEY_DIM], key [T, KV_HEADS, KEY_DIM] and value [T, KV_HEADS, VALUE_DIM], each with a stride between
    tokens; rotated and cos and sin [T, KEY_DIM] contiguous; ``slots`` as in ``attention_kernels.write_kv``.
    """
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cos += token * KEY_DIM
    sin += token * KEY_DIM
    if tile * HEADS_TILE < HEADS:
        heads = tile * HEADS_TILE + tl.arange(0, HEADS_TILE)
        target = rotated + token * (HEADS * KEY_DIM)
        rotate_heads(query + token * query_token, target, cos, sin, heads, HEADS, KEY_DIM // 2, HALF_PAD)
    else:
        kv_heads = tl.arange(0, KV_HEADS_PAD)
        slot = tl.load(slots + token)
        start = memory + slot // BLOCK * block_elements
        slot = slot % BLOCK
        key_slot = start + key_offset + slot * (KV_HEADS * KEY_DIM)
        if CODED:
            key_scales, value_scales = scales_of(start, value_offset, BLOCK, KV_HEADS, VALUE_DIM)
            first, second, key_at, is_key = rotated_heads(
                key + token * key_token, cos, sin, kv_heads, KV_HEADS, KEY_DIM // 2, HALF_PAD
            )
            first = first.to(key.dtype.element_ty).to(tl.float32)
            second = second.to(key.dtype.element_ty).to(tl.float32)
            key_scale = scale_of(tl.maximum(tl.abs(first), tl.abs(second)) + first * 0.0 + second * 0.0)
            tl.store(key_scales + slot * KV_HEADS + kv_heads, key_scale.to(tl.bfloat16), kv_heads < KV_HEADS)
            tl.store(key_slot + key_at, codes_of(first, key_scale), is_key)
            tl.store(key_slot + key_at + KEY_DIM // 2, codes_of(second, key_scale), is_key)
        else:
            rotate_heads(key + token * key_token, key_slot, cos, sin, kv_heads, KV_HEADS, KEY_DIM // 2, HALF_PAD)
        dims = tl.arange(0, VALUE_PAD)
        exists = (kv_heads < KV_HEADS)[:, None] & (dims < VALUE_DIM)[None, :]
        at = kv_heads[:, None] * VALUE_DIM + dims[None, :]
        number = tl.load(value + token * value_token + at, exists, other=0.0)
        if CODED:
            scales = scale_of(number.to(tl.float32))
            tl.store(value_scales + slot * KV_HEADS + kv_heads, scales.to(tl.bfloat16), kv_heads < KV_HEADS)
            number = codes_of(number.to(tl.float32), scales)
        tl.store(start + value_offset + slot * (KV_HEADS * VALUE_DIM) + at, number, exists)
