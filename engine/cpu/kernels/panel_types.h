// Sixteen columns of a panel in registers, and the number formats of panels.
//
// A panel holds a factor [inner, 16] in the order in which it is read. The format depends on the CPU:
//
//     float32                    | w[k][0] .. w[k][15] |          64 bytes for one k
//     bfloat16, AVX2             | w[k][j+8] w[k][j], j 0..7 |    32 bytes for one k: both halves of eight words, each
//                                                                 widened to float32
//     bfloat16, AVX512-BF16      | w[k+1][j] w[k][j], j 0..15 |   64 bytes for two k: the CPU multiplies both halves
//                                                                 of sixteen words (vdpbf16ps)
//
// A step of a chain takes one k, or two. Sums are float32 in all formats.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace decant {

constexpr long WIDTH = 16;  // columns of a panel

constexpr long LINE = 64;   // bytes of a cache line

// The first address from `at` on that is aligned to a cache line.
template <class E>
inline E* at_line(E* at) { return at + (LINE - reinterpret_cast<uintptr_t>(at) % LINE) % LINE / sizeof(E); }

inline float widen(uint16_t half) {
    uint32_t word = uint32_t(half) << 16;
    float value;
    std::memcpy(&value, &word, 4);
    return value;
}

// Rounds to nearest, ties to even, as torch does; NaN stays NaN.
inline uint16_t narrow(float value) {
    uint32_t word;
    std::memcpy(&word, &value, 4);
    if (value != value) return 0x7fc0;
    return uint16_t((word + 0x7fff + ((word >> 16) & 1)) >> 16);
}

#ifdef __AVX512BF16__

constexpr bool WIDE = true;

struct Columns {
    __m512 all;
    static Columns zeros() { return {_mm512_setzero_ps()}; }
    static Columns read(const float* at) { return {_mm512_loadu_ps(at)}; }
    void write(float* at) const { _mm512_storeu_ps(at, all); }
    void add(float value, const Columns& factors) { all = _mm512_fmadd_ps(_mm512_set1_ps(value), factors.all, all); }
    void add(const Columns& one, const Columns& other) { all = _mm512_fmadd_ps(one.all, other.all, all); }
    void add(uint32_t pair, const Columns& factors) {
        auto halves = reinterpret_cast<__m512bh>(_mm512_set1_epi32(int(pair)));
        all = _mm512_dpbf16_ps(all, halves, reinterpret_cast<__m512bh>(factors.all));
    }
};

#else

constexpr bool WIDE = false;

struct Columns {
    __m256 first, second;
    static Columns zeros() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
    static Columns read(const float* at) { return {_mm256_loadu_ps(at), _mm256_loadu_ps(at + 8)}; }
    void write(float* at) const { _mm256_storeu_ps(at, first), _mm256_storeu_ps(at + 8, second); }
    void add(float value, const Columns& factors) {
        __m256 all = _mm256_set1_ps(value);
        first = _mm256_fmadd_ps(all, factors.first, first);
        second = _mm256_fmadd_ps(all, factors.second, second);
    }
    void add(const Columns& one, const Columns& other) {
        first = _mm256_fmadd_ps(one.first, other.first, first);
        second = _mm256_fmadd_ps(one.second, other.second, second);
    }
};

#endif

// Element: a number in memory. Word: the unit of a panel; a step has STEP words and takes KS of the inner numbers.
// Factor: the unit of a row, one for each step.
struct Float32 {
    using Element = float;
    using Word = float;
    using Factor = float;
    static constexpr long STEP = 16, KS = 1;
    static Columns load(const Word* at) { return Columns::read(at); }
    static float read(Element value) { return value; }
    static void put(Word* panel, long k, long column, Element value) { panel[k * STEP + column] = value; }
};

struct BFloat16 {
    using Element = uint16_t;
    using Word = uint32_t;
    static float read(Element value) { return widen(value); }
#ifdef __AVX512BF16__
    using Factor = uint32_t;
    static constexpr long STEP = 16, KS = 2;
    static Columns load(const Word* at) { return {_mm512_load_ps(at)}; }
    static void put(Word* panel, long k, long column, Element value) {
        panel[k / 2 * STEP + column] |= uint32_t(value) << (k % 2 * 16);
    }
#else
    using Factor = float;
    static constexpr long STEP = 8, KS = 1;
    static Columns load(const Word* at) {
        __m256i words = _mm256_load_si256(reinterpret_cast<const __m256i*>(at));
        return {_mm256_castsi256_ps(_mm256_slli_epi32(words, 16)),
                _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32(int(0xffff0000))))};
    }
    static void put(Word* panel, long k, long column, Element value) {
        panel[k * STEP + column % 8] |= uint32_t(value) << (column < 8 ? 0 : 16);
    }
#endif
};

// Steps of a chain over `inner` numbers.
template <class T>
constexpr long steps(long inner) { return (inner + T::KS - 1) / T::KS; }

// Reads a factor of a row. A pair of bfloat16 may be unaligned.
inline float take(const float* at) { return *at; }

inline uint32_t take(const uint32_t* at) {
    uint32_t pair;
    std::memcpy(&pair, at, sizeof pair);
    return pair;
}

// Converts a row to factors: to[steps(inner)].
template <class T>
inline void pack_row(const typename T::Element* from, long inner, typename T::Factor* to) {
    if constexpr (T::KS == 2) {
        if (inner % 2) to[inner / 2] = 0;
        std::memcpy(to, from, inner * sizeof(typename T::Element));
    } else {
        for (long k = 0; k < inner; k++) to[k] = T::read(from[k]);
    }
}

}  // namespace decant
