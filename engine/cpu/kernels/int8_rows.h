// Rows that are rounded to int8, each with a scale of its own, and sums of products of bytes.
//
//     row    | a code for each inner number | sums of the codes, one for each group of the weight | scale |
//
// scale = largest absolute number / 127; code = number * (127 / largest), to the nearest integer, ties to even. Those are
// three operations of IEEE float32, so that the codes are the same in each build, and those of engine/cpu/int8_rows.py.
// A row with a number that is not finite has the scale NaN, so that all outputs are NaN.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#include "codes.h"
#include "elementwise.h"

namespace decant {

typedef uint32_t __attribute__((may_alias)) RowWord;  // in memory of factors of another type

constexpr float LEAST_ROUNDED = 0x1p-100f;  // rows of smaller numbers are zeros: 127 / number stays finite
constexpr long MOST_INNER = 1 << 17;        // with a common scale: 2^17 products of int8 fit into an int32

// A step multiplies KS inner numbers: AVX-512 four bytes at once (vpdpbusd), AVX2 two that are widened to int16
// (vpmaddwd), both without saturation. Weights are unsigned bytes: their numbers plus an offset, which is made up for by
// the sum of the row's codes.
struct Int8 {
#ifdef __AVX512BF16__
    static constexpr long KS = 4;
#else
    static constexpr long KS = 2;
#endif
};

constexpr long STEP_BYTES = Int8::KS * WIDTH;

constexpr int32_t E2M1_OFFSET = 12;  // twice the largest number

// The unsigned bytes of e2m1's codes.
inline __m128i offset_e2m1() { return _mm_add_epi8(sixteen_bytes(DOUBLED_E2M1), _mm_set1_epi8(E2M1_OFFSET)); }

#ifdef __AVX512BF16__

// A step of a panel in registers: KS bytes for each column.
struct Bytes {
    __m512i all;
    static Bytes read(const uint8_t* at) { return {_mm512_loadu_si512(at)}; }
};

// A step as it is in memory, and as two steps of four bits.
struct RawBytes {
    __m512i all;
    static RawBytes read(const uint8_t* at) { return {_mm512_loadu_si512(at)}; }
    void write(uint8_t* at) const { _mm512_storeu_si512(at, all); }
    RawBytes lower() const { return {_mm512_and_si512(all, _mm512_set1_epi8(15))}; }
    RawBytes upper() const { return {_mm512_and_si512(_mm512_srli_epi16(all, 4), _mm512_set1_epi8(15))}; }
    RawBytes plus(const RawBytes& other) const { return {_mm512_add_epi8(all, other.all)}; }
    // The bytes of this table at the given indices.
    RawBytes at(const RawBytes& indices) const { return {_mm512_shuffle_epi8(all, indices.all)}; }
    Bytes bytes() const { return {all}; }
    static RawBytes of_e2m1() { return {_mm512_broadcast_i32x4(offset_e2m1())}; }
    // 16 - zero, for each byte of a column.
    static RawBytes of_zeros(const uint8_t* zeros) {
        __m512i lanes = _mm512_sub_epi32(_mm512_set1_epi32(16), _mm512_cvtepu8_epi32(sixteen_bytes(zeros)));
        return {_mm512_mullo_epi32(lanes, _mm512_set1_epi32(0x01010101))};
    }
};

// Sixteen sums.
struct IntColumns {
    __m512i all;
    static IntColumns of(int32_t value) { return {_mm512_set1_epi32(value)}; }
    void add(uint32_t codes, const Bytes& step) {
        all = _mm512_dpbusd_epi32(all, step.all, _mm512_set1_epi32(int(codes)));
    }
    Columns numbers() const { return {_mm512_cvtepi32_ps(all)}; }
};

inline Columns product(const Columns& one, const Columns& other) { return {_mm512_mul_ps(one.all, other.all)}; }
inline Columns sum(const Columns& one, const Columns& other) { return {_mm512_add_ps(one.all, other.all)}; }
inline Columns difference(const Columns& one, const Columns& other) { return {_mm512_sub_ps(one.all, other.all)}; }
inline Columns all_of(float value) { return {_mm512_set1_ps(value)}; }

// Numbers of a row that are rounded at once, and their codes.
constexpr long AT_ONCE = 16;

struct Codes32 {
    __m512i all;
    static Codes32 zeros() { return {_mm512_setzero_si512()}; }
    // Without their signs.
    static Codes32 bits(__m512 numbers) {
        return {_mm512_and_si512(_mm512_castps_si512(numbers), _mm512_set1_epi32(0x7fffffff))};
    }
    static Codes32 rounded(__m512 numbers, float factor) {
        return {_mm512_cvtps_epi32(_mm512_mul_ps(numbers, _mm512_set1_ps(factor)))};
    }
    Codes32 most(const Codes32& other) const { return {_mm512_max_epi32(all, other.all)}; }
    Codes32 plus(const Codes32& other) const { return {_mm512_add_epi32(all, other.all)}; }
    int32_t sum() const { return _mm512_reduce_add_epi32(all); }
    int32_t largest() const { return _mm512_reduce_max_epi32(all); }
    void put(RowWord* to) const { _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(all)); }
};

