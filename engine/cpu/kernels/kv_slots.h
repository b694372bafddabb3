// Slots of keys and values in the blocks. They hold numbers of the model's dtype, or codes of one byte with a scale for
// each key and value, as `encode` in engine/model/kv_vectors.py makes them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "call.h"
#include "simd_avx2.h"

namespace decant {

constexpr float MOST_CODE = 127;

// Encodes a key or value of `dim` numbers. One with a number that is not finite gets a scale that is not, and codes 0.
template <class T>
void encode(const typename T::Element* from, long dim, int8_t* codes, uint16_t* scale) {
    uint32_t most = 0;  // bits of the largest magnitude: they are ordered as the numbers are, with NaN above all
    for (long d = 0; d < dim; d++) {
        float number = T::read(from[d]);
        uint32_t bits;
        std::memcpy(&bits, &number, 4);
        most = std::max(most, bits & 0x7fffffff);
    }
    float largest;
    std::memcpy(&largest, &most, 4);
    *scale = narrow(largest / MOST_CODE);
    float divisor = widen(*scale);
    if (divisor == 0 || !std::isfinite(divisor)) return void(std::fill_n(codes, dim, int8_t(0)));
    auto eight = [=](__m256 numbers) {
        __m256 quotients = _mm256_div_ps(numbers, _mm256_set1_ps(divisor));
        __m256 limited = _mm256_max_ps(_mm256_min_ps(quotients, _mm256_set1_ps(MOST_CODE)), _mm256_set1_ps(-MOST_CODE));
        __m256i words = _mm256_cvtps_epi32(limited);  // rounds to nearest, ties to even
        __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
        return _mm_packs_epi16(halves, halves);
    };
    long d = 0;
    for (; d + 8 <= dim; d += 8) _mm_storel_epi64(reinterpret_cast<__m128i*>(codes + d), eight(wide(from + d)));
    if (d == dim) return;
    alignas(16) typename T::Element rest[8] = {};
    alignas(16) int8_t last[16];
    std::copy_n(from + d, dim - d, rest);
    _mm_store_si128(reinterpret_cast<__m128i*>(last), eight(wide(rest)));
    std::copy_n(last, dim - d, codes + d);
}

// Slots of a layer, for the sequences of a step.
template <class T, bool CODED>
struct KvSlots {
    using Element = typename T::Element;
    using Stored = std::conditional_t<CODED, int8_t, Element>;

    const Cache& cache;
    const Step& step;

    KvSlots(const Cache& cache, const Step& step) : cache(cache), step(step) {}

    // Slot of a position in `part`, of `dim` numbers for each head.
    Stored* at(long sequence, long position, long part, long dim, long head) const {
        long block = step.table[sequence * step.width + position / cache.block_size];
        long offset = (position % cache.block_size * cache.kv_heads + head) * dim;
        return static_cast<Stored*>(cache.memory) + block * cache.block_stride + part + offset;
    }

    // Scale of a slot, if CODED: two elements, each of a byte.
    uint16_t* scale_at(long sequence, long position, long part, long head) const {
        return reinterpret_cast<uint16_t*>(at(sequence, position, part, 2, head));
    }

    // Writes the step's keys and values to their slots; from then on they are read like earlier ones.
    void write(const Step& written, const Call& call) const {
        auto from = [](const void* rows, long number) { return static_cast<const Element*>(rows) + number; };
        for (long s = 0; s < written.sequences; s++)
            for (long n = 0; n < written.count(s); n++)
                for (long h = 0; h < cache.kv_heads; h++) {
                    long token = written.first(s) + n, position = written.start(s) + n;
                    const Element* key = from(call.key, token * call.key_token + h * call.key_head);
                    const Element* value = from(call.value, token * call.value_token + h * call.value_head);
                    Stored* key_slot = at(s, position, cache.keys, cache.key_dim, h);
                    Stored* value_slot = at(s, position, cache.values, cache.value_dim, h);
                    if constexpr (CODED) {
                        encode<T>(key, cache.key_dim, key_slot, scale_at(s, position, cache.key_scales, h));
                        encode<T>(value, cache.value_dim, value_slot, scale_at(s, position, cache.value_scales, h));
                    } else {
                        std::copy_n(key, cache.key_dim, key_slot);
                        std::copy_n(value, cache.value_dim, value_slot);
                    }
                }
    }
};

}  // namespace decant
