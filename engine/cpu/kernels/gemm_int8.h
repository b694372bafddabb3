// Rounded rows (int8_rows.h) times weights of integer codes (codes.h), packed in steps of bytes.
//
// The sums of a group are exact, in any order. They are made float32, multiplied with the weight's scale and added to
// those of the groups before; if the weight has minima, each times the sum of the row's codes is subtracted. In the end
// the row's scale is multiplied. Each is an operation of IEEE float32 of its own, so the bits are the same in each build.
#pragma once

#include <vector>

#include "gemm_codes.h"
#include "int8_rows.h"

namespace decant {

// Rows and panels multiplied together: their sums and a step of each panel fit into the vector registers.
constexpr int TILE_ROWS = WIDE ? 6 : 5, TILE_PANELS = WIDE ? BUNDLE : 1;

// A tile of AVX2 is so small that its calls would take a tenth of the time. One of AVX-512 would lose registers inline.
#ifdef __AVX512BF16__
#define DECANT_INLINE_TILE
#else
#define DECANT_INLINE_TILE __attribute__((always_inline)) inline
#endif

// Steps of all columns of a bundle. int8: number + 128. Four bits: steps 0 and 2 of a block have the lower halves of its
// bytes, steps 1 and 3 the upper ones.
template <CodeKind KIND>
struct Decoder<Int8, KIND> {
    static void put(uint8_t* block, long step, long part, long column, uint8_t code) {
        long at = column * Int8::KS + part;
        if (has_four_bits(KIND)) block[step / 2 * STEP_BYTES + at] |= uint8_t(code << step % 2 * 4);
        else block[step * STEP_BYTES + at] = code ^ 128;
    }
};

// What was added to each number, so that it is an unsigned byte.
inline int32_t offset_of(const CodesHeader& header) {
    return header.kind == INT8 ? 128 : header.kind == E2M1 ? E2M1_OFFSET : header.has_zeros ? 16 : header.has_mins ? 0 : 8;
}

inline void check_int8(const CodesHeader& header) {
    require(header.kind != FP8, "code", "int8, int4 or e2m1, for rows in int8", header.kind);
    require(std::min(header.group, header.inner) <= MOST_INNER, "group", "at most 131,072 inputs, for rows in int8",
            std::min(header.group, header.inner));
}

// The steps of one group of a bundle, from a panel on: of INT8 (also those of a decoded group), INT4 or E2M1.
template <CodeKind KIND>
struct GroupSteps {
    const uint8_t* at;  // the first block
    long count, block_bytes, panel_bytes;
    const uint8_t* zeros;  // of the panels; null without

    GroupSteps panel(long p) const {
        return {at + p * panel_bytes, count, block_bytes, panel_bytes, zeros ? zeros + p * WIDTH : nullptr};
    }

    // What `decode` needs of this panel.
    RawBytes operand() const {
        if constexpr (KIND == E2M1) return RawBytes::of_e2m1();
        return zeros ? RawBytes::of_zeros(zeros) : RawBytes{};
    }

