"""Triton kernels of a decoder layer around attention. One program computes at most a row, in float32."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_rms_norm(
    hidden, addend, weight, total, out, width, eps,
    ADD: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """out = weight * (total / rms(total)), with total = hidden + addend, or hidden if not ADD. Grid: (rows,).

    weight [width], the others [rows, width]. The sum, written if ADD, and the normalized row are rounded to the dtype,
    as in transformers.
    """
    start = tl.program_id(0).to(tl.int64) * width
    at = tl.arange(0, PAD)
    is_in_row = at < width
    row = tl.load(hidden + start + at, is_in_row, other=0.0).to(tl.float32)
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
def gate(gates, up, out, count, TILE: tl.constexpr):
    """out = silu(gates) * up, with silu rounded to the dtype. Grid: (ceil(count / TILE),)."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    exists = at < count
    number = tl.load(gates + at, exists, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    activated = (number / (1.0 + tl.exp(-number))).to(dtype).to(tl.float32)
    tl.store(out + at, (activated * tl.load(up + at, exists, other=0.0).to(tl.float32)).to(dtype), exists)


@triton.jit
def rotate_head(source, target, cos, sin, HALF: tl.constexpr, HALF_PAD: tl.constexpr):
    """Rotate a head [2 * HALF]: dimension i pairs with i + HALF."""
    low = tl.arange(0, HALF_PAD)
    exists, high = low < HALF, low + HALF
    first = tl.load(source + low, exists, other=0.0).to(tl.float32)
    second = tl.load(source + high, exists, other=0.0).to(tl.float32)
    cos_low = tl.load(cos + low, exists, other=0.0).to(tl.float32)
    sin_low = tl.load(sin + low, exists, other=0.0).to(tl.float32)
    cos_high = tl.load(cos + high, exists, other=0.0).to(tl.float32)
    sin_high = tl.load(sin + high, exists, other=0.0).to(tl.float32)
    dtype = target.dtype.element_ty
    tl.store(target + low, (first * cos_low - second * sin_low).to(dtype), exists)
    tl.store(target + high, (second * cos_high + first * sin_high).to(dtype), exists)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def rotate_and_write(
    query, key, value, cos, sin, rotated, slots, memory,
    block_elements, key_offset, value_offset,
    BLOCK: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, HALF_PAD: tl.constexpr, VALUE_PAD: tl.constexpr,
):  # fmt: skip
    """Rotate queries into ``rotated``, and keys into their slots; copy values there. Grid: (T, HEADS + KV_HEADS).

    query, rotated [T, HEADS, KEY_DIM], key [T, KV_HEADS, KEY_DIM], value [T, KV_HEADS, VALUE_DIM], cos and sin
    [T, KEY_DIM], all contiguous; ``slots`` as in ``attention_kernels.write_kv``.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cos += token * KEY_DIM
    sin += token * KEY_DIM
    if head < HEADS:
        at = (token * HEADS + head) * KEY_DIM
        rotate_head(query + at, rotated + at, cos, sin, KEY_DIM // 2, HALF_PAD)
    else:
        kv_head = head - HEADS
        slot = tl.load(slots + token)
        start = memory + slot // BLOCK * block_elements
        index = slot % BLOCK * KV_HEADS + kv_head
        source = key + (token * KV_HEADS + kv_head) * KEY_DIM
        rotate_head(source, start + key_offset + index * KEY_DIM, cos, sin, KEY_DIM // 2, HALF_PAD)
        dims = tl.arange(0, VALUE_PAD)
        is_value = dims < VALUE_DIM
        number = tl.load(value + (token * KV_HEADS + kv_head) * VALUE_DIM + dims, is_value, other=0.0)
        tl.store(start + value_offset + index * VALUE_DIM + dims, number, is_value)
