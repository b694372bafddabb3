// Changes of linear layers by adapters: out += (x * down) * up, for the rows of a step that have an adapter. See
// engine/cpu/adapters.py.
//
// The products and roundings are those of the linear layers (linear.h), so the bits are the same as with one call for
// each product. A thread takes some rows of one adapter at a time.
#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "elementwise.h"
#include "guard.h"
#include "linear.h"

namespace decant {

constexpr long CHANGED_ROWS = 16;  // rows that a thread takes at once

// The linear layers of a decoder layer, in the order of engine/model/decoder_layer.py.
enum Changed { QUERY, KEY, VALUE, OUT, GATE, UP, DOWN, CHANGED };

// down [rank, inner], up [outputs, rank], both packed numbers; null: not changed.
struct LowRank {
    const void *down, *up;
    int64_t rank;
};

struct AdapterRows {
    const LowRank* changes;  // [layers, CHANGED]
    const int64_t* rows;     // [count], each once
    int64_t count;
};

struct StepChanges {
    const AdapterRows* adapters;  // [count]
    int64_t count;
};

inline void check(const StepChanges& changes, int64_t layer, int64_t tokens) {
    check_positive("adapters", changes.count);
    check_count("layer", layer);
    check_address("adapters", changes.adapters);
    for (int64_t n = 0; n < changes.count; n++) {
        const AdapterRows& adapter = changes.adapters[n];
        check_positive("rows", adapter.count);
        check_address("rows", adapter.rows);
        check_address("changes", adapter.changes);
        for (int64_t r = 0; r < adapter.count; r++)
            require(adapter.rows[r] >= 0 && adapter.rows[r] < tokens, "row", "one of the step's", adapter.rows[r]);
        for (int64_t c = layer * CHANGED; c < (layer + 1) * CHANGED; c++) {
            const LowRank& change = adapter.changes[c];
            if (!change.down) continue;
            check_packed("down", change.down);
            check_packed("up", change.up);
            require(change.rank >= WIDTH && change.rank % WIDTH == 0, "rank", "a multiple of 16", change.rank);
        }
    }
}

// One thread's changes of some rows, with its memory.
template <class T>
class RowChanges {
    using E = typename T::Element;

public:
    // Adds to the `rows` of out [.., outputs] what x [.., inner] gives.
    void add(const LowRank& change, const int64_t* rows, long count, const E* x, E* out, long inner, long outputs) {
        inputs.resize(count * inner), between.resize(count * change.rank), added.resize(count * outputs);
        for (long n = 0; n < count; n++) std::copy_n(x + rows[n] * inner, inner, &inputs[n * inner]);
        multiply({inputs.data(), {change.down, NUMBERS}, nullptr, between.data(), count, inner, change.rank / WIDTH});
        multiply({between.data(), {change.up, NUMBERS}, nullptr, added.data(), count, change.rank, outputs / WIDTH});
        for (long n = 0; n < count; n++) {
            E* to = out + rows[n] * outputs;
            add_row(to, &added[n * outputs], to, outputs);
        }
    }

private:
    std::vector<E> inputs, between, added;
    std::vector<typename T::Factor> memory;
    std::vector<float> sums;

    void multiply(const Product<T>& product) {
        sums.resize(product.block() * PANELS_AT_ONCE * WIDTH);
        for (long row = 0; row < product.rows; row += product.block()) {
            long count = std::min(product.block(), product.rows - row), some = product.taken();
            auto* factors = product.factors(row, count, memory);
            for (long panel = 0; panel < product.panels; panel += some)
                product.part(factors, row, count, panel, std::min(some, product.panels - panel), sums.data());
        }
    }
};

// Adds the changes of a layer's linear layer `which`, from x [tokens, inner] to out [tokens, outputs].
template <class T>
void add_changes(const StepChanges& changes, long layer, Changed which, const typename T::Element* x,
                 typename T::Element* out, long inner, long outputs, long threads) {
    struct Item {
        const LowRank* change;
        const int64_t* rows;
        long count;
    };
    std::vector<Item> items;
    long work = 0;
    for (const AdapterRows* adapter = changes.adapters; adapter < changes.adapters + changes.count; adapter++) {
        const LowRank& change = adapter->changes[layer * CHANGED + which];
        if (!change.down) continue;
        for (long row = 0; row < adapter->count; row += CHANGED_ROWS)
            items.push_back({&change, adapter->rows + row, std::min(CHANGED_ROWS, long(adapter->count) - row)});
        work += adapter->count * change.rank * (inner + outputs);
    }
    if (items.empty()) return;
    std::atomic<size_t> next{0};
    Guard guard;
    #pragma omp parallel num_threads(std::clamp(work / SUMS_PER_THREAD, 1L, std::min(threads, long(items.size()))))
    guard.run([&] {
        RowChanges<T> rows;
        for (size_t n; (n = next.fetch_add(1, std::memory_order_relaxed)) < items.size();)
            rows.add(*items[n].change, items[n].rows, items[n].count, x, out, inner, outputs);
    });
    guard.rethrow();
}

}  // namespace decant
