// A row's likeliest token, and a token sampled from the softmax of its scores. See engine/cpu/sampler.py.
//
//     allowed  -> scores: minus infinity for each token whose bit is not set
//     scores   -> weights e^((score - highest) / temperature): the highest is 1
//     weights  -> the lowest that top-k, top-p and min-p keep: counts and sums of bins by size, then one bin is sorted
//     number   -> the token where the running sum of kept weights passes that fraction: first the share, then the token
#pragma once

#include <functional>
#include <limits>
#include <numeric>
#include <vector>

#include "guard.h"
#include "simd_avx2.h"

namespace decant {

constexpr long SHARE = 1024;   // scores or weights reduced at a time
constexpr int BIN_SHIFT = 20;  // a bin: weights with the same exponent and three first bits of the fraction
constexpr long BINS = 0x3f800000 >> BIN_SHIFT;  // the bin of weight 1, the highest

inline float value(float score) { return score; }
inline float value(uint16_t score) { return widen(score); }

struct Highest {
    float score;  // NaN if any score is NaN
    long index;   // of the first that has this score
};

// Reads scores once, and the share with the highest a second time.
template <class E>
Highest highest(const E* scores, long count) {
    constexpr float LOWEST = -std::numeric_limits<float>::infinity();
    float best = LOWEST;
    long piece = 0;
    __m256 none = _mm256_setzero_ps();
    for (long from = 0; from < count; from += SHARE) {
        long to = std::min(from + SHARE, count), whole = from + (to - from) / 8 * 8;
        __m256 lanes = _mm256_set1_ps(LOWEST);
        for (long at = from; at < whole; at += 8) {
            __m256 eight = wide(scores + at);
            none = _mm256_or_ps(none, _mm256_cmp_ps(eight, eight, _CMP_UNORD_Q));
            lanes = _mm256_max_ps(lanes, eight);
        }
        float each[8];
        keep(each, lanes);
        float most = *std::max_element(each, each + 8);
        for (long at = whole; at < to; at++) {
            float one = value(scores[at]);
            if (one != one) return {one, at};
            most = std::max(most, one);
        }
        if (most > best) best = most, piece = from;
    }
    if (_mm256_movemask_ps(none)) return {std::numeric_limits<float>::quiet_NaN(), 0};
    while (value(scores[piece]) != best) piece++;
    return {best, piece};
}

// The highest of each row; rows are `stride` numbers apart. Returns whether all of them are finite.
template <class E>
bool highest(const E* rows, float* scores, int64_t* indices, long count, long vocabulary, long stride, int threads) {
    #pragma omp parallel for num_threads(std::clamp<long>(count, 1, threads)) schedule(dynamic, 1)
    for (long r = 0; r < count; r++) {
        Highest top = highest(rows + r * stride, vocabulary);
        scores[r] = top.score;
        indices[r] = top.index;
    }
    return std::all_of(scores, scores + count, [](float score) { return std::isfinite(score); });
}

// A row and its sampling parameters. As _DRAW in engine/cpu/sampler.py.
struct DrawRequest {
    const void* scores;  // [vocabulary]
    int64_t half;        // 1: bfloat16, 0: float32
    int64_t top_k;       // 0: all
    double top_p, min_p, temperature, number;  // temperature 0: the first token with the highest score
    const uint32_t* allowed;  // null: all; else a bit for each token, and none for those beyond `words`
    int64_t words;
};

inline void check(const DrawRequest& row) {
    check_address("scores", row.scores);
    require(row.half == 0 || row.half == 1, "half", "0 or 1", row.half);
    check_count("top_k", row.top_k);
    check_count("words", row.words);
    require(row.allowed || !row.words, "words", "0 without allowed tokens", row.words);
    auto within = [](const char* field, double value, double least, double most) {
        if (!(least <= value && value <= most)) throw std::invalid_argument(std::string(field) + ": out of range");
    };
    within("top_p", row.top_p, 0, 1);
    within("min_p", row.min_p, 0, 1);
    within("number", row.number, 0, 1);
    within("temperature", row.temperature, 0, std::numeric_limits<float>::max());
}

class Draw {
public:
    // The sampled token, an index into `count` scores.
    long token(const DrawRequest& row, long count) {
        return row.half ? allowed_token(row, static_cast<const uint16_t*>(row.scores), count)
                        : allowed_token(row, static_cast<const float*>(row.scores), count);
    }

private:
    std::vector<float> masked, weights, members;
    std::vector<double> ends, mass;
    std::vector<long> counts;

    template <class E>
    long allowed_token(const DrawRequest& row, const E* scores, long count) {
        if (!row.allowed) return token(row, scores, count);
        mask(row, scores, count);
        return token(row, static_cast<const float*>(masked.data()), count);
    }

