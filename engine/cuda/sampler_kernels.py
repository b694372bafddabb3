"""Triton kernels that choose one token per row, with the rules of ``engine.model.sampler``.

Top-k and top-p find their thresholds by bisection over float32 bit patterns, which are ordered as the numbers: exact,
in at most 32 passes, each of which reads what the pass before them has written in place of the scores. A thread keeps
a sum or count of its own until the end of a pass. Sums are float64, in an order that depends on the vocabulary alone.
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
def allow(scores, rows, masks, vocabulary, words, TILE: tl.constexpr):
    """Set the scores of tokens whose bit is not set to minus infinity. Grid: (n, tiles of the vocabulary).

    scores [.., vocabulary] float32, changed; rows [n] int64, those of the masks; masks [n, words] int32: the bits of 32
    tokens each, the first token's lowest.
    """
    entry = tl.program_id(0)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    packed = tl.load(masks + entry.to(tl.int64) * words + (at >> 5), (at >> 5) < words, other=0)
    is_forbidden = ((packed >> (at & 31)) & 1) == 0
    places = scores + tl.load(rows + entry) * vocabulary + at
    tl.store(places, tl.full([TILE], float("-inf"), tl.float32), (at < vocabulary) & is_forbidden)


@triton.jit
def order_key(numbers):
    """Map float32 to int32 in the same order."""
    bits = numbers.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def scale(scores, vocabulary, highest, temperature, TILE: tl.constexpr):
    """Replace the row's scores by those relative to the highest, over the temperature."""
    for start in range(0, vocabulary, TILE):
        at = start + tl.arange(0, TILE)
        scaled = tl.div_rn(tl.load(scores + at, at < vocabulary, other=0.0) - highest, temperature)
        tl.store(scores + at, scaled, at < vocabulary)
    tl.debug_barrier()  # other threads read them


@triton.jit
def top_k_key(scaled, vocabulary, top_k, TILE: tl.constexpr):
    """``order_key`` of the row's k-th highest scaled score."""
    low = tl.full([], LOWEST_KEY, tl.int32)
    high = tl.full([], 0, tl.int32)
    while low < high:
        middle = low + (high - low + 1) // 2
        counts = tl.zeros([TILE], tl.int32)
        for start in range(0, vocabulary, TILE):
            at = start + tl.arange(0, TILE)
            keys = order_key(tl.load(scaled + at, at < vocabulary, other=float("-inf")))
            counts += ((keys >= middle) & (at < vocabulary)).to(tl.int32)
        count = tl.sum(counts, 0)
        low = tl.where(count >= top_k, middle, low)
        high = tl.where(count >= top_k, high, middle - 1)
    return low


@triton.jit
def to_probabilities(scaled, vocabulary, lowest_key, TILE: tl.constexpr):
    """Replace the row's scaled scores by their probabilities, those below ``lowest_key`` by 0; return e**0 of them."""
    sums = tl.zeros([TILE], tl.float64)
    for start in range(0, vocabulary, TILE):
        at = start + tl.arange(0, TILE)
        score = tl.load(scaled + at, at < vocabulary, other=float("-inf"))
        shares = tl.where(order_key(score) >= lowest_key, tl.exp(score), 0.0)
        sums += shares.to(tl.float64)
        tl.store(scaled + at, shares, at < vocabulary)
    total = tl.sum(sums, 0).to(tl.float32)
    tl.debug_barrier()
    for start in range(0, vocabulary, TILE):
        at = start + tl.arange(0, TILE)
        shares = tl.load(scaled + at, at < vocabulary, other=0.0)
        tl.store(scaled + at, tl.div_rn(shares, total), at < vocabulary)
    tl.debug_barrier()
    return tl.div_rn(1.0, total)


