// Weights as codes times scales, from eight bits to four: weight[o, i] = scale[g, o] * number(code[o, i]), where g is the
// group of i. Four-bit codes may have zeros: number(code) = code - zero[g, o], else code - 8. Those of four bits without
// zeros and those of int8 may have minima: min[g, o] is subtracted from each weight of the group, and number(code) = code.
// Those of e2m1, of four bits as well, have the numbers of a table.
//
//     weight   | CodesHeader, a line | bundle | bundle | ...
//     bundle   BUNDLE panels (64 outputs): | group | group | ...
//     group    | 64 scales, float16 or float32 | 64 zeros, if any | 64 minima, float32, if any | block | block | ...
//     block    BLOCK_STEPS steps (panel_types.h) of the first panel, of the second, ...
//
// Every number of a code is a bfloat16, so nothing is rounded before a product. An output is a chain of multiply-adds over
// the steps of a group, from zero; the chains of the groups, each times its scale, are added in their order, and after
// each the minimum times the sum of the group's numbers of the row is subtracted. So a row's bits do not depend on others.
#pragma once

#include "gemm.h"
#include "guard.h"

namespace decant {

constexpr long BUNDLE = 4, BLOCK_STEPS = 4;

// FP8: e4m3 times 2^-8, E2M1: times 2, which the scales make up for. INT4_ZEROS, INT4_MINS: of kind INT4 in a header, with
// either.
enum CodeKind : int32_t { INT8 = 1, INT4, FP8, E2M1, INT4_ZEROS, INT4_MINS };

constexpr bool has_four_bits(int32_t kind) { return kind != INT8 && kind != FP8; }

// Twice the numbers of e2m1.
constexpr int8_t DOUBLED_E2M1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

struct CodesHeader {
    int32_t kind, has_zeros, half_scales, has_mins;
    int64_t outputs, inner, group;  // group: inner numbers with a common scale
};

// Sizes in steps and bytes that follow from a header.
template <class T>
struct CodesShape {
    bool has_zeros, has_mins, half_scales, is_whole;
    long length, group, groups, scale_bytes, zeros_at, mins_at, blocks_at, block_bytes, panel_bytes, group_bytes, bundle_bytes;

    explicit CodesShape(const CodesHeader& of)
        : has_zeros(of.has_zeros), has_mins(of.has_mins), half_scales(of.half_scales), is_whole(of.group >= of.inner),
          length(steps<T>(of.inner)), group(is_whole ? length : of.group / T::KS),
          groups((length + group - 1) / group), scale_bytes(half_scales ? 2 : 4),
          zeros_at(BUNDLE * WIDTH * scale_bytes), mins_at(zeros_at + has_zeros * BUNDLE * WIDTH),
          blocks_at(mins_at + has_mins * BUNDLE * WIDTH * long(sizeof(float))),
          panel_bytes(BLOCK_STEPS * T::KS * WIDTH / (has_four_bits(of.kind) ? 2 : 1)), group_bytes(0), bundle_bytes(0) {
        block_bytes = BUNDLE * panel_bytes;
        group_bytes = blocks_at + (group + BLOCK_STEPS - 1) / BLOCK_STEPS * block_bytes;
        bundle_bytes = groups * group_bytes;
    }

    long bytes(long outputs) const { return LINE + outputs / (BUNDLE * WIDTH) * bundle_bytes; }
};

inline void check(const CodesHeader& header, int64_t outputs, int64_t inner) {
    require(header.kind >= INT8 && header.kind <= E2M1, "code", "int8, int4, fp8 or e2m1", header.kind);
    require(!header.has_zeros || header.kind == INT4, "zeros", "only of int4", header.kind);
    require(!header.has_mins || (header.kind <= INT4 && !header.has_zeros), "minima",
            "only of int8, and of int4 without zeros", header.kind);
    check_equal("outputs", header.outputs, outputs);
    check_equal("inner", header.inner, inner);
    require(outputs >= 1 && outputs % (BUNDLE * WIDTH) == 0, "outputs", "a multiple of 64", outputs);
    check_positive("inner", inner);
    int64_t group = header.group;
    require(group >= inner || (group >= 8 && group <= 512 && group % 8 == 0), "group",
            "a multiple of 8, up to 512, or all inputs", group);
}

// Sixteen scales of a panel.
inline Columns read_scales(const uint8_t* at, bool half) {
    if (!half) return Columns::read(reinterpret_cast<const float*>(at));
#ifdef __AVX512BF16__
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)))};
#else
    auto halves = reinterpret_cast<const __m128i*>(at);
    return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
#endif
}

// Sixteen numbers of one byte each.
inline Columns columns_of_int8(__m128i bytes) {
#ifdef __AVX512BF16__
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))};
#else
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
#endif
}

// e4m3 as float16, whose exponents are eight less.
inline __m256i halves_of_fp8(__m128i bytes) {
    __m256i words = _mm256_cvtepu8_epi16(bytes);
    __m256i signs = _mm256_and_si256(_mm256_slli_epi16(words, 8), _mm256_set1_epi16(short(0x8000)));
    return _mm256_or_si256(signs, _mm256_and_si256(_mm256_slli_epi16(words, 7), _mm256_set1_epi16(0x3f80)));
}

