// Attention over KV blocks in place. See engine/cpu/attention.py.
//
//                  keys ->   tile 0    tile 1    tile 2     TILE keys of one sequence and one KV head are read once
//     rows: some positions  [######]  [######]  [##....]    for all rows: in place for a few rows
//     of a sequence, with   [######]  [######]  [###...]    (small_batch_attention.h), else packed as panels (gemm.h).
//     the query heads that                                  scores = rows x keys
//     share the KV head     out = out * decay + weights x values, with a running maximum and sum for each row
//                           (Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022)
//
// Both products are float32. They are bfloat16 (PAIRED) if the CPU multiplies bfloat16 and all inputs are bfloat16;
// then weights are rounded, and the rounded weights are summed.
//
// CODED keys and values are codes of one byte, each exact as a float32 and as a bfloat16, with a scale. Products are of
// codes; scores are multiplied with the scales of their keys, and weights with those of their values.
//
// Tiles begin at multiples of TILE, a row's chains cover whole tiles, and a key that a row does not see has weight
// zero. So a row's bits depend on its own position only, not on the rows that are computed with it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "call.h"
#include "kv_slots.h"
#include "small_batch_attention.h"
#include "simd_bf16.h"
#include "gemm.h"

namespace decant {

constexpr long TILE = 64;   // keys
constexpr long ROWS = 128;  // approximate number of rows that share a tile of keys
constexpr long PASS = 2 * GROUP;  // rows multiplied at once: their scores stay in the first-level cache
constexpr long MANY = 8;    // items per thread from which a thread takes several at once
constexpr float LOWEST = -1e30f;  // a running maximum below any score, and finite
constexpr float HIDDEN = -std::numeric_limits<float>::infinity();

template <class T, bool PAIRED, bool CODED>
class Attention {
    using Element = typename T::Element;
    using Slots = KvSlots<T, CODED>;
    using Stored = typename Slots::Stored;
    using Multiplied = std::conditional_t<PAIRED, BFloat16, Float32>;
    using Factor = typename Multiplied::Factor;
    using Word = typename Multiplied::Word;

public:
    Attention(const Cache& cache, const Step& written, const Step& step, const Call& call, bool half_query)
        : cache(cache), slots(cache, step), written(written), step(step), call(call), half_query(half_query),
          group(call.heads / cache.kv_heads),
          panels((cache.value_dim + WIDTH - 1) / WIDTH), length(steps<Multiplied>(cache.key_dim)),
          score_scale(PAIRED && call.softcap == 0 ? call.scaling : 1) {}

    void run(int threads) const {
        slots.write(written, call);
        long longest = 1;
        for (long s = 0; s < step.sequences; s++) longest = std::max<long>(longest, step.count(s));
        long positions = std::min(longest, std::max(1L, ROWS / group));
        std::vector<Item> items;  // a sequence's heads are adjacent: their keys are in the same pages
        for (long s = 0; s < step.sequences; s++)
            for (long at = 0; at < step.count(s); at += positions)
                for (long h = 0; h < cache.kv_heads; h++)
                    items.push_back({s, at, std::min<long>(positions, step.count(s) - at), h});
        // Longest first, so that threads finish at about the same time.
        auto work = [this](const Item& item) { return item.count * (end(item) - begin(item)); };
        std::stable_sort(items.begin(), items.end(), [=](auto& one, auto& other) { return work(one) > work(other); });
        size_t together = items.size() < size_t(MANY * threads) ? 1 : cache.kv_heads;
        std::atomic<size_t> taken(0);
        Guard guard;
        #pragma omp parallel num_threads(std::clamp<long>(items.size(), 1, threads))
        guard.run([&] {
            Scratch scratch(*this, positions * group);
            WorkQueue queue{items, taken, together};
            while (const Item* item = queue.take()) attend(*item, queue, scratch);
        });
        guard.rethrow();
    }

private:
    struct Item { long sequence, first, count, kv_head; };
    struct Seen { long from, to; };  // visible keys of a tile

