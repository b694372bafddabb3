// A linear layer: rows times a weight that was packed once. See engine/cpu/gemm.py.
#pragma once

#include <omp.h>

#include <array>
#include <atomic>
#include <vector>

#include "guard.h"
#include "lanes.h"
#include "small.h"
#include "weight.h"

namespace decant {

constexpr long TOGETHER = 4;         // most panels that are taken at once
constexpr long READ_ONCE = 32;       // rows up to which it is memory that sets the pace
constexpr long CACHED = 384 * 1024;  // bytes of rows that stay in the second level cache while panels go by
constexpr long WORTH = 1 << 16;      // sums that are worth waking a thread for

template <class P, size_t N>
void multiply_all(const std::array<P, N>& products, long threads);

template <class T>
struct Product {
    using Element = typename T::Element;
    using Factor = typename T::Factor;
    static constexpr long SUMS = 1;  // for each output

    const Element* x;               // [rows, inner]
    Weight<T> weight;               // of [panels * WIDTH, inner]
    const float* bias;              // [panels * WIDTH], or null
    Element* out;                   // [rows, panels * WIDTH]
    long rows, inner, panels;

    Element* place(long row, long panel) const { return out + (row * panels + panel) * WIDTH; }

    // A row's outputs of some panels.
    void store(const float* sums, long panel, long count, Element* to) const {
        const float* add = bias ? bias + panel * WIDTH : nullptr;
        for (long n = 0; n < count * WIDTH; n += WIDTH) {
            auto columns = Columns::read(sums + n);
            if (add) columns.add(1.0f, Columns::read(add + n));
            keep(to + n, columns);
        }
    }

    // Factors of a row.
    long length() const { return steps<T>(inner); }

    // Rows that go by together: as many as stay in the second level cache, or a few less, so that none are left over.
    long block() const {
        long most = std::max(4L, CACHED / (4 * length())), blocks = std::max(1L, (rows + most - 1) / most);
        return std::max(1L, (rows + blocks - 1) / blocks);
    }

    // Rows as they are multiplied, in `memory` if not where they are.
    const Factor* factors(long row, long count, std::vector<Factor>& memory) const {
        if (T::KS * sizeof(Element) == sizeof(Factor) && inner % T::KS == 0)
            return reinterpret_cast<const Factor*>(x + row * inner);
        memory.resize(block() * length());
        for (long r = 0; r < count; r++) lay_out<T>(x + (row + r) * inner, inner, &memory[r * length()]);
        return memory.data();
    }

    // Panels that a thread takes at once: so few that all are through at nearly the same time.
    long taken() const { return block() > READ_ONCE ? GROUP_PANELS : TOGETHER; }

    long blocks() const { return (rows + block() - 1) / block(); }
    long pieces() const { return (panels + taken() - 1) / taken(); }

    // Sums of some rows and panels, rows TOGETHER panels apart.
    void sum_up(const Factor* factors, long count, long panel, long together, float* sums) const {
        weight.multiply(factors, count, length(), panel, together, sums, TOGETHER * WIDTH);
    }

    // Some rows through some panels.
    void part(const Factor* factors, long row, long count, long panel, long together, float* sums) const {
        sum_up(factors, count, panel, together, sums);
        for (long r = 0; r < count; r++) store(&sums[r * TOGETHER * WIDTH], panel, together, place(row + r, panel));
    }

    long work() const { return rows * inner * panels * WIDTH; }

    void run(long threads) const { multiply_all(std::array{*this}, threads); }

    void check() const {
        check_count("rows", rows);
        check_positive("inner", inner);
        check_positive("panels", panels);
        if (rows) check_address("x", x), check_address("out", out);
        check_packed("weight", weight.address());
    }
};

// Of two linear layers with the same inputs: silu(x * gate) * (x * up). What they answer by themselves is not written down.
template <class T>
struct GatedProduct : Product<T> {  // by the gate, to where both go
    using Element = typename T::Element;
    using Factor = typename T::Factor;
    static constexpr long SUMS = 2;

    Product<T> up;

    void part(const Factor* factors, long row, long count, long panel, long together, float* sums) const {
        Element open[TOGETHER * WIDTH], beside[TOGETHER * WIDTH];
        this->sum_up(factors, count, panel, together, sums);
        float* others = sums + this->block() * TOGETHER * WIDTH;
        up.sum_up(factors, count, panel, together, others);
        for (long r = 0; r < count; r++) {
            this->store(&sums[r * TOGETHER * WIDTH], panel, together, open);
            up.store(&others[r * TOGETHER * WIDTH], panel, together, beside);
            gate_row(open, beside, this->place(row + r, panel), together * WIDTH);
        }
    }
};

// Products of a kind, one after the other. Each thread walks through a part of the panels that is its own, so that what it
// reads next lies behind what it reads, and then through the others': a core that is slowed down does not make all wait.
template <class P, size_t N>
void multiply_all(const std::array<P, N>& products, long threads) {
    long work = 0, rows = 0, pieces = 0;
    for (auto& product : products) {
        work += product.work(), pieces += product.blocks() * product.pieces(), rows = std::max(rows, product.block());
    }
    std::vector<std::atomic<bool>> taken(pieces);  // of each block of rows, one after the other
    Guard guard;
    #pragma omp parallel num_threads(std::clamp(work / WORTH, 1L, threads))
    guard.run([&] {
        std::vector<typename P::Factor> memory;
        std::vector<float> sums(P::SUMS * rows * TOGETHER * WIDTH);
        std::atomic<bool>* free = taken.data();
        for (auto& product : products)
            for (long row = 0, all = product.pieces(); row < product.rows; row += product.block(), free += all) {
                const typename P::Factor* factors = nullptr;
                long count = std::min(product.block(), product.rows - row), some = product.taken();
                long begin = all * omp_get_thread_num() / omp_get_num_threads();
                for (long n = 0; n < all; n++) {
                    long piece = begin + n < all ? begin + n : begin + n - all, panel = piece * some;
                    if (free[piece].exchange(true, std::memory_order_relaxed)) continue;
                    if (!factors) factors = product.factors(row, count, memory);
                    product.part(factors, row, count, panel, std::min(some, product.panels - panel), sums.data());
                }
            }
    });
    guard.rethrow();
}

}  // namespace decant
