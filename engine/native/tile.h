// Rows times panels (columns.h): the one loop in which a CPU's time goes, for linear layers and for attention alike.
//
// Every output is one chain over the steps 0, 1, ... of its inner length, whatever the number of rows, or of panels that
// are computed together. So rows do not see each other, and no case has other bits.
#pragma once

#include <algorithm>

#include "columns.h"

namespace decant {

// A panel's steps that stay in a cache while rows go by, and the most rows that a group of rows and panels has. Its chains
// must fit into the registers with their factors, sixteen of eight numbers or thirty-two of sixteen; and the addresses of
// its rows into the sixteen for those: of twelve rows' two would be read from memory at each step.
constexpr long PIECE = WIDE ? 608 : 512;
constexpr long GROUP = WIDE ? 10 : 6, GROUP_PANELS = WIDE ? 2 : 1;

// Of which panels the next piece is called for while others are multiplied.
enum Ahead { NONE, ONE = 1, OTHER = 2, BOTH = 3 };

// ROWS rows through PANELS panels for `count` of the `inner` steps. With `begun` chains go on from the sums in `out`. What
// is called for meanwhile lies at `next` as these factors do at `panels`.
template <class T, int ROWS, int PANELS, Ahead AHEAD = NONE>
inline void tile(const typename T::Factor* x, long inner, long count, const typename T::Word* panels, float* out,
                 long stride, bool begun, const typename T::Word* next = nullptr) {
    Columns chains[ROWS][PANELS];
    #pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
        #pragma GCC unroll 16
        for (int p = 0; p < PANELS; p++)
            chains[r][p] = begun ? Columns::read(out + r * stride + p * WIDTH) : Columns::noughts();
    for (long k = 0; k < count; k++) {
        Columns factors[PANELS];
        #pragma GCC unroll 16
        for (int p = 0; p < PANELS; p++) {
            long at = (p * inner + k) * T::STEP;
            if (AHEAD >> p & 1) _mm_prefetch(reinterpret_cast<const char*>(next + at), _MM_HINT_T1);
            factors[p] = T::load(panels + at);
        }
        #pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++)
            #pragma GCC unroll 16
            for (int p = 0; p < PANELS; p++) chains[r][p].add(take(x + r * inner + k), factors[p]);
    }
    #pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
        #pragma GCC unroll 16
        for (int p = 0; p < PANELS; p++) chains[r][p].write(out + r * stride + p * WIDTH);
}

// A few rows, PANELS panels at a time: all of it is read once.
template <class T, int ROWS, int PANELS>
inline void few(const typename T::Factor* x, long inner, const typename T::Word* panels, long count, float* out,
                long stride, bool begun) {
    long p = 0, together = count / PANELS * PANELS;
    for (; p < together; p += PANELS)
        tile<T, ROWS, PANELS>(x, inner, inner, panels + p * inner * T::STEP, out + p * WIDTH, stride, begun);
    for (; p < count; p++)
        tile<T, ROWS, 1>(x, inner, inner, panels + p * inner * T::STEP, out + p * WIDTH, stride, begun);
}

// A group of rows, by PANELS panels.
template <class T, int PANELS, Ahead AHEAD, int ROWS = GROUP>
inline void group(const typename T::Factor* x, long rows, long inner, long count, const typename T::Word* factors,
                  float* out, long stride, bool begun, const typename T::Word* next) {
    if constexpr (ROWS > GROUP / 2)
        if (rows < ROWS)
            return group<T, PANELS, AHEAD, ROWS - 1>(x, rows, inner, count, factors, out, stride, begun, next);
    tile<T, ROWS, PANELS, AHEAD>(x, inner, count, factors, out, stride, begun, next);
}

// Many rows, by PANELS panels: a piece of them stays in a cache while all rows pass by, in groups that are
// as equal as can be. While the last ones do, a panel each, memory brings the next piece, be it that of the next panels.
template <class T, int PANELS>
inline void many(const typename T::Factor* x, long rows, long inner, const typename T::Word* panels, float* out,
                 long stride, bool begun) {
    static_assert(PANELS <= 2);
    long groups = (rows + GROUP - 1) / GROUP;
    for (long k = 0; k < inner; k += PIECE) {
        long count = std::min(PIECE, inner - k);
        const auto* next = k + PIECE < inner ? panels + (k + PIECE) * T::STEP : panels + PANELS * inner * T::STEP;
        for (long g = 0; g < groups; g++) {
            long first = rows * g / groups, some = rows * (g + 1) / groups - first, left = groups - g;
            auto pass = left > PANELS      ? group<T, PANELS, NONE>
                        : groups < PANELS  ? group<T, PANELS, BOTH>
                        : left == PANELS   ? group<T, PANELS, ONE>
                                           : group<T, PANELS, OTHER>;
            pass(x + first * inner + k, some, inner, count, panels + k * T::STEP, out + first * stride, stride,
                 begun || k > 0, next);
        }
    }
}

// x [rows, inner] times `count` panels -> out [rows, count * WIDTH], rows `stride` apart; `inner` in steps. The fewer
// rows, the more panels at once: as many chains as hide the latency of a multiplication. With `begun` it is added to `out`.
template <class T>
inline void multiply(const typename T::Factor* x, long rows, long inner, const typename T::Word* panels, long count,
                     float* out, long stride, bool begun = false) {
    switch (rows) {
        case 1: return few<T, 1, 4>(x, inner, panels, count, out, stride, begun);
        case 2: return few<T, 2, WIDE ? 4 : 2>(x, inner, panels, count, out, stride, begun);
        case 3: return few<T, 3, WIDE ? 4 : 2>(x, inner, panels, count, out, stride, begun);
    }
    if constexpr (WIDE) switch (rows) {
        case 4: return few<T, 4, 4>(x, inner, panels, count, out, stride, begun);
        case 5: return few<T, 5, 4>(x, inner, panels, count, out, stride, begun);
        case 6: return few<T, 6, 4>(x, inner, panels, count, out, stride, begun);
    }
    long p = 0;
    for (; p + GROUP_PANELS <= count; p += GROUP_PANELS)
        many<T, GROUP_PANELS>(x, rows, inner, panels + p * inner * T::STEP, out + p * WIDTH, stride, begun);
    for (; p < count; p++) many<T, 1>(x, rows, inner, panels + p * inner * T::STEP, out + p * WIDTH, stride, begun);
}

}  // namespace decant