    // Items are taken from a counter that all threads share, `together` at a time.
    struct WorkQueue {
        const std::vector<Item>& items;
        std::atomic<size_t>& taken;  // shared by all threads
        const size_t together;
        size_t own = 0;              // the next of this thread's items

        const Item* take() {
            if (own % together == 0) own = taken.fetch_add(together);
            return own < items.size() ? &items[own++] : nullptr;
        }
        // What `take` is likely to return next; another thread may take it first.
        const Item* peek() const {
            size_t next = own % together == 0 ? taken.load() : own;
            return next < items.size() ? &items[next] : nullptr;
        }
    };

    // Addresses of some of an item's keys and values.
    struct Tile {
        const Stored *keys[TILE], *values[TILE];
        const uint16_t *key_scales[CODED ? TILE : 1], *value_scales[CODED ? TILE : 1];
        long count;
    };

    struct Scratch {
        std::vector<Factor> query, paired;
        std::vector<float> scores, sums, out, highest, total, key_scales, value_scales;
        std::vector<Word> memory;
        Tile tiles[2], *tile = tiles, *next = tiles + 1;  // multiplied now, and prefetched
        Word *keys, *values;  // panels [TILE / 16][steps(key_dim)][16] and [panels][steps(TILE)][16], aligned
        Scratch(const Attention& a, long rows)
            : query(rows * a.length), paired(PAIRED * PASS * steps<Multiplied>(TILE)), scores(!PAIRED * PASS * TILE),
              sums(!PAIRED * PASS * a.panels * WIDTH), out(rows * a.panels * WIDTH), highest(rows),
              total(rows * WIDTH), key_scales(CODED * TILE), value_scales(CODED * TILE),
              memory(TILE * a.length + a.panels * WIDTH * steps<Multiplied>(TILE) + LINE / sizeof(Word)) {
            keys = at_line(memory.data());
            values = keys + TILE * a.length;
        }
        // Scores become weights in place, unless weights have another type.
        Factor* weights() {
            if constexpr (PAIRED) return paired.data();
            else return scores.data();
        }
    };

    const Cache& cache;
    const Slots slots;
    const Step &written, &step;  // tokens whose keys and values are new, and tokens that attend
    const Call& call;
    const bool half_query;
    const long group, panels, length;  // query heads per KV head; panels of a value; factors of a key
    const float score_scale;           // applied to scores when they become weights

    long token(const Item& item) const { return step.first(item.sequence) + item.first; }
    long position(const Item& item) const { return step.start(item.sequence) + item.first; }
    long end(const Item& item) const { return position(item) + item.count; }

    // Position at which an item's first tile begins.
    long begin(const Item& item) const {
        const int64_t* visible = call.visible + token(item);
        return *std::min_element(visible, visible + item.count) / TILE * TILE;
    }