    // The unsigned bytes of codes, one in each byte.
    static RawBytes decode(const RawBytes& codes, const RawBytes& operand) {
        return KIND == E2M1 ? operand.at(codes) : codes.plus(operand);
    }
};

// Calls `step(k, bytes)` for each step, with a step of each of PANELS panels.
template <CodeKind KIND, int PANELS, class F>
__attribute__((always_inline)) inline void each_step(const GroupSteps<KIND>& group, bool prefetch, const F& step) {
    constexpr bool FOUR_BITS = has_four_bits(KIND);
    RawBytes operands[PANELS];
    for (int p = 0; p < PANELS; p++) operands[p] = group.panel(p).operand();
    constexpr int EACH = FOUR_BITS ? 2 : 1;  // steps that lie in the same bytes
    const uint8_t* block = group.at;
    for (long k = 0; k < group.count; k += BLOCK_STEPS, block += group.block_bytes)
        #pragma GCC unroll 4
        for (int s = 0; s < BLOCK_STEPS; s += EACH) {
            if (k + s >= group.count) break;
            Bytes bytes[2][PANELS];
            #pragma GCC unroll 4
            for (int p = 0; p < PANELS; p++) {
                const uint8_t* at = block + p * group.panel_bytes + s / EACH * STEP_BYTES;
                if (prefetch) _mm_prefetch(reinterpret_cast<const char*>(at + CODES_AHEAD), _MM_HINT_T0);
                if constexpr (FOUR_BITS) {
                    RawBytes raw = RawBytes::read(at);
                    bytes[0][p] = group.decode(raw.lower(), operands[p]).bytes();
                    bytes[1][p] = group.decode(raw.upper(), operands[p]).bytes();
                } else bytes[0][p] = Bytes::read(at);
            }
            step(k + s, bytes[0]);
            if (FOUR_BITS && k + s + 1 < group.count) step(k + s + 1, bytes[1]);
        }
}

// Scales and minima of a group's panels, and what a row's sums begin with: `offset` times the sum of its codes, negative.
struct GroupScales {
    const uint8_t* scales;
    bool half;
    const float* mins;  // null without
    long g, groups;
    int32_t offset;

    Columns scale(long p) const { return read_scales(scales + p * WIDTH * (half ? 2 : 4), half); }
    GroupScales panel(long p) const {
        return {scales + p * WIDTH * (half ? 2 : 4), half, mins ? mins + p * WIDTH : nullptr, g, groups, offset};
    }
};

// Adds one group's products of ROWS rows and PANELS panels to `out`; after the last group, times the rows' scales.
template <CodeKind KIND, int ROWS, int PANELS>
DECANT_INLINE_TILE
void multiply_group(const Int8Rows& x, long first_step, const GroupSteps<KIND>& group, const GroupScales& by,
                    bool prefetch, float* out, long stride) {
    IntColumns sums[ROWS][PANELS];
    #pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
        #pragma GCC unroll 4
        for (int p = 0; p < PANELS; p++) sums[r][p] = IntColumns::of(int32_t(-uint32_t(by.offset) * uint32_t(x.sum(r, by.g))));
    each_step<KIND, PANELS>(group, prefetch, [&](long k, const Bytes* bytes) __attribute__((always_inline)) {
        #pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++)
            #pragma GCC unroll 4
            for (int p = 0; p < PANELS; p++) sums[r][p].add(*x.codes(r, first_step + k), bytes[p]);
    });
    #pragma GCC unroll 4
    for (int p = 0; p < PANELS; p++) {
        Columns scale = by.scale(p);
        #pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            float* at = out + r * stride + p * WIDTH;
            Columns total = product(sums[r][p].numbers(), scale);
            if (by.g) total = sum(Columns::read(at), total);
            if (by.mins)
                total = difference(total, product(all_of(float(x.sum(r, by.g))), Columns::read(by.mins + p * WIDTH)));
            if (by.g + 1 == by.groups) total = product(total, all_of(x.scale(r)));
            total.write(at);
        }
    }
}

template <CodeKind KIND, int PANELS, int ROWS = TILE_ROWS>
DECANT_INLINE_TILE
void multiply_rows(const Int8Rows& x, long rows, long first_step, const GroupSteps<KIND>& group, const GroupScales& by,
                   bool prefetch, float* out, long stride) {
    if constexpr (ROWS > 1)
        if (rows < ROWS)
            return multiply_rows<KIND, PANELS, ROWS - 1>(x, rows, first_step, group, by, prefetch, out, stride);
    multiply_group<KIND, ROWS, PANELS>(x, first_step, group, by, prefetch, out, stride);
}

// All rows times one group of a bundle, in tiles of nearly equal size.
template <CodeKind KIND>
DECANT_INLINE_TILE
void multiply_tiles(const Int8Rows& x, long rows, long first_step, const GroupSteps<KIND>& group, const GroupScales& by,
                    float* out, long stride) {
    long tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    for (long p = 0; p < BUNDLE; p += TILE_PANELS)
        for (long n = 0; n < tiles; n++) {
            long row = rows * n / tiles, some = rows * (n + 1) / tiles - row;
            multiply_rows<KIND, TILE_PANELS>(x.from(row), some, first_step, group.panel(p), by.panel(p), n == 0,
                                             out + row * stride + p * WIDTH, stride);
        }
}

