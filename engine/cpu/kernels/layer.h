// Consecutive decoder layers in one call. See engine/cpu/fused_layer.py.
//
//     x -> norm -> query, key, value -> (norm) -> rotation -> attention over blocks -> out -> + x
//       -> norm -> silu(gate) * up -> down -> + residual
//
// The parts are the kernels that the model's modules call one by one otherwise, so the bits are the same.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "attention.h"
#include "changes.h"
#include "elementwise.h"
#include "linear.h"

namespace decant {

struct Norm {
    const void* weight;  // null: no norm
    double eps;
};

struct Linear {
    const void* weight;
    const float* bias;
    int64_t inner, outputs, form;
};

// As in engine/cpu/fused_layer.py.
struct Layer {
    Norm before, query_norm, key_norm, after;
    Linear query, key, value, out, gate, up, down;
    int64_t heads, kv_heads, width;
    double scaling, softcap;
    int64_t number;  // among those that adapters change
};

// A layer, and what it needs of a step.
struct LayerCall {
    const Layer* layer;
    const Cache* cache;
    const int64_t* visible;  // [tokens]
    const SelectedTokens* selected;  // null: all tokens
    const Step* step;  // with the block tables of the layer's cache group
};

inline void check(const Linear& linear, const char* field, int64_t inner, int64_t outputs) {
    check_packed(field, linear.weight);
    check_equal(field, linear.inner, inner);
    check_equal(field, linear.outputs, outputs);
    require(inner >= 1 && outputs >= WIDTH && outputs % WIDTH == 0, field, "outputs that are a multiple of 16",
            outputs);
    LayerWeight<Float32>(linear.weight, linear.form).check(field, outputs, inner);
}

// The widths of all parts must fit together, and the cache must have the layer's heads.
inline void check(const Layer& layer, const Cache& cache) {
    require(layer.width >= 2 && layer.width % 2 == 0, "width", "an even number", layer.width);
    check_positive("heads", layer.heads);
    check_equal("kv_heads", layer.kv_heads, cache.kv_heads);
    check_equal("key_dim", cache.key_dim, layer.width);
    check_equal("value_dim", cache.value_dim, layer.width);
    require(layer.heads % layer.kv_heads == 0, "heads", "a multiple of kv_heads", layer.heads);
    check_address("norm", layer.before.weight);
    check_address("norm", layer.after.weight);
    int64_t hidden = layer.query.inner, heads = layer.heads * layer.width, kv = layer.kv_heads * layer.width;
    check(layer.query, "query", hidden, heads);
    check(layer.key, "key", hidden, kv);
    check(layer.value, "value", hidden, kv);
    check(layer.out, "out", heads, hidden);
    check(layer.gate, "gate", hidden, layer.gate.outputs);
    check(layer.up, "up", hidden, layer.gate.outputs);
    check(layer.down, "down", layer.gate.outputs, hidden);
}

// `count` consecutive layers over one step of `tokens` tokens; `changes` may be null.
inline void check(const LayerCall* calls, int64_t count, int64_t tokens, const StepChanges* changes) {
    check_positive("layers", count);
    check_address("calls", calls);
    for (const LayerCall* call = calls; call < calls + count; call++) {
        check_address("layer", call->layer);
        check_address("cache", call->cache);
        check_address("step", call->step);
        const Step& step = *call->step;
        const Cache &cache = *call->cache, &first = *calls->cache;
        check(cache);
        check_equal("hidden", call->layer->query.inner, calls->layer->query.inner);
        check(*call->layer, cache);
        bool another = call == calls || call->step != call[-1].step;
        if (another || cache.block_size != first.block_size || cache.blocks != first.blocks)
            check(step, tokens, cache.block_size, cache.blocks);
        if (another || call->visible != call[-1].visible) check_visible(call->visible, step);
        if (call->selected) check(*call->selected, step, tokens);
        if (changes) check(*changes, call->layer->number, tokens);
    }
}

template <class T>
class DecoderLayer {
    using E = typename T::Element;

public:
    DecoderLayer(const Layer& layer, long tokens, const StepChanges* changes, int threads)
        : layer(layer), tokens(tokens), changes(changes), threads(threads) {}

