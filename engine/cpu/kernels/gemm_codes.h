// Rows times weights of codes (codes.h). Few rows decode in registers; for more, a decoded piece stays in a cache.
#pragma once

#include <vector>

#include "codes.h"

namespace decant {

// Bytes ahead of the block that is decoded.
constexpr long CODES_AHEAD = 2048;

// What the chains of a group are multiplied with, and what is subtracted: the panels' minima, each times the sum of the
// row's numbers, whose sums are `stride` apart; null without minima.
template <int PANELS>
struct Scales {
    Columns of[PANELS];
    const float *mins, *sums;
    long stride;
};

// Adds chains, each times its panel's scale, to `out`; with `first` to zeros.
template <int ROWS, int PANELS>
__attribute__((always_inline)) inline void add_scaled(Chains<ROWS, PANELS>& chains, const Scales<PANELS>& scales,
                                                      float* out, long stride, bool first) {
    chains.each([&](int r, int p, Columns& chain) __attribute__((always_inline)) {
        float* at = out + r * stride + p * WIDTH;
        Columns total = first ? Columns::zeros() : Columns::read(at);
        total.add(scales.of[p], chain);
        if (scales.sums) total.add(-scales.sums[r * scales.stride], Columns::read(scales.mins + p * WIDTH));
        total.write(at);
    });
}

inline float sum(const Columns& lanes) {
#ifdef __AVX512BF16__
    return _mm512_reduce_add_ps(lanes.all);
#else
    __m256 eight = _mm256_add_ps(lanes.first, lanes.second);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#endif
}

// Sums the factors of `count` steps of a row.
inline float sum_steps(const float* x, long count) {
    Columns lanes = Columns::zeros();
    long k = 0;
    for (; k + WIDTH <= count; k += WIDTH) lanes.add(1.0f, Columns::read(x + k));
    float total = sum(lanes);
    for (; k < count; k++) total += x[k];
    return total;
}

#ifdef __AVX512BF16__
inline float sum_steps(const uint32_t* x, long count) {
    Columns lanes = Columns::zeros(), ones = {_mm512_castsi512_ps(_mm512_set1_epi32(0x3f803f80))};
    long k = 0;
    for (; k + WIDTH <= count; k += WIDTH)
        lanes.all = _mm512_dpbf16_ps(lanes.all, reinterpret_cast<__m512bh>(_mm512_loadu_si512(x + k)),
                                     reinterpret_cast<__m512bh>(ones.all));
    float total = sum(lanes);
    for (; k < count; k++) {
        uint32_t pair = take(x + k);
        total += widen(uint16_t(pair)), total += widen(uint16_t(pair >> 16));
    }
    return total;
}
#endif

// Where the panels of a product lie.
template <class T>
struct CodePanels {
    const CodesShape<T>& shape;
    const uint8_t* bundle;
    long first;         // of the bundle's panels
    const float* sums;  // of the rows' numbers in each group, [rows, groups]; null without minima

    const uint8_t* group(long g) const { return bundle + g * shape.group_bytes; }
    const uint8_t* blocks(long g) const { return group(g) + shape.blocks_at + first * shape.panel_bytes; }

    // The block with the step `k`.
    const uint8_t* block(long k) const {
        return blocks(k / shape.group) + k % shape.group / BLOCK_STEPS * shape.block_bytes;
    }

    CodePanels after(long count) const {
        bool another = first + count >= BUNDLE;
        return {shape, bundle + another * shape.bundle_bytes, another ? 0 : first + count, sums};
    }

    // The scales of a group, for rows from `row` on.
    template <int PANELS>
    Scales<PANELS> scales(long g, long row) const {
        auto mins = reinterpret_cast<const float*>(group(g) + shape.mins_at) + first * WIDTH;
        Scales<PANELS> read{{}, mins, sums ? sums + row * shape.groups + g : nullptr, shape.groups};
        for (int p = 0; p < PANELS; p++)
            read.of[p] = read_scales(group(g) + (first + p) * WIDTH * shape.scale_bytes, shape.half_scales);
        return read;
    }

