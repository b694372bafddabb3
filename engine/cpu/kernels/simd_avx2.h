// Vectors of eight float32 (AVX2).
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "gemm.h"

namespace decant {

inline __m256 wide(const float* at) { return _mm256_loadu_ps(at); }

inline __m256 wide(const uint16_t* at) {
    __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
}

inline __m256 wide(const int8_t* at) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at))));
}

inline void keep(float* at, __m256 values) { _mm256_storeu_ps(at, values); }

// Rounded as ``narrow`` does.
inline void keep(uint16_t* at, __m256 values) {
    __m256i words = _mm256_castps_si256(values);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(words, 16), _mm256_set1_epi32(1));
    words = _mm256_srli_epi32(_mm256_add_epi32(words, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    __m256i none = _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
    words = _mm256_blendv_epi8(words, _mm256_set1_epi32(0x7fc0), none);
    __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(at), halves);
}

// Sixteen numbers.
inline void keep(float* at, const Columns& values) { values.write(at); }

inline void keep(uint16_t* at, const Columns& values) {
#ifdef __AVX512BF16__
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(values.all)));
#else
    keep(at, values.first), keep(at + 8, values.second);
#endif
}

// Eight rows of eight become eight columns.
inline void transpose(__m256 (&rows)[8]) {
    __m256 pairs[8], fours[8];
    for (int n = 0; n < 4; n++) {
        pairs[2 * n] = _mm256_unpacklo_ps(rows[2 * n], rows[2 * n + 1]);
        pairs[2 * n + 1] = _mm256_unpackhi_ps(rows[2 * n], rows[2 * n + 1]);
    }
    for (int n = 0; n < 8; n += 4) {
        fours[n] = _mm256_shuffle_ps(pairs[n], pairs[n + 2], 0x44);
        fours[n + 1] = _mm256_shuffle_ps(pairs[n], pairs[n + 2], 0xee);
        fours[n + 2] = _mm256_shuffle_ps(pairs[n + 1], pairs[n + 3], 0x44);
        fours[n + 3] = _mm256_shuffle_ps(pairs[n + 1], pairs[n + 3], 0xee);
    }
    for (int n = 0; n < 4; n++) {
        rows[n] = _mm256_permute2f128_ps(fours[n], fours[n + 4], 0x20);
        rows[n + 4] = _mm256_permute2f128_ps(fours[n], fours[n + 4], 0x31);
    }
}

// As if the values were written as the pointer's type and read again.
inline __m256 rounded(const float*, __m256 values) { return values; }

inline __m256 rounded(const uint16_t*, __m256 values) {
    alignas(16) uint16_t halves[8];
    keep(halves, values);
    return wide(halves);
}

// e^x for x <= 0, within 2 ulp; zero below -87 (Cody and Waite's reduction, Cephes' polynomial).
inline __m256 exponential(__m256 x) {
    __m256 low = _mm256_set1_ps(-87.0f);
    __m256 gone = _mm256_cmp_ps(x, low, _CMP_LT_OQ);
    x = _mm256_max_ps(low, x);  // in this order, NaN stays NaN
    __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504088896341f)), _MM_FROUND_TO_NEAREST_INT);
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
    __m256 p = _mm256_set1_ps(1.9875691500e-4f);
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(c));
    p = _mm256_add_ps(_mm256_fmadd_ps(p, _mm256_mul_ps(r, r), r), _mm256_set1_ps(1.0f));
    __m256i scale = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_andnot_ps(gone, _mm256_mul_ps(p, _mm256_castsi256_ps(scale)));
}

inline float exponential(float x) { return _mm256_cvtss_f32(exponential(_mm256_set1_ps(x))); }

// The sum of eight lanes, always in this order.
inline float sum(__m256 v) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

// e^(score - highest) of `count` scores, a multiple of eight; the weights are added to the eight lanes of `total`. `to`
// may be `scores`.
inline void weigh_all(const float* scores, long count, float highest, float* to, float* total) {
    __m256 lanes = wide(total), top = _mm256_set1_ps(highest);
    for (long j = 0; j < count; j += 8) {
        __m256 weight = exponential(_mm256_sub_ps(_mm256_loadu_ps(scores + j), top));
        _mm256_storeu_ps(to + j, weight);
        lanes = _mm256_add_ps(lanes, weight);
    }
    keep(total, lanes);
}

// The maximum of `count` numbers, a multiple of eight; NaN is ignored.
inline float most(const float* from, long count) {
    __m256 lanes = wide(from);
    for (long at = 8; at < count; at += 8) lanes = _mm256_max_ps(wide(from + at), lanes);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps(lanes, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

}  // namespace decant
