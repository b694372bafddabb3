// Rows times panels (panel_types.h): the inner loop of linear layers and of attention.
//
// Every output is one chain of multiply-adds over the steps 0, 1, ... of its inner length, for any number of rows and
// panels. So a row's bits do not depend on other rows.
#pragma once

#include <algorithm>

#include "panel_types.h"

namespace decant {

// PIECE: steps of a panel that stay in a cache while rows are multiplied by it. GROUP, GROUP_PANELS: rows and panels
// multiplied together. Their chains and factors must fit into the vector registers (16 of eight numbers, or 32 of
// sixteen), the rows' addresses into the 16 general registers: with twelve rows two would be reloaded in each step.
constexpr long PIECE = WIDE ? 608 : 512;
constexpr long GROUP = WIDE ? 10 : 6, GROUP_PANELS = WIDE ? 2 : 1;

// Panels whose next piece is prefetched while the current one is multiplied.
enum Prefetch { NONE, ONE = 1, OTHER = 2, BOTH = 3 };

// Fewest rows with prefetching. With fewer, a core only waits for memory and its own prefetcher is enough.
constexpr long PREFETCH_ROWS = 4;

// Sums in registers. With `accumulate` they start from the sums in `out`.
template <int ROWS, int PANELS>
struct Chains {
    Columns of[ROWS][PANELS];

    __attribute__((always_inline)) Chains(const float* out, long stride, bool accumulate) {
        each([=](int r, int p, Columns& chain) __attribute__((always_inline)) {
            chain = accumulate ? Columns::read(out + r * stride + p * WIDTH) : Columns::zeros();
        });
    }

    __attribute__((always_inline)) void write(float* out, long stride) {
        each([=](int r, int p, Columns& chain) __attribute__((always_inline)) {
            chain.write(out + r * stride + p * WIDTH);
        });
    }

    template <class F>
    __attribute__((always_inline)) void each(const F& f) {
        #pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++)
            #pragma GCC unroll 16
            for (int p = 0; p < PANELS; p++) f(r, p, of[r][p]);
    }
};

// Address of a step of the first of some panels, and the words from one panel to the next.
template <class T>
struct PanelStep {
    const typename T::Word* at;
    long stride;
};

// ROWS rows times PANELS panels for `count` of the `inner` steps, added to `out` with `accumulate`. As many bytes as
// are read are prefetched from `next`.
template <class T, int ROWS, int PANELS, Prefetch PREFETCH>
inline void tile(const typename T::Factor* x, long inner, long count, PanelStep<T> panels, float* out, long stride,
                 bool accumulate, PanelStep<T> next) {
    Chains<ROWS, PANELS> chains(out, stride, accumulate);
    for (long k = 0; k < count; k++) {
        Columns factors[PANELS];
        #pragma GCC unroll 16
        for (int p = 0; p < PANELS; p++) {
            if (PREFETCH >> p & 1)
                _mm_prefetch(reinterpret_cast<const char*>(next.at + p * next.stride + k * T::STEP), _MM_HINT_T1);
            factors[p] = T::load(panels.at + p * panels.stride + k * T::STEP);
        }
        chains.each([&](int r, int p, Columns& chain) __attribute__((always_inline)) {
            chain.add(take(x + r * inner + k), factors[p]);
        });
    }
    chains.write(out, stride);
}

// A group of rows times PANELS panels. If there are several groups, each has at least half of GROUP rows.
template <class T, int PANELS, Prefetch PREFETCH, int ROWS = GROUP>
inline void group(const typename T::Factor* x, long rows, long inner, long count, PanelStep<T> panels, float* out,
                  long stride, bool accumulate, PanelStep<T> next) {
    if constexpr (ROWS > (PANELS == 1 ? 1 : GROUP / 2))
        if (rows < ROWS)
            return group<T, PANELS, PREFETCH, ROWS - 1>(x, rows, inner, count, panels, out, stride, accumulate, next);
    tile<T, ROWS, PANELS, PREFETCH>(x, inner, count, panels, out, stride, accumulate, next);
}

// The function for a group with `left` groups to go: the last groups prefetch the next piece.
template <class T, int PANELS>
inline auto group_function(long left) {
    return left > PANELS ? group<T, PANELS, NONE> : left == PANELS ? group<T, PANELS, ONE> : group<T, PANELS, OTHER>;
}

// All rows times PANELS panels: a piece of the panels stays in a cache for all rows, in groups of nearly equal size.
// The last groups prefetch the next piece, which may belong to the next panels.
template <class T, int PANELS>
inline void pass(const typename T::Factor* x, long rows, long inner, const typename T::Word* panels, float* out,
                 long stride, bool accumulate) {
    static_assert(PANELS <= 2);
    long groups = (rows + GROUP - 1) / GROUP;
    for (long k = 0; k < inner; k += PIECE) {
        long count = std::min(PIECE, inner - k);
        const auto* next = k + PIECE < inner ? panels + (k + PIECE) * T::STEP : panels + PANELS * inner * T::STEP;
        PanelStep<T> here{panels + k * T::STEP, inner * T::STEP}, there{next, inner * T::STEP};
        for (long g = 0; g < groups; g++) {
            long first = rows * g / groups, some = rows * (g + 1) / groups - first, left = groups - g;
            auto multiply_group = rows < PREFETCH_ROWS ? group<T, PANELS, NONE> : group_function<T, PANELS>(left);
            multiply_group(x + first * inner + k, some, inner, count, here, out + first * stride, stride,
                           accumulate || k > 0, there);
        }
    }
}

// x [rows, inner] times `count` panels -> out [rows, count * WIDTH], rows `stride` apart; `inner` in steps. With
// `accumulate` the product is added to `out`. Few rows are bound by memory: they read panels one by one, in order.
template <class T>
inline void multiply(const typename T::Factor* x, long rows, long inner, const typename T::Word* panels, long count,
                     float* out, long stride, bool accumulate = false) {
    long p = 0;
    if (rows > GROUP)
        for (; p + GROUP_PANELS <= count; p += GROUP_PANELS)
            pass<T, GROUP_PANELS>(x, rows, inner, panels + p * inner * T::STEP, out + p * WIDTH, stride, accumulate);
    for (; p < count; p++)
        pass<T, 1>(x, rows, inner, panels + p * inner * T::STEP, out + p * WIDTH, stride, accumulate);
}

}  // namespace decant