@triton.jit
def top_p_bits(probabilities, vocabulary, top_p, TILE: tl.constexpr):
    """Bits of the lowest number above which the probabilities sum to less than ``top_p``."""
    low = tl.full([], 0, tl.int32)
    high = tl.full([], ONE_BITS, tl.int32)
    while low < high:
        middle = low + (high - low) // 2
        sums = tl.zeros([TILE], tl.float64)
        for start in range(0, vocabulary, TILE):
            at = start + tl.arange(0, TILE)
            shares = tl.load(probabilities + at, at < vocabulary, other=0.0)
            sums += tl.where(shares.to(tl.int32, bitcast=True) > middle, shares, 0.0).to(tl.float64)
        above = tl.sum(sums, 0)
        low = tl.where(above < top_p, low, middle + 1)
        high = tl.where(above < top_p, middle, high)
    return low


@triton.jit
def draw(
    scores, tokens, temperatures, top_ks, top_ps, min_ps, numbers, vocabulary,
    TILE: tl.constexpr,
):  # fmt: skip
    """Draw a token per row; the highest score if its temperature is 0. Grid: (n,).

    scores [n, vocabulary] float32, changed; tokens [n] int64; numbers [n] float64, uniform; temperatures, min_ps [n]
    float32; top_ps [n] float64, 1 for off; top_ks [n] int32, 0 for off.
    """
    row = tl.program_id(0)
    scores += row.to(tl.int64) * vocabulary
    temperature = tl.load(temperatures + row)
    lanes = tl.arange(0, TILE)
    most = tl.full([TILE], float("-inf"), tl.float32)
    tokens_of = tl.zeros([TILE], tl.int32)
    for start in range(0, vocabulary, TILE):
        at = start + lanes
        tile = tl.load(scores + at, at < vocabulary, other=float("-inf"))
        tokens_of = tl.where(tile > most, at, tokens_of)
        most = tl.maximum(most, tile)
    highest = tl.max(most, 0)
    token = tl.min(tl.where(most == highest, tokens_of, vocabulary), 0)
    if temperature > 0.0:
        top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
        scale(scores, vocabulary, highest, temperature, TILE)
        lowest_key = tl.full([], LOWEST_KEY, tl.int32)
        if (top_k > 0) & (top_k < vocabulary):
            lowest_key = top_k_key(scores, vocabulary, top_k, TILE)
        likeliest = to_probabilities(scores, vocabulary, lowest_key, TILE)
        lowest_bits = tl.full([], 0, tl.int32)
        if top_p < 1.0:
            lowest_bits = top_p_bits(scores, vocabulary, top_p, TILE)
        least = tl.load(min_ps + row) * likeliest
        token = inverse(scores, vocabulary, lowest_bits, least, tl.load(numbers + row), TILE)
    tl.store(tokens + row, token.to(tl.int64))


@triton.jit
def inverse(probabilities, vocabulary, lowest_bits, least, number, TILE: tl.constexpr):
    """First token whose cumulative sum of the remaining probabilities exceeds ``number`` times their sum."""
    sums = tl.zeros([TILE], tl.float64)
    for start in range(0, vocabulary, TILE):
        at = start + tl.arange(0, TILE)
        sums += load_kept(probabilities, at, vocabulary, lowest_bits, least)
    target = number * tl.sum(sums, 0)
    before = tl.full([], 0.0, tl.float64)
    token = tl.full([], 0, tl.int32)
    for start in range(0, vocabulary, TILE):
        at = start + tl.arange(0, TILE)
        kept = load_kept(probabilities, at, vocabulary, lowest_bits, least)
        ends = before + tl.cumsum(kept, 0)
        # The last token that starts at or below the target: rounding can't lead to one without probability.
        starts_before = (kept > 0.0) & (ends - kept <= target)
        token = tl.maximum(token, tl.max(tl.where(starts_before, at, 0), 0))
        before += tl.sum(kept, 0)
    return token


@triton.jit
def load_kept(probabilities, at, vocabulary, lowest_bits, least):
    shares = tl.load(probabilities + at, at < vocabulary, other=0.0)
    keep = (shares.to(tl.int32, bitcast=True) >= lowest_bits) & (shares >= least)
    return tl.where(keep, shares, 0.0).to(tl.float64)