inline Columns columns_of_fp8(__m128i bytes) {
    __m256i words = halves_of_fp8(bytes);
#ifdef __AVX512BF16__
    return {_mm512_cvtph_ps(words)};
#else
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(words)), _mm256_cvtph_ps(_mm256_extracti128_si256(words, 1))};
#endif
}

inline __m128i sixteen_bytes(const void* at) { return _mm_loadu_si128(static_cast<const __m128i*>(at)); }

// Codes of one kind: `decode` decodes a block of one panel, `put` stores a code of a block of zeros. Steps of one inner
// number: sixteen bytes, or the columns 0 to 7 in the lower halves of eight bytes and the others in the upper halves.
template <class T, CodeKind KIND>
struct Decoder {
    __m128i zeros = _mm_set1_epi8(KIND == INT4_MINS ? 0 : 8), table = sixteen_bytes(DOUBLED_E2M1);

    void use_zeros(const uint8_t* at) {
        if (KIND == INT4_ZEROS) zeros = sixteen_bytes(at);
    }

    void decode(const uint8_t* at, Columns (&steps)[BLOCK_STEPS]) const {
        #pragma GCC unroll 4
        for (int s = 0; s < BLOCK_STEPS; s++) {
            if constexpr (KIND == INT8) steps[s] = columns_of_int8(sixteen_bytes(at + s * WIDTH));
            else if constexpr (KIND == FP8) steps[s] = columns_of_fp8(sixteen_bytes(at + s * WIDTH));
            else {
                __m128i pairs = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(at + s * WIDTH / 2));
                __m128i both = _mm_unpacklo_epi64(pairs, _mm_srli_epi16(pairs, 4));
                __m128i codes = _mm_and_si128(both, _mm_set1_epi8(15));
                steps[s] = columns_of_int8(KIND == E2M1 ? _mm_shuffle_epi8(table, codes) : _mm_sub_epi8(codes, zeros));
            }
        }
    }

    static void put(uint8_t* block, long step, long, long column, uint8_t code) {
        if (has_four_bits(KIND)) block[step * WIDTH / 2 + column % 8] |= uint8_t(code << column / 8 * 4);
        else block[step * WIDTH + column] = code;
    }
};

#ifdef __AVX512BF16__

// Steps of two inner numbers, as pairs of bfloat16: sixteen bytes of the first numbers, then of the second ones.
template <CodeKind KIND>
struct Decoder<BFloat16, KIND> {
    void use_zeros(const uint8_t*) {}

    void decode(const uint8_t* at, Columns (&steps)[BLOCK_STEPS]) const {
        #pragma GCC unroll 4
        for (int s = 0; s < BLOCK_STEPS; s++) steps[s] = {_mm512_castsi512_ps(pairs(at + s * 2 * WIDTH))};
    }

    static __m512i pairs(const uint8_t* at) {
        auto words = [](const uint8_t* at) {  // float32 whose lower halves are zero
            auto numbers = KIND == INT8 ? columns_of_int8(sixteen_bytes(at)) : columns_of_fp8(sixteen_bytes(at));
            return _mm512_castps_si512(numbers.all);
        };
        return _mm512_or_si512(_mm512_srli_epi32(words(at), 16), words(at + WIDTH));
    }

    static void put(uint8_t* block, long step, long part, long column, uint8_t code) {
        block[step * 2 * WIDTH + part * WIDTH + column] = code;
    }
};

// The codes of four steps are a line: two 16-bit units for each column. Steps 0 and 1 have the lower halves of a unit's
// bytes, steps 2 and 3 the upper halves; steps 0 and 2 have the upper byte. A lookup each gives the upper and the lower
// byte of a bfloat16. It is indexed by six bits of each byte: without zeros by the code and two others, which count for
// nothing, with zeros by the code - zero + 16.
template <CodeKind KIND>
struct FourBitDecoder {
    static constexpr bool ZEROS = KIND == INT4_ZEROS;
    __m512i offset, upper = uppers, lower = lowers;  // offset: 16 - zero

    static int number(int index) {
        if (KIND == E2M1) return DOUBLED_E2M1[index % 16];
        return ZEROS ? index % 32 - 16 : index % 16 - (KIND == INT4_MINS ? 0 : 8);
    }

    static __m512i table(int shift) {
        alignas(LINE) uint8_t bytes[LINE];
        for (int n = 0; n < LINE; n++) bytes[n] = uint8_t(narrow(float(number(n))) >> shift);
        return _mm512_load_si512(bytes);
    }

    inline static const __m512i uppers = table(8), lowers = table(0);

    void use_zeros(const uint8_t* at) {
        if (!ZEROS) return;
        __m512i lanes = _mm512_cvtepu8_epi32(sixteen_bytes(at));
        __m512i all = _mm512_mullo_epi32(lanes, _mm512_set1_epi32(0x01010101));
        offset = _mm512_sub_epi8(_mm512_set1_epi8(16), all);
    }