    // While a tile is multiplied the next one is prefetched; after the last tile, the first tile of the next item.
    void attend(const Item& item, const WorkQueue& queue, Scratch& scratch) const {
        long rows = item.count * group, end = this->end(item);
        long token = this->token(item), position = this->position(item);
        read_query(item, token, scratch);
        std::fill_n(scratch.highest.begin(), rows, LOWEST);
        std::fill_n(scratch.total.begin(), rows * WIDTH, 0.0f);
        std::fill_n(scratch.out.begin(), rows * panels * WIDTH, 0.0f);
        long passes = (rows + PASS - 1) / PASS;
        find(item, begin(item), *scratch.tile);
        for (long base = begin(item); base < end; base += TILE, std::swap(scratch.tile, scratch.next)) {
            if (base + TILE < end) find(item, base + TILE, *scratch.next);
            else if (const Item* then = queue.peek()) find(*then, begin(*then), *scratch.next);
            else scratch.next->count = 0;
            auto seen = [&](long r) {  // by row r
                long own = position + r / group, visible = call.visible[token + r / group];
                long from = std::clamp(visible - base, 0L, TILE);
                return Seen{from, std::clamp(own + 1 - base, from, TILE)};
            };
            if constexpr (CODED) read_scales(scratch);
            if constexpr (!PAIRED) if (rows <= SMALL_BATCH && cache.key_dim % 8 == 0 && cache.value_dim % 8 == 0) {
                score_small_batch(rows, scratch);
                for (long r = 0; r < rows; r++) weigh(r, r, seen(r), scratch);
                mix_small_batch(rows, scratch);
                continue;
            }
            pack_keys(scratch);
            for (long pass = 0; pass < passes; pass++) {
                long r = rows * pass / passes, some = rows * (pass + 1) / passes - r;
                if constexpr (PAIRED) {
                    weigh_pairs(r, some, seen, scratch);
                } else {
                    score(r, some, scratch);
                    for (long n = 0; n < some; n++) weigh(r + n, n, seen(r + n), scratch);
                }
                if (!pass) pack_values(scratch);
                mix(r, some, scratch);
            }
        }
        finish(item, token, scratch);
    }

    void read_query(const Item& item, long token, Scratch& scratch) const {
        for (long r = 0; r < item.count * group; r++) {
            long at = (token + r / group) * call.query_token + (item.kv_head * group + r % group) * call.query_head;
            Factor* to = &scratch.query[r * length];
            if constexpr (PAIRED) pack_row<BFloat16>(static_cast<const uint16_t*>(call.query) + at, cache.key_dim, to);
            else for (long d = 0; d < cache.key_dim; d++)
                to[d] = call.scaling * (half_query ? widen(static_cast<const uint16_t*>(call.query)[at + d])
                                                   : static_cast<const float*>(call.query)[at + d]);
        }
    }

    // The tile that begins at position `base`.
    void find(const Item& item, long base, Tile& tile) const {
        tile.count = std::min(TILE, end(item) - base);
        for (long j = 0; j < tile.count;) {  // one block each time
            const Stored* key = slots.at(item.sequence, base + j, cache.keys, cache.key_dim, item.kv_head);
            const Stored* value = slots.at(item.sequence, base + j, cache.values, cache.value_dim, item.kv_head);
            long stop = std::min(tile.count, j + cache.block_size - (base + j) % cache.block_size);
            if constexpr (CODED) {
                const uint16_t* key_scale = slots.scale_at(item.sequence, base + j, cache.key_scales, item.kv_head);
                const uint16_t* value_scale = slots.scale_at(item.sequence, base + j, cache.value_scales, item.kv_head);
                for (long n = j; n < stop; n++, key_scale += cache.kv_heads, value_scale += cache.kv_heads)
                    tile.key_scales[n] = key_scale, tile.value_scales[n] = value_scale;
            }
            for (; j < stop; j++, key += cache.kv_heads * cache.key_dim, value += cache.kv_heads * cache.value_dim)
                tile.keys[j] = key, tile.values[j] = value;
        }
    }

    // Prefetches keys or values [from, to) of the next tile into the second-level cache: a core has few buffers for
    // misses of the first level.
    template <class E>
    static void prefetch(const Tile& next, const E* const* rows, long from, long to, long dim) {
        for (long j = from; j < std::min(to, next.count); j++)
            for (long at = 0; at < dim; at += 64 / sizeof(E))
                _mm_prefetch(reinterpret_cast<const char*>(rows[j] + at), _MM_HINT_T1);
    }

    void prefetch_keys(const Scratch& scratch, long from, long to) const {
        prefetch(*scratch.next, scratch.next->keys, from, to, cache.key_dim);
        if constexpr (CODED) prefetch(*scratch.next, scratch.next->key_scales, from, to, 1);
    }