    // Writes the scores to `masked`, 8 tokens of a mask's byte at a time.
    template <class E>
    void mask(const DrawRequest& row, const E* scores, long count) {
        constexpr float OFF = -std::numeric_limits<float>::infinity();
        masked.resize(count);
        const uint8_t* bytes = reinterpret_cast<const uint8_t*>(row.allowed);
        long known = std::min<long>(row.words, (count + 31) / 32) * 4, whole = std::min(known, count / 8);
        const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
        const __m256 off = _mm256_set1_ps(OFF);
        for (long byte = 0; byte < whole; byte++) {
            __m256i set = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(bytes[byte]), bit), bit);
            keep(&masked[8 * byte], _mm256_blendv_ps(off, wide(scores + 8 * byte), _mm256_castsi256_ps(set)));
        }
        for (long at = 8 * whole; at < count; at++)
            masked[at] = at < 8 * known && bytes[at / 8] >> at % 8 & 1 ? value(scores[at]) : OFF;
    }

    template <class E>
    long token(const DrawRequest& row, const E* scores, long count) {
        Highest top = highest(scores, count);
        if (row.temperature == 0) return top.index;
        if (!std::isfinite(top.score)) throw std::invalid_argument("scores: a highest one that is finite");
        weigh(scores, count, top.score, float(row.temperature));
        float lowest = float(row.min_p);
        if ((0 < row.top_k && row.top_k < count) || row.top_p < 1) lowest = std::max(lowest, cut(row));
        return find(lowest, row.number);
    }

    // Zeros fill the last share.
    template <class E>
    void weigh(const E* scores, long count, float highest, float temperature) {
        weights.resize((count + SHARE - 1) / SHARE * SHARE);
        __m256 top = _mm256_set1_ps(highest), heat = _mm256_set1_ps(temperature);
        auto weight = [=](__m256 score) { return exponential(_mm256_div_ps(_mm256_sub_ps(score, top), heat)); };
        long whole = count / 8 * 8;
        for (long at = 0; at < whole; at += 8) keep(&weights[at], weight(wide(scores + at)));
        for (long at = whole; at < count; at++)
            weights[at] = _mm256_cvtss_f32(weight(_mm256_set1_ps(value(scores[at]))));
        std::fill(weights.begin() + count, weights.end(), 0.0f);
    }

    static long bin(float weight) {
        uint32_t word;
        std::memcpy(&word, &weight, 4);
        return word >> BIN_SHIFT;
    }

    // The lowest weight that top-k and top-p keep.
    float cut(const DrawRequest& row) {
        counts.assign(BINS + 1, 0);
        mass.assign(BINS + 1, 0.0);
        for (float weight : weights) {
            counts[bin(weight)]++;
            mass[bin(weight)] += weight;
        }
        Kept kept{0, std::accumulate(mass.begin(), mass.end(), 0.0)};
        if (row.top_k > 0) kept = first(row.top_k);
        return row.top_p < 1 ? std::max(kept.lowest, likeliest(row.top_p * kept.sum)) : kept.lowest;
    }

    struct Kept { float lowest; double sum; };

    // The k highest weights, and all equal to the last of them. Weights of bin 0 are zero: all of them may stay.
    Kept first(long k) {
        double sum = 0;
        for (long b = BINS; b > 0; b--) {
            if (counts[b] >= k) {
                sort(b);
                float lowest = members[k - 1];
                for (float one : members) sum += one >= lowest ? one : 0;
                return {lowest, sum};
            }
            k -= counts[b];
            sum += mass[b];
        }
        return {0, sum + mass[0]};
    }

    // Lowest of the fewest weights, highest first, whose sum reaches `enough`.
    float likeliest(double enough) {
        for (long b = BINS; b > 0; b--) {
            if (mass[b] >= enough) {
                sort(b);
                size_t at = 0;
                while (at + 1 < members.size() && members[at] < enough) enough -= members[at++];
                return members[at];
            }
            enough -= mass[b];
        }
        return 0;
    }

    // Sorts a bin's weights into `members`, highest first.
    void sort(long b) {
        members.clear();
        for (float weight : weights)
            if (bin(weight) == b) members.push_back(weight);
        std::sort(members.begin(), members.end(), std::greater<float>());
    }

    // The index where the running sum of the weights of at least `lowest` passes the fraction `number` of their sum.
    long find(float lowest, double number) {
        ends.clear();
        double sum = 0;
        for (size_t share = 0; share < weights.size(); share += SHARE)
            ends.push_back(sum += kept(&weights[share], lowest));
        double target = number * sum;
        long share = std::min<long>(std::upper_bound(ends.begin(), ends.end(), target) - ends.begin(), ends.size() - 1);
        while (share > 0 && ends[share] == ends[share - 1]) share--;  // a share without kept weights
        double before = share ? ends[share - 1] : 0;
        double part = (target - before) / (ends[share] - before);
        const float* from = &weights[share * SHARE];
        double within = 0, passed = 0;
        for (long at = 0; at < SHARE; at++) within += from[at] >= lowest ? from[at] : 0;
        long last = 0;
        for (long at = 0; at < SHARE; at++) {
            if (from[at] < lowest || from[at] == 0) continue;
            last = at;
            if ((passed += from[at]) > part * within) break;
        }
        return share * SHARE + last;
    }

    // The sum of a share's weights of at least `lowest`.
    static double kept(const float* from, float lowest) {
        __m256 lanes = _mm256_setzero_ps(), least = _mm256_set1_ps(lowest);
        for (long at = 0; at < SHARE; at += 8) {
            __m256 weight = _mm256_loadu_ps(from + at);
            lanes = _mm256_add_ps(lanes, _mm256_and_ps(weight, _mm256_cmp_ps(weight, least, _CMP_GE_OQ)));
        }
        return sum(lanes);
    }
};

// Samples a token for each row into `tokens`; rows are independent.
inline void draw(const DrawRequest* rows, int64_t* tokens, long count, long vocabulary, int threads) {
    for (long r = 0; r < count; r++) check(rows[r]);
    Guard guard;
    #pragma omp parallel for num_threads(std::clamp<long>(count, 1, threads)) schedule(dynamic, 1)
    for (long r = 0; r < count; r++)
        guard.run([&] {
            static thread_local Draw drawer;  // reuses its memory
            tokens[r] = drawer.token(rows[r], vocabulary);
        });
    guard.rethrow();
}

}  // namespace decant
