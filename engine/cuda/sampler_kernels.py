"""Triton kernels that choose one token per row, with the rules of ``engine.model.sampler``.

Top-k and top-p find their thresholds by bisection over float32 bit patterns, which are ordered as the numbers: exact,
in at most 32 passes. Sums are float64, in an order that depends on the vocabulary alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST_KEY = tl.constexpr(-2139095041)

ONE_BITS = tl.constexpr(0x3F800000)


@triton.jit
def top_token(logits, tokens, finite, vocabulary, row_stride, TILE: tl.constexpr):
    """First token with the highest logit of each row, and whether that is finite and no logit NaN. Grid: (n,).

    logits [n, vocabulary] with a stride between rows; tokens [n] int64; finite [n] int8.
    """
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, TILE)
    highest = tl.full([TILE], float("-inf"), tl.float32)
    tokens_of = tl.zeros([TILE], tl.int32)
    has_nan = tl.zeros([TILE], tl.int32)
    for start in range(0, vocabulary, TILE):
        at = start + lanes
        scores = tl.load(logits + row * row_stride + at, at < vocabulary, other=float("-inf")).to(tl.float32)
        tokens_of = tl.where(scores > highest, at, tokens_of)
        highest = tl.maximum(highest, tl.where(scores == scores, scores, float("-inf")))
        has_nan = has_nan | (scores != scores).to(tl.int32)
    most = tl.max(highest, 0)
    token = tl.min(tl.where(highest == most, tokens_of, vocabulary), 0)
    is_finite = (most > float("-inf")) & (most < float("inf")) & (tl.max(has_nan, 0) == 0)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(finite + row, is_finite.to(tl.int8))


@triton.jit
def order_key(numbers):
    """Map float32 to int32 in the same order."""
    bits = numbers.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def load_scaled(scores, at, vocabulary, highest, temperature):
    scaled = tl.div_rn(tl.load(scores + at, at < vocabulary, other=0.0) - highest, temperature)
    return tl.where(at < vocabulary, scaled, float("-inf"))


@triton.jit
def load_probabilities(scores, at, vocabulary, highest, temperature, lowest_key, total):
    scaled = load_scaled(scores, at, vocabulary, highest, temperature)
    return tl.where(order_key(scaled) >= lowest_key, tl.div_rn(tl.exp(scaled), total), 0.0)


@triton.jit
def top_k_key(scores, vocabulary, highest, temperature, top_k, TILE: tl.constexpr):
    """``order_key`` of the row's k-th highest scaled score."""
    low = tl.full([], LOWEST_KEY, tl.int32)
    high = tl.full([], 0, tl.int32)
    while low < high:
        middle = low + (high - low + 1) // 2
        count = tl.full([], 0, tl.int32)
        for start in range(0, vocabulary, TILE):
            at = start + tl.arange(0, TILE)
            keys = order_key(load_scaled(scores, at, vocabulary, highest, temperature))
            count += tl.sum(((keys >= middle) & (at < vocabulary)).to(tl.int32), 0)
        low = tl.where(count >= top_k, middle, low)
        high = tl.where(count >= top_k, high, middle - 1)
    return low


@triton.jit
def top_p_bits(
    scores, vocabulary, highest, temperature, lowest_key, total, top_p,
    TILE: tl.constexpr,
):  # fmt: skip
    """Bits of the lowest number above which the probabilities sum to less than ``top_p``."""
    low = tl.full([], 0, tl.int32)
    high = tl.full([], ONE_BITS, tl.int32)
    while low < high:
        middle = low + (high - low) // 2
        above = tl.full([], 0.0, tl.float64)
        for start in range(0, vocabulary, TILE):
            at = start + tl.arange(0, TILE)
            shares = load_probabilities(scores, at, vocabulary, highest, temperature, lowest_key, total)
            is_above = shares.to(tl.int32, bitcast=True) > middle
            above += tl.sum(tl.where(is_above, shares, 0.0).to(tl.float64), 0)
        low = tl.where(above < top_p, low, middle + 1)
        high = tl.where(above < top_p, middle, high)
    return low


