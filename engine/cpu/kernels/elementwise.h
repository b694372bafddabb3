// Norms, gated activations and rotary embedding, each in one pass over its rows. See engine/cpu/fused_ops.py.
//
// A row is computed by itself, eight numbers at a time, or sixteen of bfloat16 with AVX-512. Its tail goes through the
// same vector code, padded with zeros. So its bits depend neither on other rows nor on its address.
#pragma once

#include <cmath>

#include "guard.h"
#include "simd_avx2.h"
#include "simd_bf16.h"

namespace decant {

constexpr long NUMBERS_PER_THREAD = 1 << 15;  // fewer are not worth waking a thread for

// Calls `row(r)` for all rows, shared among threads. Allocates nothing and throws nothing.
template <class Row>
inline void each_row(long rows, long width, long threads, const Row& row) {
    threads = std::clamp(rows * width / NUMBERS_PER_THREAD, 1L, std::clamp(rows, 1L, threads));
    #pragma omp parallel for num_threads(threads) schedule(static)
    for (long r = 0; r < rows; r++) row(r);
}

inline void fill(__m256& lanes, float value) { lanes = _mm256_set1_ps(value); }
inline __m256 add_square(__m256 sum, __m256 x) { return _mm256_fmadd_ps(x, x, sum); }
inline __m256 negative(__m256 x) { return _mm256_xor_ps(x, _mm256_set1_ps(-0.0f)); }

template <class E>
inline __m256 some(const E* at, long count) {
    if (count == 8) return wide(at);
    E padded[8] = {};
    std::copy_n(at, count, padded);
    return wide(padded);
}

template <class E>
inline void keep_some(E* at, __m256 values, long count) {
    if (count == 8) return keep(at, values);
    E padded[8];
    keep(padded, values);
    std::copy_n(padded, count, at);
}

// x / (1 + e^-x), computed from e^-|x|, which can't overflow.
inline __m256 silu(__m256 x) {
    __m256 one = _mm256_set1_ps(1.0f), e = exponential(_mm256_or_ps(x, _mm256_set1_ps(-0.0f)));  // of -|x|
    return x * _mm256_blendv_ps(one, e, x) / (one + e);  // e where x is negative
}

#ifdef __AVX512BF16__

// Used for tails only: a masked access costs more than a plain one.
inline __mmask16 first(long count) { return (1 << count) - 1; }
inline void fill(__m512& lanes, float value) { lanes = _mm512_set1_ps(value); }
inline __m512 add_square(__m512 sum, __m512 x) { return _mm512_fmadd_ps(x, x, sum); }
inline __m512 negative(__m512 x) { return _mm512_xor_ps(x, _mm512_set1_ps(-0.0f)); }

inline __m512 some(const uint16_t* at, long count) {
    if (count == 16) return sixteen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
    return sixteen(_mm256_maskz_loadu_epi16(first(count), at));
}

inline void keep_some(uint16_t* at, __m512 values, long count) {
    if (count == 16) _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), halves(values));
    else _mm256_mask_storeu_epi16(at, first(count), halves(values));
}

inline __m512 rounded(const uint16_t*, __m512 values) { return sixteen(halves(values)); }

inline float sum(__m512 v) { return sum(_mm512_castps512_ps256(v) + _mm512_extractf32x8_ps(v, 1)); }

inline __m512 silu(__m512 x) {
    __m512 one = _mm512_set1_ps(1.0f), e = exponential(_mm512_or_ps(x, _mm512_set1_ps(-0.0f)));
    return x * _mm512_mask_mov_ps(one, _mm512_movepi32_mask(_mm512_castps_si512(x)), e) / (one + e);
}

#endif

// The vector register that `some` loads numbers of type E into.
template <class E>
using Some = decltype(some(static_cast<const E*>(nullptr), 0));

// Calls `f(at, count)` for each vector of a row; `count` is smaller for the tail.
template <class E, class F>
inline void by_lanes(long width, const F& f) {
    constexpr long all = sizeof(Some<E>) / sizeof(float);
    long at = 0;
    for (; at + all <= width; at += all) f(at, all);
    if (at < width) f(at, width - at);
}

// x / sqrt(mean(x^2) + eps), rounded, times the weight (RMSNorm, Zhang and Sennrich 2019). `out` may be `x`.
template <class E>
inline void norm_row(const E* x, const E* weight, E* out, long width, float eps) {
    Some<E> squares, scale;
    fill(squares, 0);
    by_lanes<E>(width, [&](long at, long count) { squares = add_square(squares, some(x + at, count)); });
    fill(scale, 1.0f / std::sqrt(sum(squares) / float(width) + eps));
    by_lanes<E>(width, [&](long at, long count) {
        keep_some(out + at, rounded(x, some(x + at, count) * scale) * some(weight + at, count), count);
    });
}

template <class E>
void rms_norm(const E* x, const E* weight, E* out, long rows, long width, float eps, long threads) {
    each_row(rows, width, threads, [=](long r) { norm_row(x + r * width, weight, out + r * width, width, eps); });
}

// silu(gate), rounded, times up (SwiGLU, Shazeer 2020). `out` may be either.
template <class E>
inline void gate_row(const E* gate, const E* up, E* out, long width) {
    by_lanes<E>(width, [=](long at, long count) {
        auto open = rounded(gate, silu(some(gate + at, count)));
        keep_some(out + at, open * some(up + at, count), count);
    });
}

// Rows of `gate` and `up` are `stride` numbers apart; those of `out` are dense.
template <class E>
void gate(const E* gate, const E* up, E* out, long rows, long width, long stride, long threads) {
    each_row(rows, width, threads,
             [=](long r) { gate_row(gate + r * stride, up + r * stride, out + r * width, width); });
}

// x * cos + rotate_half(x) * sin, each product and the sum rounded (RoPE, Su et al. 2021), of one token's heads,
// `stride` numbers apart. cos, sin [width]; out [heads, width], may be `x` if that is dense.
template <class E>
inline void rotate_row(const E* x, const E* cos, const E* sin, E* out, long heads, long width, long stride) {
    long half = width / 2;
    for (long h = 0; h < heads; h++, x += stride, out += width)
        by_lanes<E>(half, [&](long at, long count) {
            auto low = some(x + at, count), high = some(x + half + at, count);
            auto turned = [&](auto one, auto other, long at) {
                return rounded(x, one * some(cos + at, count)) + rounded(x, other * some(sin + at, count));
            };
            keep_some(out + at, turned(low, negative(high), at), count);
            keep_some(out + half + at, turned(high, low, half + at), count);
        });
}

// x [tokens, heads, width] with strides; cos, sin [tokens, width]; out [tokens, heads, width], dense.
template <class E>
void rotate(const E* x, const E* cos, const E* sin, E* out, long tokens, long heads, long width, long token_stride,
            long head_stride, long threads) {
    each_row(tokens, heads * width, threads, [=](long t) {
        rotate_row(x + t * token_stride, cos + t * width, sin + t * width, out + t * heads * width, heads, width,
                   head_stride);
    });
}

// x + y, rounded; `out` may be either.
template <class E>
inline void add_row(const E* x, const E* y, E* out, long width) {
    by_lanes<E>(width,
                [=](long at, long count) { keep_some(out + at, some(x + at, count) + some(y + at, count), count); });
}

}  // namespace decant