    void prefetch_values(const Scratch& scratch, long from, long to) const {
        prefetch(*scratch.next, scratch.next->values, from, to, cache.value_dim);
        if constexpr (CODED) prefetch(*scratch.next, scratch.next->value_scales, from, to, 1);
    }

    void read_scales(Scratch& scratch) const {
        const Tile& tile = *scratch.tile;
        for (long j = 0; j < TILE; j++) {
            bool exists = j < tile.count;
            scratch.key_scales[j] = exists ? widen(*tile.key_scales[j]) : 0;
            scratch.value_scales[j] = exists ? widen(*tile.value_scales[j]) : 0;
        }
    }

    static float number(Stored stored) {
        if constexpr (CODED) return stored;
        else return T::read(stored);
    }

    void score_small_batch(long rows, Scratch& scratch) const {
        auto& keys = scratch.tile->keys;
        long count = scratch.tile->count;
        for (long j = count; j % 8; j++) keys[j] = keys[count - 1];  // hidden from all
        prefetch_keys(scratch, 0, TILE);
        with_rows<SMALL_BATCH>(rows, [&](auto number) {
            for (long j = 0; j < count; j += 8)
                decant::score<number>(scratch.query.data(), cache.key_dim, keys + j, &scratch.scores[j], TILE);
        });
    }

    void mix_small_batch(long rows, Scratch& scratch) const {
        prefetch_values(scratch, 0, TILE);
        with_rows<SMALL_BATCH>(rows, [&](auto number) {
            mix_all<number>(scratch.scores.data(), TILE, scratch.tile->values, scratch.tile->count, cache.value_dim,
                            scratch.out.data(), panels * WIDTH);
        });
    }

    // Packs the tile's keys as panels, padded with zeros.
    void pack_keys(Scratch& scratch) const {
        auto& keys = scratch.tile->keys;
        long count = scratch.tile->count;
        if constexpr (PAIRED) {
            for (long j = count; j % WIDTH; j++) keys[j] = keys[count - 1];  // hidden from all
            long j = 0;
            for (; j < count; j += WIDTH) {
                prefetch_keys(scratch, j, j + WIDTH);
                pair_keys(keys + j, length, scratch.keys + j * length);
            }
            prefetch_keys(scratch, j, TILE);
        } else {
            prefetch_keys(scratch, 0, TILE);
            if (count < TILE) std::fill_n(scratch.keys, TILE * cache.key_dim, 0.0f);
            long j = 0;
            for (; j + 8 <= count; j += 8) pack_eight_keys(keys + j, j, scratch.keys);
            for (; j < count; j++)
                for (long d = 0; d < cache.key_dim; d++) *key_slot(j, d, scratch.keys) = number(keys[j][d]);
        }
    }

    void pack_values(Scratch& scratch) const {
        auto& values = scratch.tile->values;
        long count = scratch.tile->count;
        if (count < TILE || cache.value_dim % WIDTH)
            std::fill_n(scratch.values, panels * WIDTH * steps<Multiplied>(TILE), Word());
        if constexpr (PAIRED) {
            long j = 0;
            for (; j < count; j += 2) {  // the last of an odd number is paired with itself, at weight zero
                prefetch_values(scratch, j, j + 2);
                for (long p = 0; p < panels; p++)
                    pair_values(values[j] + p * WIDTH, values[std::min(j + 1, count - 1)] + p * WIDTH,
                                scratch.values + (p * TILE / 2 + j / 2) * WIDTH);
            }
            prefetch_values(scratch, j, TILE);
        } else {
            prefetch_values(scratch, 0, TILE);
            for (long j = 0; j < count; j++) {
                long d = 0;
                for (; d + 8 <= cache.value_dim; d += 8) keep(value_slot(j, d, scratch.values), wide(values[j] + d));
                for (; d < cache.value_dim; d++) *value_slot(j, d, scratch.values) = number(values[j][d]);
            }
        }
    }

