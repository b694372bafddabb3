// A linear layer: rows times a weight that was packed once. See engine/products.py.
#pragma once

#include <array>
#include <vector>

#include "tile.h"

namespace decant {

constexpr long TOGETHER = 4;         // panels that rows go through before the next rows do
constexpr long CACHED = 384 * 1024;  // bytes of rows that stay in the second level cache while panels go by
constexpr long WORTH = 1 << 16;      // sums that are worth waking a thread for

template <class T>
struct Product;

template <class T, size_t N>
void multiply_all(const std::array<Product<T>, N>& products, long threads);

template <class T>
struct Product {
    using Element = typename T::Element;

    const Element* x;               // [rows, inner]
    const typename T::Word* weight; // [panels][inner][STEP], 32-byte aligned
    const float* bias;              // [panels * WIDTH], or null
    Element* out;                   // [rows, panels * WIDTH]
    long rows, inner, panels;

    void store(const float* sums, long row, long panel, long count) const {
        Element* to = out + row * panels * WIDTH + panel * WIDTH;
        const float* add = bias ? bias + panel * WIDTH : nullptr;
        for (long n = 0; n < count * WIDTH; n++) to[n] = T::round(add ? sums[n] + add[n] : sums[n]);
    }

    // A thread's share: some panels, all rows, as many at a time as stay in the cache.
    void share(long first, long end) const {
        long most = std::max(4L, CACHED / (4 * inner) / 4 * 4);
        std::vector<float> wide(std::min(most, rows) * inner), sums(std::min(most, rows) * TOGETHER * WIDTH);
        for (long row = 0; row < rows; row += most) {
            long count = std::min(most, rows - row);
            const Element* from = x + row * inner;
            for (long at = 0; at < count * inner; at++) wide[at] = T::read(from[at]);
            for (long panel = first; panel < end; panel += TOGETHER) {
                long together = std::min(TOGETHER, end - panel);
                multiply<T>(wide.data(), count, inner, weight + panel * inner * T::STEP, together, sums.data(),
                            TOGETHER * WIDTH);
                for (long r = 0; r < count; r++) store(&sums[r * TOGETHER * WIDTH], row + r, panel, together);
            }
        }
    }

    long work() const { return rows * inner * panels * WIDTH; }

    void run(long threads) const { multiply_all<T, 1>({*this}, threads); }
};

// Products of a kind, as if their panels stood in a row: threads wait for each other once.
template <class T, size_t N>
void multiply_all(const std::array<Product<T>, N>& products, long threads) {
    long panels = 0, work = 0;
    for (auto& product : products) panels += product.panels, work += product.work();
    threads = std::clamp(work / WORTH, 1L, threads);
    #pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (long t = 0; t < threads; t++) {
        long first = panels * t / threads, end = panels * (t + 1) / threads;
        for (auto& product : products) {
            if (first < product.panels && end > 0) product.share(std::max(first, 0L), std::min(end, product.panels));
            first -= product.panels, end -= product.panels;
        }
    }
}

// A weight [outputs, inner] into panels that are noughts.
template <class T>
void pack(const typename T::Element* weight, typename T::Word* packed, long outputs, long inner) {
    for (long n = 0; n < outputs; n++) {
        auto* panel = packed + n / WIDTH * inner * T::STEP;
        for (long k = 0; k < inner; k++) T::put(panel, k, n % WIDTH, weight[n * inner + k]);
    }
}

}  // namespace decant
