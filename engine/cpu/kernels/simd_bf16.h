// Vectors of sixteen float32, and keys and values as panels of bfloat16 pairs (AVX512-BF16). A key's pairs are its own
// words, so packing keys is a transposition; a value's pair is two values of one column.
#pragma once

#include "panel_types.h"

namespace decant {

constexpr long SCORED = 6;  // most rows whose scores and factors fit into the registers

template <int ROWS>
struct Scores;

}  // namespace decant

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

// Packs sixteen keys of `words` words: to[words][16].
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

// Packs sixteen columns of two values.
inline void pair_values(const uint16_t* one, const uint16_t* other, uint32_t* to) {
    __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(one)));
    __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(other)));
    _mm512_store_si512(to, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
}

// Four bytes of each word: a pair of the first two, or of the last two. Each byte is exact as a bfloat16, the upper half
// of a float32.
inline __m512i pair_of_bytes(__m512i words, int first) {
    __m512 low = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(words, 24 - 8 * first), 24));
    __m512 high = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(words, 16 - 8 * first), 24));
    return _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(low), 16), _mm512_castps_si512(high));
}

// Packs sixteen keys of `words` words, an even number, from bytes: a transposition moves four numbers of a key at once.
inline void pair_keys(const int8_t* const* keys, long words, uint32_t* to) {
    long quads = words / 2;
    for (long at = 0; at < quads; at += 16) {
        auto some = __mmask16(at + 16 <= quads ? 0xffff : (1 << (quads - at)) - 1);
        __m512i rows[16];
        #pragma GCC unroll 16
        for (int n = 0; n < 16; n++) rows[n] = _mm512_maskz_loadu_epi32(some, keys[n] + 4 * at);
        transpose(rows);
        #pragma GCC unroll 16
        for (int n = 0; n < 16; n++)
            if (some >> n & 1) {
                _mm512_store_si512(to + 2 * (at + n) * WIDTH, pair_of_bytes(rows[n], 0));
                _mm512_store_si512(to + (2 * (at + n) + 1) * WIDTH, pair_of_bytes(rows[n], 2));
            }
    }
}

inline void pair_values(const int8_t* one, const int8_t* other, uint32_t* to) {
    auto numbers = [](const int8_t* at) {
        __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
        return _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)));
    };
    _mm512_store_si512(to, _mm512_or_si512(_mm512_srli_epi32(numbers(one), 16), numbers(other)));
}

inline __m512 sixteen(__m256i halves) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

inline __m256i halves(__m512 values) { return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(values)); }

// As in simd_avx2.h.
inline __m512 exponential(__m512 x) {
    __m512 low = _mm512_set1_ps(-87.0f);
    __mmask16 gone = _mm512_cmp_ps_mask(x, low, _CMP_LT_OQ);
    x = _mm512_max_ps(low, x);  // in this order, NaN stays NaN
    __m512 scaled = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f));
    __m512 n = _mm512_roundscale_ps(scaled, _MM_FROUND_TO_NEAREST_INT);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
    p = _mm512_add_ps(_mm512_fmadd_ps(p, _mm512_mul_ps(r, r), r), _mm512_set1_ps(1.0f));
    __m512i scale = _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23);
    return _mm512_maskz_mul_ps(__mmask16(~gone), p, _mm512_castsi512_ps(scale));
}

// 2^x for x <= 0, within 2^-13, because the result is rounded to eight bits: a polynomial of x - floor(x), with
// floor(x) added to the exponent.
inline __m512 power(__m512 x) {
    __m512 rest = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC), p = _mm512_set1_ps(7.802452266e-2f);
    for (float c : {2.260671554e-1f, 6.958335405e-1f, 9.999252186e-1f}) p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(c));
    return _mm512_scalef_ps(p, x);  // zero on underflow
}

// Scores of ROWS rows with the keys of a tile. They stay in registers until they are weights.
template <int ROWS>
struct Scores {
    static constexpr int PARTS = 4;  // sixteen keys each

    __m512 of[ROWS][PARTS];

