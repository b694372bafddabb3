// The packed weight of a linear layer, and rows times some of its panels.
//
// Panels (panel_types.h) are stored one after the other. For CPUs that multiply bfloat16, most numbers take twelve
// bits. The upper byte of a bfloat16 is a sign and seven of the eight exponent bits. Neighbours in a weight have
// similar sizes: eight consecutive exponents, of 128, cover all 512 numbers of nearly every block. So a four-bit code
// replaces the upper byte, and the lower byte is stored. No bit is lost: a block with other exponents is stored plain.
//
//     weight   | offset of each panel, and end of the last one, in cache lines | panel | panel | ...   aligned to lines
//     panel    | a byte for each block: its lowest exponent, or PLAIN | block | block | ...
//     block    BLOCK steps of sixteen words. PLAIN: the words. Else, for each four steps:
//                | codes of the upper bytes of all four | lower bytes of steps 0 and 1 | lower bytes of steps 2 and 3 |
//              The 16-bit units of a line are in the order of a step. A unit of lower bytes has the even step in its
//              lower byte and the odd step in its upper byte. A unit of codes has steps 0 and 2 in its upper byte,
//              steps 1 and 3 in its lower byte; steps 0 and 1 have the lower half of a byte.
#pragma once

#include <algorithm>
#include <vector>

#include "guard.h"
#include "gemm_bf16.h"

namespace decant {

inline void check_packed(const char* field, const void* address) {
    check_address(field, address);
    require(reinterpret_cast<uintptr_t>(address) % LINE == 0, field, "an address at a multiple of 64",
            int64_t(address));
}

// Arguments of `pack`; `to` may be null.
inline void check_pack(const void* weight, int64_t outputs, int64_t inner, const void* to) {
    require(outputs >= WIDTH && outputs % WIDTH == 0, "outputs", "a multiple of 16", outputs);
    check_positive("inner", inner);
    check_address("weight", weight);
    if (to) check_packed("packed", to);
}

// Interleaves sixteen rows of a weight [16, inner] into a panel of zeros.
template <class T>
void interleave_panel(const typename T::Element* weight, long inner, typename T::Word* panel) {
    for (long k = 0; k < inner; k++)
        for (long column = 0; column < WIDTH; column++) T::put(panel, k, column, weight[column * inner + k]);
}

template <class T>
class Weight {
    using Word = typename T::Word;

public:
    explicit Weight(const void* at) : panels(static_cast<const Word*>(at)) {}

    // x [rows, length] times `count` panels -> out, rows `stride` apart.
    void multiply(const typename T::Factor* x, long rows, long length, long panel, long count, float* out,
                  long stride) const {
        decant::multiply<T>(x, rows, length, panels + panel * length * T::STEP, count, out, stride);
    }

    // Returns the packed bytes of a weight [outputs, inner]. Writes them to `to` unless it is null: zeros, line-
    // aligned.
    static long pack(const typename T::Element* weight, long outputs, long inner, void* to) {
        long panel = steps<T>(inner) * T::STEP;
        for (long n = 0; to && n < outputs / WIDTH; n++)
            interleave_panel<T>(weight + n * WIDTH * inner, inner, static_cast<Word*>(to) + n * panel);
        return outputs / WIDTH * panel * long(sizeof(Word));
    }

private:
    const Word* panels;
};

#ifdef __AVX512BF16__

// Encodes four steps of words into three cache lines.
inline void squeeze(const uint32_t* words, int lowest, char* to) {
    __m512i steps[4], codes[4];
    for (int s = 0; s < 4; s++) {
        steps[s] = _mm512_loadu_si512(words + s * WIDTH);
        __m512i exponents = _mm512_and_si512(_mm512_srli_epi16(steps[s], 8), _mm512_set1_epi16(0x7f));
        __m512i signs = _mm512_and_si512(_mm512_srli_epi16(steps[s], 12), _mm512_set1_epi16(8));
        codes[s] = _mm512_or_si512(signs, _mm512_sub_epi16(exponents, _mm512_set1_epi16(short(lowest))));
    }
    auto line = [=](int n, __m512i one, __m512i other) {
        _mm512_store_si512(to + n * LINE, _mm512_or_si512(one, other));
    };
    auto two = [](__m512i first, __m512i second) { return _mm512_or_si512(_mm512_slli_epi16(first, 8), second); };
    line(0, two(codes[0], codes[1]), _mm512_slli_epi16(two(codes[2], codes[3]), 4));
    for (int n = 0; n < 2; n++)
        line(1 + n, _mm512_and_si512(steps[2 * n], _mm512_set1_epi16(0xff)), _mm512_slli_epi16(steps[2 * n + 1], 8));
}

// The lowest exponent of a block if all others are less than eight above it, else PLAIN.
inline uint8_t lowest_exponent(const uint32_t* words) {
    int least = 127, most = 0;
    for (long n = 0; n < BLOCK * WIDTH; n++)
        for (int shift : {8, 24}) {
            int exponent = words[n] >> shift & 0x7f;
            least = std::min(least, exponent), most = std::max(most, exponent);
        }
    return most - least < 8 ? uint8_t(least) : PLAIN;
}

inline long whole_lines(long bytes) { return (bytes + LINE - 1) / LINE * LINE; }

// Encodes a panel of `length` steps to `to` unless that is null. Returns its bytes.
inline long pack_panel(const uint32_t* words, long length, char* to) {
    long end = whole_lines(blocks(length));
    for (long b = 0; b < blocks(length); b++, words += BLOCK * WIDTH) {
        long count = std::min(BLOCK, length - b * BLOCK);
        uint8_t lowest = count == BLOCK ? lowest_exponent(words) : PLAIN;
        long needed = lowest == PLAIN ? count * LINE : BLOCK / 4 * FOUR;
        if (to) {
            to[b] = char(lowest);
            if (lowest == PLAIN) std::memcpy(to + end, words, needed);
            else for (long s = 0; s < BLOCK; s += 4) squeeze(words + s * WIDTH, lowest, to + end + s / 4 * FOUR);
        }
        end += needed;
    }
    return end;
}

template <>
class Weight<BFloat16> {
public:
    explicit Weight(const void* at) : start(static_cast<const char*>(at)), lines(static_cast<const uint32_t*>(at)) {}