// Decodes a group of four bits to blocks of bytes.
template <CodeKind KIND>
GroupSteps<INT8> decode_group(const GroupSteps<KIND>& group) {
    constexpr long PANEL_BYTES = BLOCK_STEPS * STEP_BYTES, BLOCK_BYTES = BUNDLE * PANEL_BYTES;
    static thread_local std::vector<uint8_t> memory;
    size_t needed = (group.count + BLOCK_STEPS - 1) / BLOCK_STEPS * BLOCK_BYTES + LINE;
    if (memory.size() < needed) memory.resize(needed);
    uint8_t* to = at_line(memory.data());
    for (long p = 0; p < BUNDLE; p++) {
        GroupSteps<KIND> panel = group.panel(p);
        RawBytes operand = panel.operand();
        for (long k = 0; k < group.count; k += 2) {
            RawBytes raw = RawBytes::read(panel.at + k / BLOCK_STEPS * panel.block_bytes + k % BLOCK_STEPS / 2 * STEP_BYTES);
            uint8_t* step = to + k / BLOCK_STEPS * BLOCK_BYTES + p * PANEL_BYTES + k % BLOCK_STEPS * STEP_BYTES;
            panel.decode(raw.lower(), operand).write(step), panel.decode(raw.upper(), operand).write(step + STEP_BYTES);
        }
    }
    return {to, group.count, BLOCK_BYTES, PANEL_BYTES, nullptr};
}

// A weight of integer codes for rounded rows, with the interface of Weight (weight.h), a bundle at a time.
class Int8Weight {
public:
    explicit Int8Weight(const void* at) : start(static_cast<const uint8_t*>(at)) {}

    const CodesHeader& header() const { return *reinterpret_cast<const CodesHeader*>(start); }
    RowShape rows() const { return {header().inner, header().group}; }

    // x: `rows` rounded rows; out: rows `stride` apart. `panel` and `count` are multiples of BUNDLE.
    void multiply(const RowWord* x, long rows, long panel, long count, float* out, long stride) const {
        CodesShape<Int8> shape(header());
        RowShape row_shape = this->rows();
        auto bundle = header().kind == INT8 ? &Int8Weight::multiply_bundle<INT8>
                      : header().kind == E2M1 ? &Int8Weight::multiply_bundle<E2M1> : &Int8Weight::multiply_bundle<INT4>;
        for (long end = panel + count; panel < end; panel += BUNDLE, out += BUNDLE * WIDTH)
            (this->*bundle)(shape, start + LINE + panel / BUNDLE * shape.bundle_bytes, {x, row_shape}, rows, out, stride);
    }

private:
    const uint8_t* start;

    template <CodeKind KIND>
    void multiply_bundle(const CodesShape<Int8>& shape, const uint8_t* group, const Int8Rows& x, long rows, float* out,
                         long stride) const {
        for (long g = 0; g < shape.groups; g++, group += shape.group_bytes) {
            long first = g * shape.group, count = std::min(shape.group, shape.length - first);
            const uint8_t* zeros = shape.has_zeros ? group + shape.zeros_at : nullptr;
            const float* mins = shape.has_mins ? reinterpret_cast<const float*>(group + shape.mins_at) : nullptr;
            GroupScales by{group, shape.half_scales, mins, g, shape.groups, offset_of(header())};
            GroupSteps<KIND> steps{group + shape.blocks_at, count, shape.block_bytes, shape.panel_bytes, zeros};
            if (has_four_bits(KIND) && rows > TILE_ROWS)
                multiply_tiles(x, rows, first, decode_group(steps), by, out, stride);
            else multiply_tiles(x, rows, first, steps, by, out, stride);
        }
    }
};

}  // namespace decant
