// Rows times panels of twelve-bit weights (weight.h), for CPUs that multiply bfloat16: words are decoded in registers
// and multiplied there. The chains are those of gemm.h.
#pragma once

#include "gemm.h"

#ifdef __AVX512BF16__

namespace decant {

constexpr long BLOCK = 16;        // steps
constexpr long FOUR = 3 * LINE;   // bytes of four steps
constexpr uint8_t PLAIN = 255;    // no exponent: they have seven bits
constexpr long PREFETCH_ROWS_BF16 = 3;  // as PREFETCH_ROWS in gemm.h

static_assert(PIECE % BLOCK == 0);

inline long blocks(long length) { return (length + BLOCK - 1) / BLOCK; }

// The next block of a panel.
struct PanelCursor {
    const uint8_t* lowest;
    const char* at;
};

// Table of the upper bytes that a block's sixteen codes stand for, four times.
inline __m512i upper_bytes(uint8_t lowest) {
    __m128i above = _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, -128, -127, -126, -125, -124, -123, -122, -121);
    return _mm512_broadcast_i32x4(_mm_add_epi8(above, _mm_set1_epi8(char(lowest))));
}

// Decodes pair PAIR of four steps to the words of a plain panel.
template <int PAIR>
inline void unpack(const char* at, __m512i upper, __m512i& first, __m512i& second) {
    __m512i codes = _mm512_load_si512(at), lower = _mm512_load_si512(at + (1 + PAIR) * LINE);
    if (PAIR) codes = _mm512_srli_epi16(codes, 4);
    __m512i above = _mm512_permutexvar_epi8(codes, upper);  // indexed by six bits of each byte; four are the code
    first = _mm512_ternarylogic_epi32(above, lower, _mm512_set1_epi16(0xff), 0xd8);  // bitwise: mask ? lower : above
    second = _mm512_shldi_epi16(above, lower, 8);                                    // above << 8 | lower >> 8
}

// The next `count` steps of PANELS panels times ROWS rows. With KEPT the decoded panels are stored in `kept`, PIECE
// steps apart. As many bytes as are read are prefetched from `next`.
template <int ROWS, int PANELS, bool KEPT, Prefetch PREFETCH>
inline void stream(const uint32_t* x, long length, long count, PanelCursor* panels, float* out, long stride,
                   bool accumulate, uint32_t* kept, const char* next) {
    Chains<ROWS, PANELS> chains(out, stride, accumulate);

    // One step, and four steps, of panels [p, end).
    auto one = [&](long k, int p, int end, const __m512i* factors) __attribute__((always_inline)) {
        #pragma GCC unroll 2
        for (int n = p; KEPT && n < end; n++) _mm512_store_si512(kept + (n * PIECE + k) * WIDTH, factors[n]);
        #pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++)
            #pragma GCC unroll 2
            for (int n = p; n < end; n++)
                chains.of[r][n].add(take(x + r * length + k), {_mm512_castsi512_ps(factors[n])});
    };
    auto four = [&](long k, int p, int end, auto& at, auto& upper) __attribute__((always_inline)) {
        __m512i first[PANELS], second[PANELS];
        #pragma GCC unroll 2
        for (int n = p; n < end; n++) unpack<0>(at[n], upper[n], first[n], second[n]);
        one(k, p, end, first), one(k + 1, p, end, second);
        #pragma GCC unroll 2
        for (int n = p; n < end; n++) unpack<1>(at[n], upper[n], first[n], second[n]);
        one(k + 2, p, end, first), one(k + 3, p, end, second);
    };
    const char* at[PANELS];
    #pragma GCC unroll 2
    for (int p = 0; p < PANELS; p++) at[p] = panels[p].at;
    long distance = next - at[0];
    auto prefetch = [&](int p, int lines) __attribute__((always_inline)) {
        for (int line = 0; line < lines && PREFETCH >> p & 1; line++)
            _mm_prefetch(at[p] + distance + line * LINE, _MM_HINT_T1);
    };
    for (long k = 0; k < count; k += BLOCK) {
        bool plain = false;
        __m512i upper[PANELS];
        #pragma GCC unroll 2
        for (int p = 0; p < PANELS; p++) {
            uint8_t lowest = panels[p].lowest[k / BLOCK];
            plain |= lowest == PLAIN, upper[p] = upper_bytes(lowest);
        }
        if (!plain) {
            for (long n = k; n < k + BLOCK; n += 4) {
                #pragma GCC unroll 2
                for (int p = 0; p < PANELS; p++) prefetch(p, FOUR / LINE);
                four(n, 0, PANELS, at, upper);
                #pragma GCC unroll 2
                for (int p = 0; p < PANELS; p++) at[p] += FOUR;
            }
            continue;
        }
        #pragma GCC unroll 2
        for (int p = 0; p < PANELS; p++)  // one panel at a time
            if (panels[p].lowest[k / BLOCK] == PLAIN)
                for (long end = std::min(k + BLOCK, count), n = k; n < end; n++, at[p] += LINE) {
                    __m512i factors[PANELS];
                    factors[p] = _mm512_load_si512(at[p]);
                    prefetch(p, 1);
                    one(n, p, p + 1, factors);
                }
            else if (PANELS > 1)
                for (long n = k; n < k + BLOCK; n += 4, at[p] += FOUR) {
                    prefetch(p, FOUR / LINE);
                    four(n, p, p + 1, at, upper);
                }
    }
    #pragma GCC unroll 2
    for (int p = 0; p < PANELS; p++) panels[p] = {panels[p].lowest + blocks(count), at[p]};
    chains.write(out, stride);
}

// A group of rows, as in gemm.h.
template <int PANELS, bool KEPT, Prefetch PREFETCH, int ROWS = GROUP>
inline void stream_group(const uint32_t* x, long rows, long length, long count, PanelCursor* panels, float* out,
                         long stride, bool accumulate, uint32_t* kept, const char* next) {
    if constexpr (ROWS > (PANELS == 1 ? 1 : GROUP / 2))
        if (rows < ROWS)
            return stream_group<PANELS, KEPT, PREFETCH, ROWS - 1>(x, rows, length, count, panels, out, stride,
                                                                  accumulate, kept, next);
    stream<ROWS, PANELS, KEPT, PREFETCH>(x, length, count, panels, out, stride, accumulate, kept, next);
}

}  // namespace decant

#endif
