// Small operations of a model, each in one pass over its rows. See engine/small.py.
//
// A row is computed by itself, eight numbers at a time; what is left of it goes through the same eight lanes, filled up
// with noughts. So its bits depend neither on the rows beside it nor on where it lies.
#pragma once

#include <cmath>

#include "lanes.h"
#include "pairs.h"

namespace decant {

constexpr long WORTH_SHARING = 1 << 15;  // numbers that are worth waking a thread for

template <class Row>
inline void each_row(long rows, long width, long threads, const Row& row) {
    threads = std::clamp(rows * width / WORTH_SHARING, 1L, std::clamp(rows, 1L, threads));
    #pragma omp parallel for num_threads(threads) schedule(static)
    for (long r = 0; r < rows; r++) row(r);
}

// Calls `eight(at, count)` for every eight numbers of a row; `count` is less than eight for the last ones.
template <class Eight>
inline void by_eight(long width, const Eight& eight) {
    for (long at = 0; at < width; at += 8) eight(at, std::min(8L, width - at));
}

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

// x / sqrt(mean(x^2) + eps), rounded, times the weight (RMSNorm, Zhang and Sennrich 2019).
template <class E>
void rms_norm(const E* x, const E* weight, E* out, long rows, long width, float eps, long threads) {
    each_row(rows, width, threads, [=](long r) {
        const E* from = x + r * width;
        E* to = out + r * width;
        __m256 squares = _mm256_setzero_ps();
        by_eight(width, [&](long at, long count) {
            __m256 values = some(from + at, count);
            squares = _mm256_fmadd_ps(values, values, squares);
        });
        __m256 scale = _mm256_set1_ps(1.0f / std::sqrt(sum(squares) / float(width) + eps));
        by_eight(width, [&](long at, long count) {
            __m256 values = rounded(from, _mm256_mul_ps(some(from + at, count), scale));
            keep_some(to + at, _mm256_mul_ps(values, some(weight + at, count)), count);
        });
    });
}

// x / (1 + e^-x), from an exponential that can't grow too large.
inline __m256 silu(__m256 x) {
    __m256 sign = _mm256_set1_ps(-0.0f);
    __m256 e = exponential(_mm256_or_ps(x, sign));  // of -|x|
    __m256 above = _mm256_blendv_ps(_mm256_set1_ps(1.0f), e, x);  // e where x is below nought
    return _mm256_div_ps(_mm256_mul_ps(x, above), _mm256_add_ps(_mm256_set1_ps(1.0f), e));
}

// silu(gate), rounded, times up (SwiGLU, Shazeer 2020).
template <class E>
inline void gate_row(const E* gate, const E* up, E* out, long width) {
    by_eight(width, [&](long at, long count) {
        __m256 open = rounded(gate, silu(some(gate + at, count)));
        keep_some(out + at, _mm256_mul_ps(open, some(up + at, count)), count);
    });
}

#ifdef __AVX512BF16__
template <>
inline void gate_row(const uint16_t* gate, const uint16_t* up, uint16_t* out, long width) {
    for (long at = 0; at < width; at += 16) {
        __mmask16 some = at + 16 <= width ? 0xffff : (1 << (width - at)) - 1;
        __m512 x = sixteen(_mm256_maskz_loadu_epi16(some, gate + at)), sign = _mm512_set1_ps(-0.0f);
        __m512 e = exponential(_mm512_or_ps(x, sign)), one = _mm512_set1_ps(1.0f);
        __m512 above = _mm512_mask_mov_ps(one, _mm512_movepi32_mask(_mm512_castps_si512(x)), e);
        __m512 open = _mm512_div_ps(_mm512_mul_ps(x, above), _mm512_add_ps(one, e));
        __m512 product = _mm512_mul_ps(sixteen(halves(open)), sixteen(_mm256_maskz_loadu_epi16(some, up + at)));
        _mm256_mask_storeu_epi16(out + at, some, halves(product));
    }
}
#endif

// Of rows that lie `stride` numbers apart in both.
template <class E>
void gate(const E* gate, const E* up, E* out, long rows, long width, long stride, long threads) {
    each_row(rows, width, threads,
             [=](long r) { gate_row(gate + r * stride, up + r * stride, out + r * width, width); });
}

// x * cos + rotate_half(x) * sin, each product and the sum rounded (RoPE, Su et al. 2021). A token's numbers are
// `token_apart`, its heads' `head_apart` from each other; cos and sin [tokens, width], out [tokens, heads, width].
template <class E>
void rotate(const E* x, const E* cos, const E* sin, E* out, long tokens, long heads, long width, long token_apart,
            long head_apart, long threads) {
    long half = width / 2;
    each_row(tokens, heads * width, threads, [=](long t) {
        const E *c = cos + t * width, *s = sin + t * width;
        auto turned = [=](const E* one, const E* c, const E* other, const E* s, long count, __m256 sign) {
            __m256 kept = rounded(one, _mm256_mul_ps(some(one, count), some(c, count)));
            __m256 brought = _mm256_mul_ps(_mm256_xor_ps(some(other, count), sign), some(s, count));
            return _mm256_add_ps(kept, rounded(one, brought));
        };
        for (long h = 0; h < heads; h++) {
            const E* low = x + t * token_apart + h * head_apart;
            E* to = out + (t * heads + h) * width;
            by_eight(half, [&](long at, long count) {
                const E *one = low + at, *other = one + half;
                __m256 first = turned(one, c + at, other, s + at, count, _mm256_set1_ps(-0.0f));
                __m256 second = turned(other, c + half + at, one, s + half + at, count, _mm256_setzero_ps());
                keep_some(to + at, first, count);
                keep_some(to + half + at, second, count);
            });
        }
    });
}

// x + y, rounded; `out` may be either.
template <class E>
void add(const E* x, const E* y, E* out, long rows, long width, long threads) {
    each_row(rows, width, threads, [=](long r) {
        by_eight(width, [&](long at, long count) {
            long place = r * width + at;
            keep_some(out + place, _mm256_add_ps(some(x + place, count), some(y + place, count)), count);
        });
    });
}

}  // namespace decant
