// Few rows times keys and values in place: for a handful of rows, packing a tile takes longer than multiplying it. Sums
// are the same chains as in gemm.h, so bits are the same either way.
#pragma once

#include <type_traits>

#include "simd_avx2.h"

namespace decant {

constexpr long SMALL_BATCH = 8;  // most rows

// Calls f with the number of rows, 1 to MOST, as a compile-time constant.
template <int MOST, class F>
inline void with_rows(long rows, const F& f) {
    if constexpr (MOST > 1)
        if (rows < MOST) return with_rows<MOST - 1>(rows, f);
    f(std::integral_constant<int, MOST>());
}

// Queries [ROWS, dim] times eight keys -> scores, rows `stride` apart.
template <int ROWS, class E>
inline void score(const float* query, long dim, const E* const* keys, float* scores, long stride) {
    __m256 chains[ROWS];
    #pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) chains[r] = _mm256_setzero_ps();
    for (long d = 0; d < dim; d += 8) {
        __m256 factors[8];
        #pragma GCC unroll 8
        for (int n = 0; n < 8; n++) factors[n] = wide(keys[n] + d);
        transpose(factors);
        #pragma GCC unroll 8
        for (int n = 0; n < 8; n++)
            #pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++)
                chains[r] = _mm256_fmadd_ps(_mm256_broadcast_ss(query + r * dim + d + n), factors[n], chains[r]);
    }
    #pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) keep(scores + r * stride, chains[r]);
}

// Weights of ROWS rows, `weight_stride` apart, times 8 * LANES columns of `count` values, added to `out`.
template <int ROWS, int LANES, class E>
inline void mix(const float* weights, long weight_stride, const E* const* values, long count, long column, float* out,
                long stride) {
    __m256 chains[ROWS][LANES];
    #pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
        #pragma GCC unroll 8
        for (int l = 0; l < LANES; l++) chains[r][l] = _mm256_setzero_ps();
    for (long j = 0; j < count; j++) {
        __m256 factors[LANES];
        #pragma GCC unroll 8
        for (int l = 0; l < LANES; l++) factors[l] = wide(values[j] + column + 8 * l);
        #pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            __m256 weight = _mm256_broadcast_ss(weights + r * weight_stride + j);
            #pragma GCC unroll 8
            for (int l = 0; l < LANES; l++) chains[r][l] = _mm256_fmadd_ps(weight, factors[l], chains[r][l]);
        }
    }
    #pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
        #pragma GCC unroll 8
        for (int l = 0; l < LANES; l++) {
            float* to = out + r * stride + column + 8 * l;
            keep(to, _mm256_add_ps(wide(to), chains[r][l]));
        }
}

// `mix` for all `width` columns, a multiple of eight.
template <int ROWS, class E>
inline void mix_all(const float* weights, long weight_stride, const E* const* values, long count, long width,
                    float* out, long stride) {
    constexpr int LANES = ROWS <= 2 ? 4 : ROWS <= 4 ? 2 : 1;  // enough chains to hide the latency of one
    long column = 0;
    for (; column + 8 * LANES <= width; column += 8 * LANES)
        mix<ROWS, LANES>(weights, weight_stride, values, count, column, out, stride);
    for (; column < width; column += 8) mix<ROWS, 1>(weights, weight_stride, values, count, column, out, stride);
}

}  // namespace decant
