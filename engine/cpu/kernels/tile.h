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

// Rows from which on memory is told what comes next. Where there are fewer, a core waits for memory alone and has its next
// loads under way by itself.
constexpr long TOLD = 4;

// Chains in registers: they go on from the sums in `out` if they have begun, and leave theirs there.
template <int ROWS, int PANELS>
struct Chains {
    Columns of[ROWS][PANELS];

    __attribute__((always_inline)) Chains(const float* out, long stride, bool begun) {
        each([=](int r, int p, Columns& chain) __attribute__((always_inline)) {
            chain = begun ? Columns::read(out + r * stride + p * WIDTH) : Columns::noughts();
        });
    }

    __attribute__((always_inline)) void write(float* out, long stride) {
        each([=](int r, int p, Columns& chain) __attribute__((always_inline)) { chain.write(out + r * stride + p * WIDTH); });
    }

    template <class F>
    __attribute__((always_inline)) void each(const F& f) {
        #pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++)
            #pragma GCC unroll 16
            for (int p = 0; p < PANELS; p++) f(r, p, of[r][p]);
    }
};

// Where a step of some panels lies: the first's, and how many words from one to the next.
template <class T>
struct Place {
    const typename T::Word* at;
    long apart;
};

// ROWS rows through PANELS panels for `count` of the `inner` steps. With `begun` chains go on from the sums in `out`. As many
// bytes as are read are called for at `next`.
template <class T, int ROWS, int PANELS, Ahead AHEAD>
inline void tile(const typename T::Factor* x, long inner, long count, Place<T> panels, float* out, long stride, bool begun,
                 Place<T> next) {
    Chains<ROWS, PANELS> chains(out, stride, begun);
    for (long k = 0; k < count; k++) {
        Columns factors[PANELS];
        #pragma GCC unroll 16
        for (int p = 0; p < PANELS; p++) {
            if (AHEAD >> p & 1)
                _mm_prefetch(reinterpret_cast<const char*>(next.at + p * next.apart + k * T::STEP), _MM_HINT_T1);
            factors[p] = T::load(panels.at + p * panels.apart + k * T::STEP);
        }
        chains.each([&](int r, int p, Columns& chain) __attribute__((always_inline)) {
            chain.add(take(x + r * inner + k), factors[p]);
        });
    }
    chains.write(out, stride);
}

// A group of rows through PANELS panels. Of several groups each has at least half of the rows that fit.
template <class T, int PANELS, Ahead AHEAD, int ROWS = GROUP>
inline void group(const typename T::Factor* x, long rows, long inner, long count, Place<T> panels, float* out, long stride,
                  bool begun, Place<T> next) {
    if constexpr (ROWS > (PANELS == 1 ? 1 : GROUP / 2))
        if (rows < ROWS)
            return group<T, PANELS, AHEAD, ROWS - 1>(x, rows, inner, count, panels, out, stride, begun, next);
    tile<T, ROWS, PANELS, AHEAD>(x, inner, count, panels, out, stride, begun, next);
}

// What a group of rows goes through PANELS panels by, with `left` groups to go: the last ones call for the next piece.
template <class T, int PANELS>
inline auto ahead(long left) {
    return left > PANELS ? group<T, PANELS, NONE> : left == PANELS ? group<T, PANELS, ONE> : group<T, PANELS, OTHER>;
}

// All rows through PANELS panels: a piece of them stays in a cache while all rows pass by, in groups that are as equal as
// can be. While the last ones do, memory brings the next piece, be it that of the next panels.
template <class T, int PANELS>
inline void pass(const typename T::Factor* x, long rows, long inner, const typename T::Word* panels, float* out,
                 long stride, bool begun) {
    static_assert(PANELS <= 2);
    long groups = (rows + GROUP - 1) / GROUP;
    for (long k = 0; k < inner; k += PIECE) {
        long count = std::min(PIECE, inner - k);
        const auto* next = k + PIECE < inner ? panels + (k + PIECE) * T::STEP : panels + PANELS * inner * T::STEP;
        Place<T> here{panels + k * T::STEP, inner * T::STEP}, there{next, inner * T::STEP};
        for (long g = 0; g < groups; g++) {
            long first = rows * g / groups, some = rows * (g + 1) / groups - first, left = groups - g;
            auto through = rows < TOLD ? group<T, PANELS, NONE> : ahead<T, PANELS>(left);
            through(x + first * inner + k, some, inner, count, here, out + first * stride, stride, begun || k > 0, there);
        }
    }
}

// x [rows, inner] times `count` panels -> out [rows, count * WIDTH], rows `stride` apart; `inner` in steps. With `begun` it
// is added to `out`. Where memory sets the pace, panels go one by one, in the order in which they lie.
template <class T>
inline void multiply(const typename T::Factor* x, long rows, long inner, const typename T::Word* panels, long count,
                     float* out, long stride, bool begun = false) {
    long p = 0;
    if (rows > GROUP)
        for (; p + GROUP_PANELS <= count; p += GROUP_PANELS)
            pass<T, GROUP_PANELS>(x, rows, inner, panels + p * inner * T::STEP, out + p * WIDTH, stride, begun);
    for (; p < count; p++) pass<T, 1>(x, rows, inner, panels + p * inner * T::STEP, out + p * WIDTH, stride, begun);
}

}  // namespace decant
