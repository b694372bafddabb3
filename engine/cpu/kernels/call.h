// Arguments of an attention call, as structs of engine/cpu/attention.py, and their checks.
#pragma once

#include <cstdint>

#include "guard.h"
#include "step.h"

namespace decant {

// One layer of the KV blocks, as KvStore in engine/model/kv_store.py describes it. Strides and offsets are in elements:
// numbers of the model's dtype, or codes of one byte, of which each key and value has its scale, a bfloat16.
struct Cache {
    void* memory;
    int64_t block_stride, block_size, keys, values, kv_heads, key_dim, value_dim;
    int64_t blocks;  // block ids are smaller than this
    int64_t is_coded, key_scales, value_scales;
};

inline void check(const Cache& cache) {
    check_address("cache", cache.memory);
    check_positive("block_size", cache.block_size);
    check_positive("kv_heads", cache.kv_heads);
    check_positive("key_dim", cache.key_dim);
    check_positive("value_dim", cache.value_dim);
    check_positive("blocks", cache.blocks);
    int64_t slots = cache.block_size * cache.kv_heads, stride = cache.block_stride;
    require(cache.keys >= 0 && cache.keys + slots * cache.key_dim <= stride, "keys", "within a block", cache.keys);
    require(cache.values >= 0 && cache.values + slots * cache.value_dim <= stride, "values", "within a block",
            cache.values);
    if (!cache.is_coded) return;
    require(stride % 2 == 0, "block_stride", "an even number", stride);
    for (int64_t scales : {cache.key_scales, cache.value_scales})
        require(scales >= 0 && scales % 2 == 0 && scales + 2 * slots <= stride, "scales",
                "at an even offset within a block", scales);
}

// One layer's call. Queries, keys and values are [tokens, heads, dim] with strides `*_token` and `*_head`.
struct Call {
    const void *query, *key, *value;
    void* out;                  // [tokens, heads, value_dim]; may be `query`: a row is read before it is written
    const float* sinks;         // [heads], or null
    const int64_t* visible;     // [tokens] position of the first key that each token sees
    int64_t query_token, query_head, key_token, key_head, value_token, value_head, heads;
    float scaling, softcap;     // softcap 0: none
    int64_t tokens;
};

// Each token's first visible position must be at most its own.
inline void check_visible(const int64_t* visible, const Step& step) {
    if (step.sequences) check_address("visible", visible);
    for (int64_t s = 0; s < step.sequences; s++)
        for (int64_t n = 0; n < step.count(s); n++) {
            int64_t from = visible[step.first(s) + n];
            require(from >= 0 && from <= step.start(s) + n, "visible", "a position up to the token's own", from);
        }
}

// The step must have been checked.
inline void check(const Call& call, const Cache& cache, const Step& step) {
    require(call.heads >= 1 && call.heads % cache.kv_heads == 0, "heads", "a multiple of kv_heads", call.heads);
    for (int64_t stride : {call.query_token, call.query_head, call.key_token, call.key_head, call.value_token,
                           call.value_head})
        check_count("stride", stride);
    if (call.tokens) for (const void* one : {call.query, call.key, call.value, static_cast<const void*>(call.out)})
        check_address("query, key, value or out", one);
    check_visible(call.visible, step);
}

}  // namespace decant
