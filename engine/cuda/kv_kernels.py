"""Keys and values as codes of 8 bits with a scale each, in Triton kernels: as ``encode`` in engine/model/kv_vectors.py.

The scales of a layer are behind its codes, those of the keys first: ``KvLayout``.
"""

from __future__ import annotations

import triton
import triton.language as tl

MOST = tl.constexpr(127.0)

ROUND = tl.constexpr(12582912.0)
"""Added to a number of less than 2**22 and subtracted again, it rounds to nearest, ties to even."""


@triton.jit
def scales_of(start, value_offset, BLOCK: tl.constexpr, KV_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr):
    """Addresses of the scales of a block's keys and values [BLOCK, KV_HEADS], in a layer with values at an offset."""
    keys = (start + value_offset + BLOCK * KV_HEADS * VALUE_DIM).to(tl.pointer_type(tl.bfloat16))
    return keys, keys + BLOCK * KV_HEADS


@triton.jit
def scale_of(rows):
    """Return the scales of vectors [n, dim] in float32, rounded to bfloat16: not finite if a number is not."""
    most = tl.max(tl.abs(rows), 1) + tl.sum(rows * 0.0, 1)  # the maximum leaves NaN out
    scales = tl.div_rn(most, tl.zeros_like(most) + MOST)
    bits = scales.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000  # triton's interpreter cuts the lower half off
    return tl.where(scales == scales, rounded.to(tl.float32, bitcast=True), scales)


@triton.jit
def codes_of(rows, scales):
    """Return the codes of vectors [n, dim], zeros where the scale is zero or not finite."""
    is_usable = (scales > 0.0) & (scales < float("inf"))
    divisors = tl.where(is_usable, scales, 1.0)
    numbers = tl.where(is_usable[:, None], rows, 0.0)
    quotients = tl.div_rn(numbers, tl.zeros_like(numbers) + divisors[:, None])
    limited = tl.minimum(tl.maximum(quotients, -MOST), MOST)
    return ((limited + ROUND) - ROUND).to(tl.int8)
