// Few rows times keys and values as they lie in their blocks: where a tile of keys serves a handful of rows, laying it
// out as panels takes longer than the products. Sums are the same chains as in tile.h, so bits are the same either way.
#pragma once

#include <type_traits>

#include "lanes.h"

namespace decant {

constexpr long FEW = 8;

// f(the number of rows, as a constant), for 1 to MOST rows.
template <int MOST, class F>
inline void with_rows(long rows, const F& f) {
    if constexpr (MOST > 1)
        if (rows < MOST) return with_rows<MOST - 1>(rows, f);
    f(std::integral_constant<int, MOST>());
}

// Queries [ROWS, dim] times eight keys: scores, rows `apart` numbers behind each other.
template <int ROWS, class E>
inline void score(const float* query, long dim, const E* const* keys, float* scores, long apart) {
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
    for (int r = 0; r < ROWS; r++) keep(scores + r * apart, chains[r]);
}

// Weights of ROWS rows, `apart` behind each other, times eight times LANES columns of `count` values, added to `out`.
template <int ROWS, int LANES, class E>
inline void mix(const float* weights, long apart, const E* const* values, long count, long column, float* out,
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
            __m256 weight = _mm256_broadcast_ss(weights + r * apart + j);
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

// The same for all `width` columns, a multiple of eight.
template <int ROWS, class E>
inline void mix_all(const float* weights, long apart, const E* const* values, long count, long width, float* out,
                    long stride) {
    constexpr int LANES = ROWS <= 2 ? 4 : ROWS <= 4 ? 2 : 1;  // enough chains to hide what one takes
    long column = 0;
    for (; column + 8 * LANES <= width; column += 8 * LANES)
        mix<ROWS, LANES>(weights, apart, values, count, column, out, stride);
    for (; column < width; column += 8) mix<ROWS, 1>(weights, apart, values, count, column, out, stride);
}

}  // namespace decant
