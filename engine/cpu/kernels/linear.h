// A linear layer: rows times a packed weight. See engine/cpu/gemm.py.
#pragma once

#include <omp.h>

#include <array>
#include <atomic>
#include <vector>

#include "guard.h"
#include "simd_avx2.h"
#include "elementwise.h"
#include "gemm_codes.h"
#include "gemm_int8.h"
#include "weight.h"

namespace decant {

constexpr long PANELS_AT_ONCE = BUNDLE;    // most panels that a thread takes at once
constexpr long MEMORY_BOUND_ROWS = 32;     // up to this many rows, reading the weight takes longest
constexpr long CACHED = 384 * 1024;        // bytes of rows that stay in the second-level cache
constexpr long SUMS_PER_THREAD = 1 << 16;  // fewer multiply-adds are not worth waking a thread for

template <class P, size_t N>
void multiply_all(const std::array<P, N>& products, long threads);

// A weight as numbers (weight.h), as codes (codes.h), or as codes for rows that are rounded to int8 (int8_rows.h). As in
// engine/cpu/gemm.py.
enum WeightForm : int64_t { NUMBERS, CODES, CODES_FOR_INT8 };

template <class T>
class LayerWeight {
public:
    LayerWeight(const void* at, int64_t form) : at(at), form(WeightForm(form)) {}

    bool rounds_rows() const { return form == CODES_FOR_INT8; }
    RowShape rounded_rows() const { return Int8Weight(at).rows(); }

    // Whether rows are the same factors for both weights.
    bool has_rows_of(const LayerWeight& other) const {
        if (rounds_rows() != other.rounds_rows()) return false;
        return !rounds_rows() || rounded_rows() == other.rounded_rows();
    }

    void multiply(const typename T::Factor* x, long rows, long length, long panel, long count, float* out,
                  long stride) const {
        if (rounds_rows()) Int8Weight(at).multiply(reinterpret_cast<const RowWord*>(x), rows, panel, count, out, stride);
        else if (form == CODES) CodedWeight<T>(at).multiply(x, rows, panel, count, out, stride);
        else Weight<T>(at).multiply(x, rows, length, panel, count, out, stride);
    }

    void check(const char* field, int64_t outputs, int64_t inner) const {
        check_packed(field, at);
        require(form >= NUMBERS && form <= CODES_FOR_INT8, field, "a form from 0 to 2", form);
        if (form != NUMBERS) decant::check(CodedWeight<T>(at).header(), outputs, inner);
        if (rounds_rows()) check_int8(Int8Weight(at).header());
    }

private:
    const void* at;
    WeightForm form;
};

template <class T>
struct Product {
    using Element = typename T::Element;
    using Factor = typename T::Factor;
    static constexpr long SUMS = 1;  // for each output

    const Element* x;               // [rows, inner]
    LayerWeight<T> weight;          // of [panels * WIDTH, inner]
    const float* bias;              // [panels * WIDTH], or null
    Element* out;                   // [rows, panels * WIDTH]
    long rows, inner, panels;

    Element* output(long row, long panel) const { return out + (row * panels + panel) * WIDTH; }

    // Writes a row's outputs of `count` panels.
    void store(const float* sums, long panel, long count, Element* to) const {
        const float* add = bias ? bias + panel * WIDTH : nullptr;
        for (long n = 0; n < count * WIDTH; n += WIDTH) {
            auto columns = Columns::read(sums + n);
            if (add) columns.add(1.0f, Columns::read(add + n));
            keep(to + n, columns);
        }
    }

    // Factors of a row; of a rounded one, its words.
    long length() const {
        static_assert(sizeof(Factor) == sizeof(RowWord));
        return weight.rounds_rows() ? weight.rounded_rows().words : steps<T>(inner);
    }

    // Rows multiplied together: they fit in the second-level cache, and all blocks have nearly the same size.
    long block() const {
        long most = std::max(4L, CACHED / (4 * length())), blocks = std::max(1L, (rows + most - 1) / most);
        return std::max(1L, (rows + blocks - 1) / blocks);
    }

    // Whether `other` multiplies the same rows.
    bool has_rows_of(const Product& other) const {
        return x == other.x && rows == other.rows && inner == other.inner && weight.has_rows_of(other.weight);
    }

    // Rows as factors: in place if the type allows it, else converted into `memory`, or rounded.
    const Factor* factors(long row, long count, std::vector<Factor>& memory) const {
        if (weight.rounds_rows()) {
            RowShape shape = weight.rounded_rows();
            memory.resize(block() * shape.words);
            RowWord* to = reinterpret_cast<RowWord*>(memory.data());
            for (long r = 0; r < count; r++) round_row(x + (row + r) * inner, shape, to + r * shape.words);
            return memory.data();
        }
        if (T::KS * sizeof(Element) == sizeof(Factor) && inner % T::KS == 0)
            return reinterpret_cast<const Factor*>(x + row * inner);
        memory.resize(block() * length());
        for (long r = 0; r < count; r++) pack_row<T>(x + (row + r) * inner, inner, &memory[r * length()]);
        return memory.data();
    }

