// Decoder layers in one call, each by the one before. See engine/cpu/fused_layer.py.
//
//     x -> norm -> query, key, value -> (norm) -> rotation -> attention over blocks -> out -> + x
//       -> norm -> silu(gate) * up -> down -> + what was there
//
// Its parts are those that the layer calls one by one otherwise, so its bits are theirs.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "attention.h"
#include "product.h"
#include "small.h"

namespace decant {

struct Norm {
    const void* weight;  // null: there is none
    double eps;
};

struct Linear {
    const void* weight;
    const float* bias;
    int64_t inner, outputs;
};

// As in engine/cpu/fused_layer.py.
struct Layer {
    Norm before, query_norm, key_norm, after;
    Linear query, key, value, out, gate, up, down;
    int64_t heads, kv_heads, width;
    double scaling, softcap;
};

// A layer's part of a step.
struct Turn {
    const Layer* layer;
    const Cache* cache;
    const int64_t* visible;  // [tokens]
    const Asked* asked;      // null: all of its answers
};

inline void check(const Linear& linear, const char* field, int64_t inner, int64_t outputs) {
    check_packed(field, linear.weight);
    check_equal(field, linear.inner, inner);
    check_equal(field, linear.outputs, outputs);
    require(inner >= 1 && outputs >= WIDTH && outputs % WIDTH == 0, field, "outputs that are a multiple of 16", outputs);
}

// Whether all parts are as wide as what they get, and the cache is of these heads.
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

// Layers one after the other over one step of `tokens` tokens.
inline void check(const Turn* turns, int64_t count, const Step& step, int64_t tokens) {
    check_positive("layers", count);
    check_address("turns", turns);
    check_address("step", &step);
    for (const Turn* turn = turns; turn < turns + count; turn++) {
        check_address("layer", turn->layer);
        check_address("cache", turn->cache);
        const Cache &cache = *turn->cache, &known = *turns->cache;
        check(cache);
        check_equal("hidden", turn->layer->query.inner, turns->layer->query.inner);
        check(*turn->layer, cache);
        if (turn == turns || cache.block_size != known.block_size || cache.blocks != known.blocks)
            check(step, tokens, cache.block_size, cache.blocks);
        if (turn == turns || turn->visible != turn[-1].visible) check_visible(turn->visible, step);
        if (turn->asked) check(*turn->asked, step, tokens);
    }
}

template <class T>
class DecoderLayer {
    using E = typename T::Element;

public:
    DecoderLayer(const Layer& layer, long tokens, int threads) : layer(layer), tokens(tokens), threads(threads) {}

    // x, out [tokens, hidden]; cos, sin [tokens, width]; visible [tokens]. What lies in `memory` is overwritten. With
    // `asked` others than these answer nought: all that they have to leave are keys and values.
    void run(const Cache& cache, const Step& step, const Asked* asked, const E* x, const E* cos, const E* sin,
             const int64_t* visible, E* out, std::vector<E>& memory) const {
        long hidden = layer.query.inner, heads = layer.query.outputs, kv = layer.key.outputs;
        size_t needed = tokens * (hidden + std::max(heads + 2 * kv, layer.gate.outputs));
        if (memory.size() < needed + LINE / sizeof(E)) memory.resize(needed + LINE / sizeof(E));
        E* row = at_line(memory.data());
        E *query = row + tokens * hidden, *key = query + tokens * heads, *value = key + tokens * kv;
        auto at = [=](auto* rows, long t) { return rows + t * hidden; };
        each_row(tokens, hidden, threads, [=](long t) { norm(layer.before, at(x, t), at(row, t), hidden); });
        multiply_all(std::array{by(layer.query, row, query, tokens), by(layer.key, row, key, tokens),
                                by(layer.value, row, value, tokens)}, threads);
        each_row(tokens, heads + kv, threads, [=](long t) {
            const E *c = cos + t * layer.width, *s = sin + t * layer.width;
            turn(layer.query_norm, query + t * heads, c, s, layer.heads);
            turn(layer.key_norm, key + t * kv, c, s, layer.kv_heads);
        });
        Call call{query, key, value, query, nullptr, visible, heads, layer.width, kv, layer.width, kv, layer.width,
                  layer.heads, float(layer.scaling), float(layer.softcap), tokens};
        attend<T>(cache, step, asked ? asked->step : step, call, std::is_same_v<T, BFloat16>, threads);
        long some = tokens;
        if (asked) {
            pick(*asked, query, query, heads);
            pick(*asked, x, out, hidden);
            x = out, some = asked->count;
        }
        by(layer.out, query, row, some).run(threads);
        each_row(some, hidden, threads, [=](long t) {
            add_row(at(x, t), at(row, t), at(out, t), hidden);
            norm(layer.after, at(out, t), at(row, t), hidden);
        });

        E* open = query;
        GatedProduct<T> gated{by(layer.gate, row, open, some), by(layer.up, row, nullptr, some)};
        multiply_all(std::array{gated}, threads);
        by(layer.down, open, row, some).run(threads);
        each_row(some, hidden, threads, [=](long t) { add_row(at(out, t), at(row, t), at(out, t), hidden); });
        if (asked) spread(*asked, out, hidden);
    }

private:
    const Layer& layer;
    const long tokens;
    const int threads;

    static void norm(const Norm& by, const E* x, E* out, long width) {
        norm_row(x, static_cast<const E*>(by.weight), out, width, float(by.eps));
    }

    // A token's queries or keys, each by itself, where there is a norm for them; rotated.
    void turn(const Norm& by, E* x, const E* cos, const E* sin, long heads) const {
        for (long h = 0; by.weight && h < heads; h++) norm(by, x + h * layer.width, x + h * layer.width, layer.width);
        rotate_row(x, cos, sin, x, heads, layer.width, layer.width);
    }

    Product<T> by(const Linear& linear, const E* x, E* out, long rows) const {
        return {x, Weight<T>(linear.weight), linear.bias, out, rows, linear.inner, linear.outputs / WIDTH};
    }

    // The rows that are asked for, side by side; `to` may be `from`.
    static void pick(const Asked& asked, const E* from, E* to, long width) {
        for (long n = 0; n < asked.count; n++) std::memmove(to + n * width, from + asked.places[n] * width, width * sizeof(E));
    }

    // Back to their places, among noughts.
    void spread(const Asked& asked, E* rows, long width) const {
        for (long place = tokens - 1, n = asked.count - 1; place >= 0; place--) {
            if (n >= 0 && asked.places[n] == place) std::memmove(rows + place * width, rows + n-- * width, width * sizeof(E));
            else std::fill_n(rows + place * width, width, E());
        }
    }
};

// x [tokens, hidden] through `count` layers of one kind: what each answers is the next one's x, and stands in
// `out` [count, tokens, hidden].
template <class T>
void run_layers(const Turn* turns, long count, const Step& step, const typename T::Element* x, const typename T::Element* cos,
                const typename T::Element* sin, typename T::Element* out, long tokens, int threads) {
    static thread_local std::vector<typename T::Element> memory;  // taken once, as much as the longest step needs
    for (const Turn* turn = turns; turn < turns + count; turn++) {
        DecoderLayer<T>(*turn->layer, tokens, threads)
            .run(*turn->cache, step, turn->asked, x, cos, sin, turn->visible, out, memory);
        x = out, out += tokens * turn->layer->query.inner;
    }
}

}  // namespace decant