    // Scores of `some` rows, from row r on, with a tile of keys.
    void score(long r, long some, Scratch& scratch) const {
        multiply<Multiplied>(&scratch.query[r * length], some, length, scratch.keys,
                             (scratch.tile->count + WIDTH - 1) / WIDTH, scratch.scores.data(), TILE);
    }

    // bfloat16 sums continue from tile to tile; a longer chain of float32 would lose bits.
    void mix(long r, long some, Scratch& scratch) const {
        float *out = &scratch.out[r * panels * WIDTH], *sums = PAIRED ? out : scratch.sums.data();
        multiply<Multiplied>(scratch.weights(), some, steps<Multiplied>(TILE), scratch.values, panels, sums,
                             panels * WIDTH, PAIRED);
        if (!PAIRED)
            for (long at = 0; at < some * panels * WIDTH; at++) out[at] += sums[at];
    }

    // Packs eight keys, from key j of a tile on.
    void pack_eight_keys(const Stored* const* from, long j, float* keys) const {
        long d = 0;
        for (; d + 8 <= cache.key_dim; d += 8) {
            __m256 rows[8];
            for (int n = 0; n < 8; n++) rows[n] = wide(from[n] + d);
            transpose(rows);
            for (int n = 0; n < 8; n++) keep(key_slot(j, d + n, keys), rows[n]);
        }
        for (; d < cache.key_dim; d++)
            for (int n = 0; n < 8; n++) *key_slot(j + n, d, keys) = number(from[n][d]);
    }

    float* key_slot(long j, long d, float* keys) const {
        return keys + (j / WIDTH * cache.key_dim + d) * WIDTH + j % WIDTH;
    }

    static float* value_slot(long j, long d, float* values) {
        return values + (d / WIDTH * TILE + j) * WIDTH + d % WIDTH;
    }

    // Turns a row's scores into weights; it is row n of its pass.
    void weigh(long row, long n, Seen seen, Scratch& scratch) const {
        float* scores = &scratch.scores[n * TILE];
        if constexpr (CODED) for (long j = 0; j < TILE; j++) scores[j] *= scratch.key_scales[j];
        if (call.softcap != 0)
            for (long j = 0; j < TILE; j++) scores[j] = capped(scores[j]);
        std::fill(scores, scores + seen.from, HIDDEN);
        std::fill(scores + seen.to, scores + TILE, HIDDEN);
        float highest = raise(row, most(scores, TILE), scratch);
        weigh_all(scores, TILE, highest, scores, &scratch.total[row * WIDTH]);
        if constexpr (CODED) for (long j = 0; j < TILE; j++) scores[j] *= scratch.value_scales[j];
    }

    // Scores and weights of `some` rows, from row r on, for bfloat16.
    template <class F>
    void weigh_pairs(long r, long some, const F& seen, Scratch& scratch) const {
        long groups = (some + SCORED - 1) / SCORED;
        for (long g = 0; g < groups; g++) {
            long n = some * g / groups, count = some * (g + 1) / groups - n;
            with_rows<SCORED>(count, [&](auto number) {
                if (call.softcap == 0) weigh_at_once<number, false>(r + n, n, seen, scratch);
                else weigh_at_once<number, true>(r + n, n, seen, scratch);
            });
        }
    }

    // COUNT is at most SCORED, so all scores stay in registers.
    template <int COUNT, bool CAPPED, class F>
    [[gnu::noinline]] void weigh_at_once(long r, long n, const F& seen, Scratch& scratch) const {
        static_assert(TILE == 64, "a bit for each key");
        Scores<COUNT> scores(&scratch.query[r * length], length, scratch.keys);
        if constexpr (CODED) scores.scale(scratch.key_scales.data());
        #pragma GCC unroll 8
        for (int i = 0; i < COUNT; i++) {
            auto [from, to] = seen(r + i);
            if constexpr (CAPPED) for (auto& sixteen : scores.of[i])
                for (long j = 0; j < WIDTH; j++) sixteen[j] = capped(sixteen[j]);
            if (to - from < TILE) scores.hide(i, ((uint64_t(1) << (to - from)) - 1) << (from % TILE), HIDDEN);
            float highest = raise(r + i, scores.highest(i), scratch);
            uint32_t* paired = &scratch.paired[(n + i) * steps<Multiplied>(TILE)];
            float* total = &scratch.total[(r + i) * WIDTH];
            if constexpr (CODED) scores.weigh(i, highest, score_scale, scratch.value_scales.data(), paired, total);
            else scores.weigh(i, highest, score_scale, paired, total);
        }
    }