    // query [ROWS, words]; keys as panels [PARTS][words][16].
    Scores(const uint32_t* query, long words, const uint32_t* keys) {
        #pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++)
            #pragma GCC unroll 4
            for (int p = 0; p < PARTS; p++) of[r][p] = _mm512_setzero_ps();
        for (long k = 0; k < words; k++) {
            Columns factors[PARTS];
            #pragma GCC unroll 4
            for (int p = 0; p < PARTS; p++) factors[p] = BFloat16::load(keys + (p * words + k) * WIDTH);
            #pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++)
                #pragma GCC unroll 4
                for (int p = 0; p < PARTS; p++) {
                    Columns sums{of[r][p]};
                    sums.add(query[r * words + k], factors[p]);
                    of[r][p] = sums.all;
                }
        }
    }

    // Multiplies scores with the scales of their keys.
    void scale(const float* key_scales) {
        #pragma GCC unroll 4
        for (int p = 0; p < PARTS; p++) {
            __m512 factors = _mm512_loadu_ps(key_scales + p * WIDTH);
            #pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) of[r][p] = _mm512_mul_ps(of[r][p], factors);
        }
    }

    // Hides keys that a row does not see; `seen` has a bit for each key.
    void hide(int row, uint64_t seen, float hidden) {
        #pragma GCC unroll 4
        for (int p = 0; p < PARTS; p++)
            of[row][p] = _mm512_mask_mov_ps(_mm512_set1_ps(hidden), __mmask16(seen >> 16 * p), of[row][p]);
    }

    float highest(int row) const {
        auto& some = of[row];
        return _mm512_reduce_max_ps(_mm512_max_ps(_mm512_max_ps(some[0], some[1]), _mm512_max_ps(some[2], some[3])));
    }

    // e^((score - highest) * score_scale), rounded and paired; the rounded weights are added to the sixteen lanes of
    // `total`.
    void weigh(int row, float highest, float score_scale, uint32_t* to, float* total) const {
        __m512 lanes = _mm512_loadu_ps(total), top = _mm512_set1_ps(highest);
        __m512 factor = _mm512_set1_ps(score_scale * 1.44269504088896341f);
        auto ones = reinterpret_cast<__m512bh>(_mm512_set1_epi32(0x3f803f80));
        auto weights = [=](__m512 scores) { return power(_mm512_mul_ps(_mm512_sub_ps(scores, top), factor)); };
        #pragma GCC unroll 2
        for (int p = 0; p < PARTS; p += 2) {
            __m512bh pairs = _mm512_cvtne2ps_pbh(weights(of[row][p + 1]), weights(of[row][p]));
            _mm512_storeu_si512(to + p * 8, reinterpret_cast<__m512i>(pairs));
            lanes = _mm512_dpbf16_ps(lanes, pairs, ones);
        }
        _mm512_storeu_ps(total, lanes);
    }

    // The same where values have scales: weights times these are rounded and paired, weights alone are added to `total`.
    void weigh(int row, float highest, float score_scale, const float* value_scales, uint32_t* to, float* total) const {
        __m512 lanes = _mm512_loadu_ps(total), top = _mm512_set1_ps(highest);
        __m512 factor = _mm512_set1_ps(score_scale * 1.44269504088896341f), scaled[PARTS];
        #pragma GCC unroll 4
        for (int p = 0; p < PARTS; p++) {
            __m512 weights = power(_mm512_mul_ps(_mm512_sub_ps(of[row][p], top), factor));
            lanes = _mm512_add_ps(lanes, weights);
            scaled[p] = _mm512_mul_ps(weights, _mm512_loadu_ps(value_scales + p * WIDTH));
        }
        #pragma GCC unroll 2
        for (int p = 0; p < PARTS; p += 2) {
            __m512bh pairs = _mm512_cvtne2ps_pbh(scaled[p + 1], scaled[p]);
            _mm512_storeu_si512(to + p * 8, reinterpret_cast<__m512i>(pairs));
        }
        _mm512_storeu_ps(total, lanes);
    }
};

}  // namespace decant

#endif