    // x, out [tokens, hidden]; cos, sin [tokens, width]; visible [tokens]. `memory` is scratch space. With `selected`
    // the outputs of all other tokens are zeros; only their keys and values are computed. With `changes` all tokens are.
    void run(const Cache& cache, const Step& step, const SelectedTokens* selected, const E* x, const E* cos,
             const E* sin, const int64_t* visible, E* out, std::vector<E>& memory) const {
        long hidden = layer.query.inner, heads = layer.query.outputs, kv = layer.key.outputs;
        long mlp = layer.gate.outputs;
        if (changes) selected = nullptr;  // their rows are numbered as the step's tokens
        bool apart = changes || !by(layer.gate, x, out, 0).has_rows_of(by(layer.up, x, out, 0));  // gate and up
        size_t needed = tokens * (hidden + std::max(heads + 2 * kv, apart ? 2 * mlp : mlp));
        if (memory.size() < needed + LINE / sizeof(E)) memory.resize(needed + LINE / sizeof(E));
        E* row = at_line(memory.data());
        E *query = row + tokens * hidden, *key = query + tokens * heads, *value = key + tokens * kv;
        auto at = [=](auto* rows, long t) { return rows + t * hidden; };
        each_row(tokens, hidden, threads, [=](long t) { norm(layer.before, at(x, t), at(row, t), hidden); });
        multiply_all(std::array{by(layer.query, row, query, tokens), by(layer.key, row, key, tokens),
                                by(layer.value, row, value, tokens)}, threads);
        change(layer.query, QUERY, row, query), change(layer.key, KEY, row, key), change(layer.value, VALUE, row, value);
        each_row(tokens, heads + kv, threads, [=](long t) {
            const E *c = cos + t * layer.width, *s = sin + t * layer.width;
            norm_and_rotate(layer.query_norm, query + t * heads, c, s, layer.heads);
            norm_and_rotate(layer.key_norm, key + t * kv, c, s, layer.kv_heads);
        });
        Call call{query, key, value, query, nullptr, visible, heads, layer.width, kv, layer.width, kv, layer.width,
                  layer.heads, float(layer.scaling), float(layer.softcap), tokens};
        attend<T>(cache, step, selected ? selected->step : step, call, std::is_same_v<T, BFloat16>, threads);
        long rows = tokens;
        if (selected) {
            gather(*selected, query, query, heads);
            gather(*selected, x, out, hidden);
            x = out, rows = selected->count;
        }
        by(layer.out, query, row, rows).run(threads);
        change(layer.out, OUT, query, row);
        each_row(rows, hidden, threads, [=](long t) {
            add_row(at(x, t), at(row, t), at(out, t), hidden);
            norm(layer.after, at(out, t), at(row, t), hidden);
        });

        E* open = query;
        if (apart) {
            E* up = open + tokens * mlp;
            multiply_all(std::array{by(layer.gate, row, open, rows), by(layer.up, row, up, rows)}, threads);
            change(layer.gate, GATE, row, open), change(layer.up, UP, row, up);
            gate(open, up, open, rows, mlp, mlp, threads);
        } else {
            GatedProduct<T> gated{by(layer.gate, row, open, rows), by(layer.up, row, nullptr, rows)};
            multiply_all(std::array{gated}, threads);
        }
        by(layer.down, open, row, rows).run(threads);
        change(layer.down, DOWN, open, row);
        each_row(rows, hidden, threads, [=](long t) { add_row(at(out, t), at(row, t), at(out, t), hidden); });
        if (selected) scatter(*selected, out, hidden);
    }

private:
    const Layer& layer;
    const long tokens;
    const StepChanges* changes;  // null: none
    const int threads;

    void change(const Linear& linear, Changed which, const E* x, E* out) const {
        if (changes) add_changes<T>(*changes, layer.number, which, x, out, linear.inner, linear.outputs, threads);
    }

    static void norm(const Norm& by, const E* x, E* out, long width) {
        norm_row(x, static_cast<const E*>(by.weight), out, width, float(by.eps));
    }

    // Norm of each query or key of a token, if the layer has one, then rotation.
    void norm_and_rotate(const Norm& by, E* x, const E* cos, const E* sin, long heads) const {
        for (long h = 0; by.weight && h < heads; h++) norm(by, x + h * layer.width, x + h * layer.width, layer.width);
        rotate_row(x, cos, sin, x, heads, layer.width, layer.width);
    }

    Product<T> by(const Linear& linear, const E* x, E* out, long rows) const {
        return {x, LayerWeight<T>(linear.weight, linear.form), linear.bias, out, rows, linear.inner, linear.outputs / WIDTH};
    }

    // Copies the selected rows to the front; `to` may be `from`.
    static void gather(const SelectedTokens& selected, const E* from, E* to, long width) {
        for (long n = 0; n < selected.count; n++)
            std::memmove(to + n * width, from + selected.indices[n] * width, width * sizeof(E));
    }

    // Moves the selected rows back to their indices, with zeros between them.
    void scatter(const SelectedTokens& selected, E* rows, long width) const {
        for (long token = tokens - 1, n = selected.count - 1; token >= 0; token--) {
            if (n >= 0 && selected.indices[n] == token)
                std::memmove(rows + token * width, rows + n-- * width, width * sizeof(E));
            else
                std::fill_n(rows + token * width, width, E());
        }
    }
};

// x [tokens, hidden] through `count` layers of equal widths. The outputs of all layers go to `out` [count, tokens,
// hidden]; each is the next layer's x.
template <class T>
void run_layers(const LayerCall* calls, long count, const typename T::Element* x, const typename T::Element* cos,
                const typename T::Element* sin, typename T::Element* out, long tokens, const StepChanges* changes,
                int threads) {
    static thread_local std::vector<typename T::Element> memory;  // grows to what the longest step needs
    for (const LayerCall* call = calls; call < calls + count; call++) {
        DecoderLayer<T>(*call->layer, tokens, changes, threads)
            .run(*call->cache, *call->step, call->selected, x, cos, sin, call->visible, out, memory);
        x = out, out += tokens * call->layer->query.inner;
    }
}

}  // namespace decant