inline __m512 numbers_of(const uint16_t* at, long count) { return some(at, count); }
inline __m512 numbers_of(const float* at, long count) {
    return count == AT_ONCE ? _mm512_loadu_ps(at) : _mm512_maskz_loadu_ps(first(count), at);
}

#else

struct Bytes {
    __m256i first, second;  // of eight columns each, widened
    static Bytes of(__m256i raw) {
        return {_mm256_cvtepu8_epi16(_mm256_castsi256_si128(raw)),
                _mm256_cvtepu8_epi16(_mm256_extracti128_si256(raw, 1))};
    }
    static Bytes read(const uint8_t* at) { return of(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at))); }
};

struct RawBytes {
    __m256i all;
    static RawBytes read(const uint8_t* at) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at))}; }
    void write(uint8_t* at) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), all); }
    RawBytes lower() const { return {_mm256_and_si256(all, _mm256_set1_epi8(15))}; }
    RawBytes upper() const { return {_mm256_and_si256(_mm256_srli_epi16(all, 4), _mm256_set1_epi8(15))}; }
    RawBytes plus(const RawBytes& other) const { return {_mm256_add_epi8(all, other.all)}; }
    RawBytes at(const RawBytes& indices) const { return {_mm256_shuffle_epi8(all, indices.all)}; }
    Bytes bytes() const { return Bytes::of(all); }
    static RawBytes of_e2m1() { return {_mm256_broadcastsi128_si256(offset_e2m1())}; }
    static RawBytes of_zeros(const uint8_t* zeros) {
        __m256i lanes = _mm256_sub_epi16(_mm256_set1_epi16(16), _mm256_cvtepu8_epi16(sixteen_bytes(zeros)));
        return {_mm256_mullo_epi16(lanes, _mm256_set1_epi16(0x0101))};
    }
};

struct IntColumns {
    __m256i first, second;
    static IntColumns of(int32_t value) { return {_mm256_set1_epi32(value), _mm256_set1_epi32(value)}; }
    void add(uint32_t codes, const Bytes& step) {
        __m256i pair = _mm256_set1_epi32(int(codes));
        first = _mm256_add_epi32(first, _mm256_madd_epi16(step.first, pair));
        second = _mm256_add_epi32(second, _mm256_madd_epi16(step.second, pair));
    }
    Columns numbers() const { return {_mm256_cvtepi32_ps(first), _mm256_cvtepi32_ps(second)}; }
};

inline Columns product(const Columns& one, const Columns& other) {
    return {_mm256_mul_ps(one.first, other.first), _mm256_mul_ps(one.second, other.second)};
}
inline Columns sum(const Columns& one, const Columns& other) {
    return {_mm256_add_ps(one.first, other.first), _mm256_add_ps(one.second, other.second)};
}
inline Columns difference(const Columns& one, const Columns& other) {
    return {_mm256_sub_ps(one.first, other.first), _mm256_sub_ps(one.second, other.second)};
}
inline Columns all_of(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }

constexpr long AT_ONCE = 8;

struct Codes32 {
    __m256i all;
    static Codes32 zeros() { return {_mm256_setzero_si256()}; }
    static Codes32 bits(__m256 numbers) {
        return {_mm256_and_si256(_mm256_castps_si256(numbers), _mm256_set1_epi32(0x7fffffff))};
    }
    static Codes32 rounded(__m256 numbers, float factor) {
        return {_mm256_cvtps_epi32(_mm256_mul_ps(numbers, _mm256_set1_ps(factor)))};
    }
    Codes32 most(const Codes32& other) const { return {_mm256_max_epi32(all, other.all)}; }
    Codes32 plus(const Codes32& other) const { return {_mm256_add_epi32(all, other.all)}; }
    int32_t sum() const {
        __m128i four = _mm_add_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
        __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
        return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
    }
    int32_t largest() const {
        __m128i four = _mm_max_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
        __m128i two = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
        return _mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
    }
    void put(RowWord* to) const {
        __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), words);
    }
};

template <class E>
inline __m256 numbers_of(const E* at, long count) { return some(at, count); }

#endif

// Where the parts of rounded rows are, in words. Codes are written sixteen at once, from a multiple of eight on.
struct RowShape {
    long inner, group, groups, sums_at, scale_at, words;

    RowShape(long inner, long group)
        : inner(inner), group(std::min(group, inner)), groups((inner + this->group - 1) / this->group),
          sums_at((inner + 23) / 16 * 16 / Int8::KS), scale_at(sums_at + groups), words(scale_at + 1) {}

    bool operator==(const RowShape& other) const { return inner == other.inner && group == other.group; }
};

// Rounds a row [inner] to `to` [shape.words].
template <class E>
inline void round_row(const E* row, const RowShape& shape, RowWord* to) {
    auto some_numbers = [&](long k, long end) { return numbers_of(row + k, std::min(AT_ONCE, end - k)); };
    Codes32 bits = Codes32::zeros();  // those of numbers that are not finite are larger than all others
    for (long k = 0; k < shape.inner; k += AT_ONCE) bits = bits.most(Codes32::bits(some_numbers(k, shape.inner)));
    int32_t largest_bits = bits.largest();
    float largest, scale = std::numeric_limits<float>::quiet_NaN(), factor = 0.0f;
    std::memcpy(&largest, &largest_bits, sizeof largest);
    bool finite = largest_bits < 0x7f800000;
    if (finite) largest = std::max(largest, LEAST_ROUNDED), scale = largest / 127.0f, factor = 127.0f / largest;
    for (long g = 0; g < shape.groups; g++) {
        Codes32 sums = Codes32::zeros();
        for (long k = g * shape.group, end = std::min(k + shape.group, shape.inner); k < end; k += AT_ONCE) {
            Codes32 codes = finite ? Codes32::rounded(some_numbers(k, end), factor) : Codes32::zeros();
            codes.put(to + k / Int8::KS);
            sums = sums.plus(codes);
        }
        to[shape.sums_at + g] = uint32_t(sums.sum());
    }
    std::memcpy(to + shape.scale_at, &scale, sizeof scale);
}

// Consecutive rounded rows.
struct Int8Rows {
    const RowWord* at;
    const RowShape& shape;

    const RowWord* codes(long row, long step) const { return at + row * shape.words + step; }
    int32_t sum(long row, long g) const { return int32_t(at[row * shape.words + shape.sums_at + g]); }
    float scale(long row) const {
        float value;
        std::memcpy(&value, at + row * shape.words + shape.scale_at, sizeof value);
        return value;
    }
    Int8Rows from(long row) const { return {at + row * shape.words, shape}; }
};

}  // namespace decant
