// The sequences of a step as engine/model/step_batch.py lays them out: rows.h writes it, attention reads it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "guard.h"

namespace decant {

// What stands in each line of FlatRows.lines.
enum Line { ORDER, START, END, FIRST, STOP, SAMPLED, LINES };

// Rows of the flattened step are tokens; a sequence's stand together.
struct Step {
    const int64_t* lines;  // [LINES, sequences]
    const int32_t* table;  // [sequences, width] block ids
    int64_t sequences, width;

    int64_t first(int64_t sequence) const { return line(FIRST, sequence); }
    int64_t start(int64_t sequence) const { return line(START, sequence); }  // position of its first token in this step
    int64_t count(int64_t sequence) const { return stop(sequence) - first(sequence); }  // tokens in this step
    int64_t stop(int64_t sequence) const { return line(STOP, sequence); }

  private:
    int64_t line(Line which, int64_t sequence) const { return lines[which * sequences + sequence]; }
};

// Tokens of a step that somebody reads when all layers are through: the last ones of its sequences.
struct Asked {
    const int64_t* places;  // [count] where they stand among the step's tokens, in this order
    int64_t count;
    Step step;              // the same, without all tokens before the first that is asked of a sequence
};

// Whether the sequences cover `tokens` tokens, one after the other, and all their positions lie in blocks that there are.
inline void check(const Step& step, int64_t tokens, int64_t block_size, int64_t blocks) {
    check_count("sequences", step.sequences);
    check_count("width", step.width);
    if (step.sequences) check_address("lines", step.lines);
    if (step.sequences) check_address("table", step.table);
    int64_t next = 0, most = step.width * block_size;
    for (int64_t s = 0; s < step.sequences; s++) {
        check_equal("first", step.first(s), next);
        require(step.count(s) >= 1 && step.stop(s) <= tokens, "stop", "behind its first token, within the step", step.stop(s));
        require(step.start(s) >= 0 && step.start(s) <= most - step.count(s), "start", "positions in the block table",
                step.start(s));
        const int32_t* ids = step.table + s * step.width;
        int64_t needed = (step.start(s) + step.count(s) + block_size - 1) / block_size;
        auto [lowest, highest] = std::minmax_element(ids, ids + needed);
        require(*lowest >= 0, "block", "at least 0", *lowest);
        require(*highest < blocks, "block", "less than the number of blocks", *highest);
        next = step.stop(s);
    }
    check_equal("tokens", next, tokens);
}

// Whether the tokens that are asked for are some of a step's, and the late step a part of it.
inline void check(const Asked& asked, const Step& step, int64_t tokens) {
    check_count("asked", asked.count);
    check_equal("late sequences", asked.step.sequences, step.sequences);
    check_equal("late width", asked.step.width, step.width);
    require(asked.step.table == step.table, "late table", "that of the step", 0);
    if (asked.count) check_address("places", asked.places);
    for (int64_t n = 0, before = -1; n < asked.count; before = asked.places[n++])
        require(before < asked.places[n] && asked.places[n] < tokens, "place", "ascending tokens of the step", asked.places[n]);
    if (step.sequences) check_address("late lines", asked.step.lines);
    for (int64_t s = 0; s < step.sequences; s++) {
        int64_t skipped = asked.step.first(s) - step.first(s);
        check_equal("late stop", asked.step.stop(s), step.stop(s));
        require(skipped >= 0 && skipped <= step.count(s), "late first", "a token of its sequence", asked.step.first(s));
        check_equal("late start", asked.step.start(s), step.start(s) + skipped);
    }
}

}  // namespace decant