    template <int PANELS, class D>
    void read_zeros(long g, D (&decoders)[PANELS]) const {
        for (int p = 0; shape.has_zeros && p < PANELS; p++)
            decoders[p].use_zeros(group(g) + shape.zeros_at + (first + p) * WIDTH);
    }
};

// ROWS rows times PANELS panels, which are decoded in registers.
template <class T, CodeKind KIND, int ROWS, int PANELS>
void stream_codes(const typename T::Factor* x, const CodePanels<T>& panels, float* out, long stride) {
    const CodesShape<T>& shape = panels.shape;
    const long length = shape.length, panel_bytes = shape.panel_bytes;
    constexpr int LINES = has_four_bits(KIND) ? 1 : T::KS;  // of a block of a panel
    Decoder<T, KIND> decoders[PANELS];
    for (long g = 0; g < shape.groups; g++) {
        Chains<ROWS, PANELS> chains(nullptr, 0, false);
        panels.read_zeros(g, decoders);
        const uint8_t* at = panels.blocks(g);
        long begin = g * shape.group, end = std::min(length, begin + shape.group);
        auto block = [&](long k, long count) __attribute__((always_inline)) {
            #pragma GCC unroll 4
            for (int p = 0; p < PANELS; p++) {
                Columns factors[BLOCK_STEPS];
                #pragma GCC unroll 2
                for (int line = 0; line < LINES; line++)
                    _mm_prefetch(reinterpret_cast<const char*>(at + p * panel_bytes + line * LINE + CODES_AHEAD),
                                 _MM_HINT_T0);
                decoders[p].decode(at + p * panel_bytes, factors);
                #pragma GCC unroll 4
                for (int s = 0; s < count; s++)
                    #pragma GCC unroll 16
                    for (int r = 0; r < ROWS; r++) chains.of[r][p].add(take(x + r * length + k + s), factors[s]);
            }
            at += shape.block_bytes;
        };
        long k = begin;
        for (; k + BLOCK_STEPS <= end; k += BLOCK_STEPS) block(k, BLOCK_STEPS);
        if (k < end) block(k, end - k);
        add_scaled(chains, panels.template scales<PANELS>(g, 0), out, stride, g == 0);
    }
}

template <class T, CodeKind KIND, int PANELS, int ROWS>
inline void stream_rows(const typename T::Factor* x, long rows, const CodePanels<T>& panels, float* out, long stride) {
    if constexpr (ROWS > 1)
        if (rows < ROWS) return stream_rows<T, KIND, PANELS, ROWS - 1>(x, rows, panels, out, stride);
    stream_codes<T, KIND, ROWS, PANELS>(x, panels, out, stride);
}

// How a tile begins and ends: the sums of a group that spans pieces are in `out` until it ends.
struct TileSums {
    bool carried, ends, first;
};

// Lines of codes that are prefetched while others are multiplied: some for each step, none of later ones.
struct NextCodes {
    const char* at;
    long block_bytes, bytes;  // of a block of all panels, and of those needed