    // Panels that a thread takes at once: few, so that threads finish at nearly the same time.
    long taken() const {
        return block() > MEMORY_BOUND_ROWS && !weight.rounds_rows() ? GROUP_PANELS : PANELS_AT_ONCE;
    }

    long blocks() const { return (rows + block() - 1) / block(); }
    long pieces() const { return (panels + taken() - 1) / taken(); }

    // Sums of some rows and panels; rows of `sums` are PANELS_AT_ONCE panels apart.
    void sum_up(const Factor* factors, long count, long panel, long together, float* sums) const {
        weight.multiply(factors, count, length(), panel, together, sums, PANELS_AT_ONCE * WIDTH);
    }

    // Computes and writes the outputs of some rows and panels.
    void part(const Factor* factors, long row, long count, long panel, long together, float* sums) const {
        sum_up(factors, count, panel, together, sums);
        for (long r = 0; r < count; r++)
            store(&sums[r * PANELS_AT_ONCE * WIDTH], panel, together, output(row + r, panel));
    }

    long work() const { return rows * inner * panels * WIDTH; }

    void run(long threads) const { multiply_all(std::array{*this}, threads); }

    void check() const {
        check_count("rows", rows);
        check_positive("inner", inner);
        check_positive("panels", panels);
        if (rows) check_address("x", x), check_address("out", out);
        weight.check("weight", panels * WIDTH, inner);
    }
};

// silu(x * gate) * (x * up): two linear layers with the same inputs, whose own outputs are not written.
template <class T>
struct GatedProduct : Product<T> {  // the base is the gate; `out` gets the result
    using Element = typename T::Element;
    using Factor = typename T::Factor;
    static constexpr long SUMS = 2;

    Product<T> up;

    void part(const Factor* factors, long row, long count, long panel, long together, float* sums) const {
        Element gate_out[PANELS_AT_ONCE * WIDTH], up_out[PANELS_AT_ONCE * WIDTH];
        this->sum_up(factors, count, panel, together, sums);
        float* up_sums = sums + this->block() * PANELS_AT_ONCE * WIDTH;
        up.sum_up(factors, count, panel, together, up_sums);
        for (long r = 0; r < count; r++) {
            this->store(&sums[r * PANELS_AT_ONCE * WIDTH], panel, together, gate_out);
            up.store(&up_sums[r * PANELS_AT_ONCE * WIDTH], panel, together, up_out);
            gate_row(gate_out, up_out, this->output(row + r, panel), together * WIDTH);
        }
    }
};

// Several products of one kind, in order. Each thread takes the panels of its own part in memory order, then helps with
// the others' parts, so that no thread waits for a core that is slowed down.
template <class P, size_t N>
void multiply_all(const std::array<P, N>& products, long threads) {
    long work = 0, rows = 0, pieces = 0;
    for (auto& product : products) {
        work += product.work(), pieces += product.blocks() * product.pieces(), rows = std::max(rows, product.block());
    }
    std::vector<std::atomic<bool>> taken(pieces);  // for each block of rows in order
    Guard guard;
    #pragma omp parallel num_threads(std::clamp(work / SUMS_PER_THREAD, 1L, threads))
    guard.run([&] {
        std::vector<typename P::Factor> memory;
        std::vector<float> sums(P::SUMS * rows * PANELS_AT_ONCE * WIDTH);
        std::atomic<bool>* free = taken.data();
        const P* owner = nullptr;  // of the factors that the next product may have in common
        const typename P::Factor* factors = nullptr;
        for (auto& product : products)
            for (long row = 0, all = product.pieces(); row < product.rows; row += product.block(), free += all) {
                if (!owner || product.blocks() > 1 || !product.has_rows_of(*owner)) factors = nullptr;
                long count = std::min(product.block(), product.rows - row), some = product.taken();
                long begin = all * omp_get_thread_num() / omp_get_num_threads();
                for (long n = 0; n < all; n++) {
                    long piece = begin + n < all ? begin + n : begin + n - all, panel = piece * some;
                    if (free[piece].exchange(true, std::memory_order_relaxed)) continue;
                    if (!factors) factors = product.factors(row, count, memory), owner = &product;
                    product.part(factors, row, count, panel, std::min(some, product.panels - panel), sums.data());
                }
            }
    });
    guard.rethrow();
}

}  // namespace decant