@triton.jit
def draw(
    scores, tokens, temperatures, top_ks, top_ps, min_ps, numbers, vocabulary,
    TILE: tl.constexpr,
):  # fmt: skip
    """Draw a token per row; the highest score if its temperature is 0. Grid: (n,).

    scores [n, vocabulary] float32; tokens [n] int64; numbers [n] float64, uniform; temperatures, min_ps [n] float32;
    top_ps [n] float64, 1 for off; top_ks [n] int32, 0 for off.
    """
    row = tl.program_id(0)
    scores += row.to(tl.int64) * vocabulary
    temperature = tl.load(temperatures + row)
    highest = tl.full([], float("-inf"), tl.float32)
    token = tl.full([], 0, tl.int32)
    for start in range(0, vocabulary, TILE):
        at = start + tl.arange(0, TILE)
        tile = tl.load(scores + at, at < vocabulary, other=float("-inf"))
        most = tl.max(tile, 0)
        token = tl.where(most > highest, start + tl.argmax(tile, 0), token)
        highest = tl.maximum(highest, most)
    if temperature > 0.0:
        top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
        lowest_key = tl.full([], LOWEST_KEY, tl.int32)
        if (top_k > 0) & (top_k < vocabulary):
            lowest_key = top_k_key(scores, vocabulary, highest, temperature, top_k, TILE)
        one = tl.full([], 1.0, tl.float32)
        sum_all = tl.full([], 0.0, tl.float64)
        for start in range(0, vocabulary, TILE):
            at = start + tl.arange(0, TILE)
            shares = load_probabilities(scores, at, vocabulary, highest, temperature, lowest_key, one)
            sum_all += tl.sum(shares.to(tl.float64), 0)
        total = sum_all.to(tl.float32)
        lowest_bits = tl.full([], 0, tl.int32)
        if top_p < 1.0:
            lowest_bits = top_p_bits(scores, vocabulary, highest, temperature, lowest_key, total, top_p, TILE)
        least = tl.load(min_ps + row) * tl.div_rn(1.0, total)
        token = inverse(
            scores,
            vocabulary,
            highest,
            temperature,
            lowest_key,
            total,
            lowest_bits,
            least,
            tl.load(numbers + row),
            TILE,
        )
    tl.store(tokens + row, token.to(tl.int64))


@triton.jit
def inverse(
    scores, vocabulary, highest, temperature, lowest_key, total, lowest_bits,
    least, number, TILE: tl.constexpr,
):  # fmt: skip
    """First token whose cumulative sum of the remaining probabilities exceeds ``number`` times their sum."""
    mass = tl.full([], 0.0, tl.float64)
    for start in range(0, vocabulary, TILE):
        at = start + tl.arange(0, TILE)
        shares = load_probabilities(scores, at, vocabulary, highest, temperature, lowest_key, total)
        keep = (shares.to(tl.int32, bitcast=True) >= lowest_bits) & (shares >= least)
        mass += tl.sum(tl.where(keep, shares, 0.0).to(tl.float64), 0)
    target = number * mass
    before = tl.full([], 0.0, tl.float64)
    token = tl.full([], 0, tl.int32)
    for start in range(0, vocabulary, TILE):
        at = start + tl.arange(0, TILE)
        shares = load_probabilities(scores, at, vocabulary, highest, temperature, lowest_key, total)
        keep = (shares.to(tl.int32, bitcast=True) >= lowest_bits) & (shares >= least)
        kept = tl.where(keep, shares, 0.0).to(tl.float64)
        ends = before + tl.cumsum(kept, 0)
        # The last token that starts at or below the target: rounding can't lead to one without probability.
        starts_before = (kept > 0.0) & (ends - kept <= target)
        token = tl.maximum(token, tl.max(tl.where(starts_before, at, 0), 0))
        before += tl.sum(kept, 0)
    return token