    void two(__m512i codes, Columns& first, Columns& second) const {
        if (ZEROS) codes = _mm512_add_epi8(_mm512_and_si512(codes, _mm512_set1_epi8(15)), offset);
        __m512i above = _mm512_permutexvar_epi8(codes, upper);
        __m512i below = _mm512_permutexvar_epi8(_mm512_shldi_epi16(codes, codes, 8), lower);
        first = {_mm512_castsi512_ps(_mm512_ternarylogic_epi32(above, below, _mm512_set1_epi16(0xff), 0xd8))};
        second = {_mm512_castsi512_ps(_mm512_shldi_epi16(above, below, 8))};
    }

    void decode(const uint8_t* at, Columns (&steps)[BLOCK_STEPS]) const {
        __m512i codes = _mm512_loadu_si512(at);
        two(codes, steps[0], steps[1]);
        two(_mm512_srli_epi16(codes, 4), steps[2], steps[3]);
    }

    static void put(uint8_t* block, long step, long part, long column, uint8_t code) {
        block[column * 4 + part * 2 + (step % 2 ? 0 : 1)] |= uint8_t(code << step / 2 * 4);
    }
};

template <>
struct Decoder<BFloat16, INT4> : FourBitDecoder<INT4> {};

template <>
struct Decoder<BFloat16, INT4_ZEROS> : FourBitDecoder<INT4_ZEROS> {};

template <>
struct Decoder<BFloat16, INT4_MINS> : FourBitDecoder<INT4_MINS> {};

template <>
struct Decoder<BFloat16, E2M1> : FourBitDecoder<E2M1> {};

#endif

// What `pack_codes` packs: codes [outputs, inner], scales, zeros and minima [groups, outputs]; the last two may be null.
struct Codes {
    const uint8_t* codes;
    const float* scales;
    const uint8_t* zeros;
    const float* mins;
};

inline void check(const Codes& from, const CodesHeader& header) {
    check_address("codes", from.codes);
    check_address("scales", from.scales);
    require(bool(from.zeros) == bool(header.has_zeros), "zeros", "an address if the header has them", header.has_zeros);
    require(bool(from.mins) == bool(header.has_mins), "minima", "an address if the header has them", header.has_mins);
}

inline void put_scale(uint8_t* at, long column, float scale, bool half) {
    if (!half) return void(std::memcpy(at + column * 4, &scale, 4));
    __m128i word = _mm_cvtps_ph(_mm_set_ss(scale), 0);
    uint16_t bits = uint16_t(_mm_cvtsi128_si32(word));
    std::memcpy(at + column * 2, &bits, 2);
}

// Packs a bundle at `to`, which holds zeros.
template <class T, CodeKind KIND>
void pack_bundle(const Codes& from, const CodesHeader& header, const CodesShape<T>& shape, long bundle, uint8_t* to) {
    long group = shape.is_whole ? header.inner : header.group;
    for (long column = 0; column < BUNDLE * WIDTH; column++) {
        long output = bundle * BUNDLE * WIDTH + column;
        uint8_t* panel = to + shape.blocks_at + column / WIDTH * shape.panel_bytes;
        for (long g = 0; g < shape.groups; g++) {
            uint8_t* at = to + g * shape.group_bytes;
            put_scale(at, column, from.scales[g * header.outputs + output], shape.half_scales);
            if (from.zeros) at[shape.zeros_at + column] = from.zeros[g * header.outputs + output];
            if (from.mins) put_scale(at + shape.mins_at, column, from.mins[g * header.outputs + output], false);
            const uint8_t* codes = from.codes + output * header.inner + g * group;
            for (long i = 0, count = std::min(group, header.inner - g * group); i < count; i++) {
                long k = i / T::KS;
                uint8_t* block = panel + g * shape.group_bytes + k / BLOCK_STEPS * shape.block_bytes;
                Decoder<T, KIND>::put(block, k % BLOCK_STEPS, i % T::KS, column % WIDTH, codes[i]);
            }
        }
    }
}

// Returns the packed bytes. Writes them to `to` unless it is null: zeros, line-aligned.
template <class T>
long pack_codes(const Codes& from, const CodesHeader& header, void* to) {
    CodesShape<T> shape(header);
    if (to) {
        std::memcpy(to, &header, sizeof header);
        auto pack = header.kind == INT8 ? pack_bundle<T, INT8>
                    : header.kind == FP8 ? pack_bundle<T, FP8> : pack_bundle<T, INT4>;  // E2M1 is packed as INT4 is
        #pragma omp parallel for schedule(static)
        for (long b = 0; b < header.outputs / (BUNDLE * WIDTH); b++)
            pack(from, header, shape, b, static_cast<uint8_t*>(to) + LINE + b * shape.bundle_bytes);
    }
    return shape.bytes(header.outputs);
}

}  // namespace decant