    float capped(float score) const {
        return call.softcap * std::tanh((PAIRED ? call.scaling * score : score) / call.softcap);
    }

    // Returns the row's highest score so far; if `score` raises it, earlier sums are scaled down.
    float raise(long row, float score, Scratch& scratch) const {
        float before = scratch.highest[row];
        if (!(score > before)) return before;
        fade(row, exponential((before - score) * score_scale), scratch);
        return scratch.highest[row] = score;
    }

    // Scales a row's sums when its highest score grows. Rare, so it is kept out of the loop.
    [[gnu::noinline]] void fade(long row, float decay, Scratch& scratch) const {
        float *out = &scratch.out[row * panels * WIDTH], *total = &scratch.total[row * WIDTH];
        for (long d = 0; d < panels * WIDTH; d++) out[d] *= decay;
        for (long d = 0; d < WIDTH; d++) total[d] *= decay;
    }

    void finish(const Item& item, long token, const Scratch& scratch) const {
        for (long r = 0; r < item.count * group; r++) {
            long head = item.kv_head * group + r % group;
            const float* totals = &scratch.total[r * WIDTH];
            float highest = scratch.highest[r] * score_scale, decay = 1;
            float total = sum(_mm256_add_ps(wide(totals), wide(totals + WIDTH / 2)));
            if (call.sinks) {
                float most = std::max(highest, call.sinks[head]);
                decay = exponential(highest - most);
                total = total * decay + exponential(call.sinks[head] - most);
            }
            const float* from = &scratch.out[r * panels * WIDTH];
            long at = ((token + r / group) * call.heads + head) * cache.value_dim;
            if (half_query) write_output(from, decay / total, static_cast<uint16_t*>(call.out) + at);
            else write_output(from, decay / total, static_cast<float*>(call.out) + at);
        }
    }

    template <class E>
    void write_output(const float* from, float share, E* to) const {
        for (long d = 0; d < cache.value_dim; d += WIDTH) {
            auto columns = Columns::zeros();
            columns.add(share, Columns::read(from + d));
            E some[WIDTH];
            bool whole = d + WIDTH <= cache.value_dim;
            keep(whole ? to + d : some, columns);
            if (!whole) std::copy_n(some, cache.value_dim - d, to + d);
        }
    }
};

// One layer's attention. Keys and values of the tokens of `written` go to their slots, then the tokens of `step`
// attend: it has the same sequences, each with its last tokens.
template <class T, bool CODED>
void attend(const Cache& cache, const Step& written, const Step& step, const Call& call, bool half_query, int threads) {
    bool words = cache.key_dim * sizeof(typename KvSlots<T, CODED>::Stored) % 4 == 0;
    bool paired = half_query && words && cache.value_dim % WIDTH == 0 && call.scaling > 0;
    if constexpr (WIDE && std::is_same_v<T, BFloat16>)
        if (paired) return Attention<T, true, CODED>(cache, written, step, call, half_query).run(threads);
    Attention<T, false, CODED>(cache, written, step, call, half_query).run(threads);
}

template <class T>
void attend(const Cache& cache, const Step& written, const Step& step, const Call& call, bool half_query, int threads) {
    if (cache.is_coded) attend<T, true>(cache, written, step, call, half_query, threads);
    else attend<T, false>(cache, written, step, call, half_query, threads);
}

}  // namespace decant
