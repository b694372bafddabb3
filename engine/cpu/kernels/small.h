// Small operations of a model, each in one pass over its rows. See engine/cpu/fused_ops.py.
//
// A row is computed by itself, eight numbers at a time, of bfloat16 sixteen where the CPU has the lanes; what is left of it
// goes through the same lanes, filled up with noughts. So its bits depend neither on the rows beside it nor on where it lies.
#pragma once

#include <cmath>

#include "guard.h"
#include "lanes.h"
#include "pairs.h"

namespace decant {

constexpr long WORTH_SHARING = 1 << 15;  // numbers that are worth waking a thread for

// Calls `row(r)` for all of some rows of so many numbers. It takes no memory, so it throws nothing.
template <class Row>
inline void each_row(long rows, long width, long threads, const Row& row) {
    threads = std::clamp(rows * width / WORTH_SHARING, 1L, std::clamp(rows, 1L, threads));
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

// x / (1 + e^-x), from an exponential that can't grow too large.
inline __m256 silu(__m256 x) {
    __m256 one = _mm256_set1_ps(1.0f), e = exponential(_mm256_or_ps(x, _mm256_set1_ps(-0.0f)));  // of -|x|
    return x * _mm256_blendv_ps(one, e, x) / (one + e);  // e where x is below nought
}

#ifdef __AVX512BF16__

inline __mmask16 first(long count) { return (1 << count) - 1; }  // a mask costs something, also if it leaves out nothing
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

// As many numbers of a kind as are computed at a time.
template <class E>
using Some = decltype(some(static_cast<const E*>(nullptr), 0));

// Calls `f(at, count)` for every so many numbers of a row; `count` is less for the last ones.
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

// Of rows that lie `stride` numbers apart in both.
template <class E>
void gate(const E* gate, const E* up, E* out, long rows, long width, long stride, long threads) {
    each_row(rows, width, threads, [=](long r) { gate_row(gate + r * stride, up + r * stride, out + r * width, width); });
}

// x * cos + rotate_half(x) * sin, each product and the sum rounded (RoPE, Su et al. 2021), of a token's heads, which are
// `apart` numbers from each other; cos and sin [width], out [heads, width], which may be `x` where that is as dense.
template <class E>
inline void rotate_row(const E* x, const E* cos, const E* sin, E* out, long heads, long width, long apart) {
    long half = width / 2;
    for (long h = 0; h < heads; h++, x += apart, out += width)
        by_lanes<E>(half, [&](long at, long count) {
            auto low = some(x + at, count), high = some(x + half + at, count);
            auto turned = [&](auto one, auto other, long at) {
                return rounded(x, one * some(cos + at, count)) + rounded(x, other * some(sin + at, count));
            };
            keep_some(out + at, turned(low, negative(high), at), count);
            keep_some(out + half + at, turned(high, low, half + at), count);
        });
}

// Of tokens that lie `token_apart` numbers from each other; cos and sin [tokens, width], out [tokens, heads, width].
template <class E>
void rotate(const E* x, const E* cos, const E* sin, E* out, long tokens, long heads, long width, long token_apart,
            long head_apart, long threads) {
    each_row(tokens, heads * width, threads, [=](long t) {
        rotate_row(x + t * token_apart, cos + t * width, sin + t * width, out + t * heads * width, heads, width, head_apart);
    });
}

// x + y, rounded; `out` may be either.
template <class E>
inline void add_row(const E* x, const E* y, E* out, long width) {
    by_lanes<E>(width, [=](long at, long count) { keep_some(out + at, some(x + at, count) + some(y + at, count), count); });
}

}  // namespace decant
