// Rows times panels: the one loop in which a CPU's time goes, for linear layers and for attention alike.
//
// A panel holds a factor [inner, 16] in the order in which it is read, k after k; a step of one k is one or two loads:
//
//     float32     | w[k][0..7]  | w[k][8..15] |        64 bytes
//     bfloat16    | w[k][j+8] w[k][j], j 0..7 |        32 bytes: the upper and the lower half of eight words
//
// A bfloat16 is the upper half of a float32, so a shift and a mask widen sixteen of them: what is read from memory are
// the bytes of bfloat16, and sums are float32.
//
// Every output is one chain of fused multiply-adds over k = 0, 1, ... inner - 1, whatever the number of rows, or of
// panels that are computed together. So rows do not see each other, and no case has other bits.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace decant {

constexpr long WIDTH = 16;    // columns of a panel
constexpr long PIECE = 512;   // steps of a panel that stay in the first level cache

struct Two { __m256 first, second; };

inline float widen(uint16_t half) {
    uint32_t word = uint32_t(half) << 16;
    float value;
    std::memcpy(&value, &word, 4);
    return value;
}

// To the nearest, ties to even, as torch rounds; what is no number stays none.
inline uint16_t narrow(float value) {
    uint32_t word;
    std::memcpy(&word, &value, 4);
    if (value != value) return 0x7fc0;
    return uint16_t((word + 0x7fff + ((word >> 16) & 1)) >> 16);
}

struct Float32 {
    using Element = float;
    using Word = float;
    static constexpr long STEP = 16;  // words of a panel for one k
    static Two load(const Word* at) { return {_mm256_load_ps(at), _mm256_load_ps(at + 8)}; }
    static float read(Element value) { return value; }
    static Element round(float value) { return value; }
    static void put(Word* panel, long k, long column, Element value) { panel[k * STEP + column] = value; }
};

struct BFloat16 {
    using Element = uint16_t;
    using Word = uint32_t;
    static constexpr long STEP = 8;
    static Two load(const Word* at) {
        __m256i words = _mm256_load_si256(reinterpret_cast<const __m256i*>(at));
        return {_mm256_castsi256_ps(_mm256_slli_epi32(words, 16)),
                _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32(int(0xffff0000))))};
    }
    static float read(Element value) { return widen(value); }
    static Element round(float value) { return narrow(value); }
    static void put(Word* panel, long k, long column, Element value) {
        panel[k * STEP + column % 8] |= uint32_t(value) << (column < 8 ? 0 : 16);
    }
};

// ROWS rows through PANELS panels for `count` of the `inner` steps: 2 * ROWS * PANELS chains, which must fit into sixteen
// registers with their factors. With `begun` they go on from the sums in `out`; AHEAD, what lies behind these factors is
// called for meanwhile.
template <class T, int ROWS, int PANELS, bool AHEAD = false>
inline void tile(const float* x, long inner, long count, const typename T::Word* panels, float* out, long stride,
                 bool begun) {
    __m256 chains[ROWS][PANELS][2];
    #pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
        #pragma GCC unroll 8
        for (int p = 0; p < PANELS; p++) {
            const float* from = out + r * stride + p * WIDTH;
            chains[r][p][0] = begun ? _mm256_loadu_ps(from) : _mm256_setzero_ps();
            chains[r][p][1] = begun ? _mm256_loadu_ps(from + 8) : _mm256_setzero_ps();
        }
    for (long k = 0; k < count; k++)
        #pragma GCC unroll 8
        for (int p = 0; p < PANELS; p++) {
            if (AHEAD) _mm_prefetch(reinterpret_cast<const char*>(panels + (k + count) * T::STEP), _MM_HINT_T1);
            Two factors = T::load(panels + (p * inner + k) * T::STEP);
            #pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
                __m256 value = _mm256_broadcast_ss(x + r * inner + k);
                chains[r][p][0] = _mm256_fmadd_ps(value, factors.first, chains[r][p][0]);
                chains[r][p][1] = _mm256_fmadd_ps(value, factors.second, chains[r][p][1]);
            }
        }
    #pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
        #pragma GCC unroll 8
        for (int p = 0; p < PANELS; p++) {
            _mm256_storeu_ps(out + r * stride + p * WIDTH, chains[r][p][0]);
            _mm256_storeu_ps(out + r * stride + p * WIDTH + 8, chains[r][p][1]);
        }
}

// A few rows, PANELS panels at a time: all of it is read once.
template <class T, int ROWS, int PANELS>
inline void few(const float* x, long inner, const typename T::Word* panels, long count, float* out, long stride) {
    long p = 0, together = count / PANELS * PANELS;
    for (; p < together; p += PANELS)
        tile<T, ROWS, PANELS>(x, inner, inner, panels + p * inner * T::STEP, out + p * WIDTH, stride, false);
    for (; p < count; p++)
        tile<T, ROWS, 1>(x, inner, inner, panels + p * inner * T::STEP, out + p * WIDTH, stride, false);
}

template <class T, bool AHEAD>
inline void group(const float* x, long rows, long inner, long count, const typename T::Word* factors, float* out,
                  long stride, bool begun) {
    switch (rows) {
        case 6: return tile<T, 6, 1, AHEAD>(x, inner, count, factors, out, stride, begun);
        case 5: return tile<T, 5, 1, AHEAD>(x, inner, count, factors, out, stride, begun);
        case 4: return tile<T, 4, 1, AHEAD>(x, inner, count, factors, out, stride, begun);
        default: return tile<T, 3, 1, AHEAD>(x, inner, count, factors, out, stride, begun);
    }
}

// Many rows, by one panel: a piece of it stays in the first level cache while all of them pass by, in groups of three to
// six that are as equal as can be. While the last one does, memory brings the next piece.
template <class T>
inline void many(const float* x, long rows, long inner, const typename T::Word* panel, float* out, long stride) {
    long groups = (rows + 5) / 6;
    for (long k = 0; k < inner; k += PIECE)
        for (long g = 0; g < groups; g++) {
            long first = rows * g / groups, some = rows * (g + 1) / groups - first, count = std::min(PIECE, inner - k);
            auto pass = g + 1 < groups ? group<T, false> : group<T, true>;
            pass(x + first * inner + k, some, inner, count, panel + k * T::STEP, out + first * stride, stride, k > 0);
        }
}

// x [rows, inner] times `count` panels -> out [rows, count * WIDTH], rows `stride` apart. The fewer rows, the more panels
// at once: at least eight chains hide the latency of a fused multiply-add.
template <class T>
inline void multiply(const float* x, long rows, long inner, const typename T::Word* panels, long count, float* out,
                     long stride) {
    if (rows == 1) few<T, 1, 4>(x, inner, panels, count, out, stride);
    else if (rows == 2) few<T, 2, 2>(x, inner, panels, count, out, stride);
    else if (rows == 3) few<T, 3, 2>(x, inner, panels, count, out, stride);
    else
        for (long p = 0; p < count; p++)
            many<T>(x, rows, inner, panels + p * inner * T::STEP, out + p * WIDTH, stride);
}

}  // namespace decant