    // Few rows are bound by memory: they read panels one by one, in order.
    void multiply(const uint32_t* x, long rows, long length, long panel, long count, float* out,
                  long stride) const {
        long p = 0;
        if (rows > GROUP / 2)
            for (; p + GROUP_PANELS <= count; p += GROUP_PANELS)
                pass<GROUP_PANELS>(x, rows, length, panel + p, out + p * WIDTH, stride);
        for (; p < count; p++) pass<1>(x, rows, length, panel + p, out + p * WIDTH, stride);
    }

    static long pack(const uint16_t* weight, long outputs, long inner, void* to) {
        long panels = outputs / WIDTH, length = steps<BFloat16>(inner);
        long end = whole_lines((panels + 1) * sizeof(uint32_t));
        std::vector<uint32_t> plain(length * WIDTH);
        for (long p = 0; p < panels; p++) {
            if (to) static_cast<uint32_t*>(to)[p] = uint32_t(end / LINE);
            std::fill(plain.begin(), plain.end(), 0);
            interleave_panel<BFloat16>(weight + p * WIDTH * inner, inner, plain.data());
            end += pack_panel(plain.data(), length, to ? static_cast<char*>(to) + end : nullptr);
        }
        if (to) static_cast<uint32_t*>(to)[panels] = uint32_t(end / LINE);
        return end;
    }

private:
    const char* start;
    const uint32_t* lines;

    const char* begin(long panel) const { return start + lines[panel] * LINE; }

    // The first group of rows decodes panels while it multiplies. If there are more groups, it stores a decoded piece
    // in a cache for them, and they prefetch the next piece.
    template <int PANELS>
    void pass(const uint32_t* x, long rows, long length, long panel, float* out, long stride) const {
        static thread_local std::vector<uint32_t> memory(GROUP_PANELS * PIECE * WIDTH + LINE / sizeof(uint32_t));
        uint32_t* kept = at_line(memory.data());
        PanelCursor from[PANELS];
        for (int p = 0; p < PANELS; p++) {
            const char* at = begin(panel + p);
            from[p] = {reinterpret_cast<const uint8_t*>(at), at + whole_lines(blocks(length))};
        }
        const char *after = begin(panel + PANELS), *last = begin(panel + PANELS - 1);
        long distance = (last - begin(panel)) / long(sizeof(uint32_t)), groups = (rows + GROUP - 1) / GROUP;
        if (groups == 1) {
            auto multiply_group = rows < PREFETCH_ROWS_BF16 ? stream_group<PANELS, false, NONE>
                                                            : stream_group<PANELS, false, BOTH>;
            return multiply_group(x, rows, length, length, from, out, stride, false, nullptr, after);
        }
        auto first = groups > 2 ? stream_group<PANELS, true, NONE> : stream_group<PANELS, true, ONE>;
        for (long k = 0; k < length; k += PIECE) {
            long count = std::min(PIECE, length - k);
            const char* next = k + PIECE < length ? from[0].at + count / 4 * FOUR : after;
            first(x + k, rows / groups, length, count, from, out, stride, k > 0, kept, next);
            PanelStep<BFloat16> here{kept, PIECE * WIDTH}, there{reinterpret_cast<const uint32_t*>(next), distance};
            for (long g = 1; g < groups; g++) {
                long row = rows * g / groups, some = rows * (g + 1) / groups - row;
                auto multiply_group = group_function<BFloat16, PANELS>(groups - g);
                multiply_group(x + row * length + k, some, length, count, here, out + row * stride, stride, k > 0,
                               there);
            }
        }
    }
};

#endif

}  // namespace decant
