// Sixteen numbers at a time, and keys and values as panels of pairs, for CPUs that multiply bfloat16. A key's pairs are
// the words that it consists of, so laying keys out is a transposition; a value's pair is two values of one column.
#pragma once

#include "columns.h"

#ifdef __AVX512BF16__

namespace decant {

// Sixteen rows of sixteen words become sixteen columns.
inline void transpose(__m512i (&rows)[16]) {
    __m512i twos[16], fours[16];
    #pragma GCC unroll 8
    for (int n = 0; n < 8; n++) {
        twos[2 * n] = _mm512_unpacklo_epi32(rows[2 * n], rows[2 * n + 1]);
        twos[2 * n + 1] = _mm512_unpackhi_epi32(rows[2 * n], rows[2 * n + 1]);
    }
    #pragma GCC unroll 4
    for (int n = 0; n < 16; n += 4)  // fours[n + c]: column 4 q + c of rows n to n + 3, in the q-th quarter
        for (int c = 0; c < 4; c++) {
            __m512i one = twos[n + c / 2], other = twos[n + 2 + c / 2];
            fours[n + c] = c % 2 ? _mm512_unpackhi_epi64(one, other) : _mm512_unpacklo_epi64(one, other);
        }
    #pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        __m512i low = _mm512_shuffle_i32x4(fours[c], fours[4 + c], 0x44);
        __m512i high = _mm512_shuffle_i32x4(fours[c], fours[4 + c], 0xee);
        __m512i lower = _mm512_shuffle_i32x4(fours[8 + c], fours[12 + c], 0x44);
        __m512i higher = _mm512_shuffle_i32x4(fours[8 + c], fours[12 + c], 0xee);
        rows[c] = _mm512_shuffle_i32x4(low, lower, 0x88);
        rows[4 + c] = _mm512_shuffle_i32x4(low, lower, 0xdd);
        rows[8 + c] = _mm512_shuffle_i32x4(high, higher, 0x88);
        rows[12 + c] = _mm512_shuffle_i32x4(high, higher, 0xdd);
    }
}

// Sixteen keys of `words` words: to[words][16].
inline void pair_keys(const uint16_t* const* keys, long words, uint32_t* to) {
    for (long at = 0; at < words; at += 16) {
        auto some = __mmask16(at + 16 <= words ? 0xffff : (1 << (words - at)) - 1);
        __m512i rows[16];
        #pragma GCC unroll 16
        for (int n = 0; n < 16; n++) rows[n] = _mm512_maskz_loadu_epi32(some, keys[n] + 2 * at);
        transpose(rows);
        #pragma GCC unroll 16
        for (int n = 0; n < 16; n++)
            if (some >> n & 1) _mm512_store_si512(to + (at + n) * WIDTH, rows[n]);
    }
}

// Sixteen columns of two values.
inline void pair_values(const uint16_t* one, const uint16_t* other, uint32_t* to) {
    __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(one)));
    __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(other)));
    _mm512_store_si512(to, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
}

inline __m512 sixteen(__m256i halves) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

inline __m256i halves(__m512 values) { return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(values)); }

// As in lanes.h, of sixteen.
inline __m512 exponential(__m512 x) {
    __m512 low = _mm512_set1_ps(-87.0f);
    __mmask16 gone = _mm512_cmp_ps_mask(x, low, _CMP_LT_OQ);
    x = _mm512_max_ps(low, x);  // in this order: what is no number stays none
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f)), _MM_FROUND_TO_NEAREST_INT);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
    p = _mm512_add_ps(_mm512_fmadd_ps(p, _mm512_mul_ps(r, r), r), _mm512_set1_ps(1.0f));
    __m512i scale = _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23);
    return _mm512_maskz_mul_ps(__mmask16(~gone), p, _mm512_castsi512_ps(scale));
}

// 2^x of what is at most nought, within 2^-13: it is rounded to eight bits. A polynomial for what is left of the largest
// whole number below x, which is added to the exponent.
inline __m512 power(__m512 x) {
    __m512 rest = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC), p = _mm512_set1_ps(7.802452266e-2f);
    for (float c : {2.260671554e-1f, 6.958335405e-1f, 9.999252186e-1f}) p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(c));
    return _mm512_scalef_ps(p, x);  // nought where it is below all numbers
}

// As weigh_all in lanes.h, e^((score - highest) * unit), of a multiple of thirty-two; rounded and paired. What they are
// rounded to goes on top of the sixteen of `total`.
inline void weigh_pairs(const float* scores, long count, float highest, float unit, uint32_t* to, float* total) {
    __m512 lanes = _mm512_loadu_ps(total), top = _mm512_set1_ps(highest);
    __m512 factor = _mm512_set1_ps(unit * 1.44269504088896341f);
    auto ones = reinterpret_cast<__m512bh>(_mm512_set1_epi32(0x3f803f80));
    auto weights = [=](const float* at) { return power(_mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(at), top), factor)); };
    for (long j = 0; j < count; j += 32) {
        __m512bh pairs = _mm512_cvtne2ps_pbh(weights(scores + j + 16), weights(scores + j));
        _mm512_storeu_si512(to + j / 2, reinterpret_cast<__m512i>(pairs));
        lanes = _mm512_dpbf16_ps(lanes, pairs, ones);
    }
    _mm512_storeu_ps(total, lanes);
}

}  // namespace decant

#endif