    void prefetch(long k) const {
        long line = k % BLOCK_STEPS * LINE;
        if (line < bytes) _mm_prefetch(at + k / BLOCK_STEPS * block_bytes + line, _MM_HINT_T1);
    }
};

// ROWS rows times `count` decoded steps of PANELS panels, PIECE steps apart.
template <class T, int ROWS, int PANELS, bool PREFETCH>
void multiply_decoded(const typename T::Factor* x, long length, long count, const float* decoded,
                      const Scales<PANELS>& scales, float* out, long stride, TileSums sums, NextCodes next) {
    Chains<ROWS, PANELS> chains(out, stride, sums.carried);
    for (long k = 0; k < count; k++) {
        if (PREFETCH) next.prefetch(k);
        Columns factors[PANELS];
        #pragma GCC unroll 16
        for (int p = 0; p < PANELS; p++) factors[p] = Columns::read(decoded + (p * PIECE + k) * WIDTH);
        chains.each([&](int r, int p, Columns& chain) __attribute__((always_inline)) {
            chain.add(take(x + r * length + k), factors[p]);
        });
    }
    if (sums.ends) add_scaled(chains, scales, out, stride, sums.first);
    else chains.write(out, stride);
}

template <class T, int PANELS, bool PREFETCH, int ROWS = GROUP>
inline void multiply_decoded_rows(const typename T::Factor* x, long rows, long length, long count, const float* decoded,
                                  const Scales<PANELS>& scales, float* out, long stride, TileSums sums,
                                  NextCodes next) {
    if constexpr (ROWS > GROUP / 2)
        if (rows < ROWS)
            return multiply_decoded_rows<T, PANELS, PREFETCH, ROWS - 1>(x, rows, length, count, decoded, scales, out,
                                                                        stride, sums, next);
    multiply_decoded<T, ROWS, PANELS, PREFETCH>(x, length, count, decoded, scales, out, stride, sums, next);
}

// Decodes `count` steps, from a multiple of BLOCK_STEPS on, of a group.
template <class T, CodeKind KIND, int PANELS>
void decode_piece(const CodePanels<T>& panels, long g, long from, long count, float* decoded) {
    Decoder<T, KIND> decoders[PANELS];
    panels.read_zeros(g, decoders);
    const uint8_t* at = panels.blocks(g) + from / BLOCK_STEPS * panels.shape.block_bytes;
    for (long k = 0; k < count; k += BLOCK_STEPS, at += panels.shape.block_bytes)
        for (int p = 0; p < PANELS; p++) {
            Columns factors[BLOCK_STEPS];
            decoders[p].decode(at + p * panels.shape.panel_bytes, factors);
            for (int s = 0; s < BLOCK_STEPS; s++) factors[s].write(decoded + (p * PIECE + k + s) * WIDTH);
        }
}

// More than GROUP rows times PANELS panels.
template <class T, CodeKind KIND, int PANELS>
void pass_codes(const typename T::Factor* x, long rows, const CodePanels<T>& panels, float* out, long stride) {
    static_assert(PIECE % BLOCK_STEPS == 0);
    static thread_local std::vector<float> memory(GROUP_PANELS * PIECE * WIDTH + LINE / sizeof(float));
    float* decoded = at_line(memory.data());
    const CodesShape<T>& shape = panels.shape;
    long groups = (rows + GROUP - 1) / GROUP, piece = shape.is_whole ? PIECE : PIECE / shape.group * shape.group;
    long span = std::min(piece, shape.group);  // steps with the same scales
    for (long k = 0; k < shape.length; k += piece) {
        long count = std::min(piece, shape.length - k);
        for (long at = 0; at < count; at += span)
            decode_piece<T, KIND, PANELS>(panels, (k + at) / shape.group, (k + at) % shape.group,
                                          std::min(span, count - at), decoded + at * WIDTH);
        for (long n = 0; n < groups; n++) {
            long row = rows * n / groups, some = rows * (n + 1) / groups - row;
            for (long at = 0; at < count; at += span) {
                long g = (k + at) / shape.group;
                Scales<PANELS> scales = panels.template scales<PANELS>(g, row);
                TileSums sums{shape.is_whole && k > 0, !shape.is_whole || k + count == shape.length, g == 0};
                bool more = k + piece + at < shape.length;
                const uint8_t* coming = more ? panels.block(k + piece + at) : panels.after(PANELS).block(at);
                NextCodes next{reinterpret_cast<const char*>(coming), shape.block_bytes, PANELS * shape.panel_bytes};
                auto multiply = n + 1 < groups ? multiply_decoded_rows<T, PANELS, false>
                                               : multiply_decoded_rows<T, PANELS, true>;
                multiply(x + row * shape.length + k + at, some, shape.length, std::min(span, count - at),
                         decoded + at * WIDTH, scales, out + row * stride, stride, sums, next);
            }
        }
    }
}

// Sums of the rows' numbers in each group: [rows, groups].
template <class T>
const float* sum_groups(const CodesShape<T>& shape, const typename T::Factor* x, long rows) {
    static thread_local std::vector<float> sums;
    if (sums.size() < size_t(rows * shape.groups)) sums.resize(rows * shape.groups);
    for (long r = 0; r < rows; r++)
        for (long g = 0; g < shape.groups; g++) {
            long begin = g * shape.group, end = std::min(shape.length, begin + shape.group);
            sums[r * shape.groups + g] = sum_steps(x + r * shape.length + begin, end - begin);
        }
    return sums.data();
}

// x [rows, length] times `count` panels -> out, rows `stride` apart. `panel` and `count` are multiples of GROUP_PANELS.
template <class T, CodeKind KIND>
void multiply_codes(const CodesShape<T>& shape, const uint8_t* bundles, const typename T::Factor* x, long rows,
                    long panel, long count, float* out, long stride) {
    const float* sums = shape.has_mins ? sum_groups(shape, x, rows) : nullptr;
    constexpr int FEW = WIDE ? 4 : 1;  // rows whose chains with all panels of a bundle fit into the registers
    for (long end = panel + count; panel < end;) {
        CodePanels<T> panels{shape, bundles + panel / BUNDLE * shape.bundle_bytes, panel % BUNDLE, sums};
        long taken = rows <= FEW && panels.first == 0 && end - panel >= BUNDLE ? BUNDLE : GROUP_PANELS;
        if (taken == BUNDLE) stream_rows<T, KIND, BUNDLE, FEW>(x, rows, panels, out, stride);
        else if (rows <= GROUP) stream_rows<T, KIND, GROUP_PANELS, GROUP>(x, rows, panels, out, stride);
        else pass_codes<T, KIND, GROUP_PANELS>(x, rows, panels, out, stride);
        panel += taken, out += taken * WIDTH;
    }
}

// A weight of codes, with the interface of Weight (weight.h).
template <class T>
class CodedWeight {
public:
    explicit CodedWeight(const void* at) : start(static_cast<const uint8_t*>(at)) {}

    const CodesHeader& header() const { return *reinterpret_cast<const CodesHeader*>(start); }

    void multiply(const typename T::Factor* x, long rows, long panel, long count, float* out, long stride) const {
        auto multiply = header().kind == INT8 ? multiply_codes<T, INT8>
                        : header().kind == FP8 ? multiply_codes<T, FP8>
                        : header().kind == E2M1 ? multiply_codes<T, E2M1>
                        : header().has_zeros ? multiply_codes<T, INT4_ZEROS>
                        : header().has_mins ? multiply_codes<T, INT4_MINS> : multiply_codes<T, INT4>;
        multiply(CodesShape<T>(header()), start + LINE, x, rows, panel, count, out, stride);
    }

private:
    const uint8_t* start;
};

}  // namespace decant
