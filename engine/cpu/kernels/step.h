// The sequences of a step, as FlatBatch in engine/model/step_batch.py: batch_from_python.h writes them, attention reads
// them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "guard.h"

namespace decant {

// Fields of FlatBatch.row_table, one row of it each.
enum RowField { ORDER, START, END, FIRST, STOP, SAMPLED, ROW_FIELDS };

// Tokens of the flattened step are numbered from 0; those of a sequence are contiguous.
struct Step {
    const int64_t* row_table;  // [ROW_FIELDS, sequences]
    const int32_t* table;  // [sequences, width] block ids
    int64_t sequences, width;

    int64_t first(int64_t sequence) const { return field(FIRST, sequence); }
    int64_t start(int64_t sequence) const { return field(START, sequence); }  // position of its first token
    int64_t count(int64_t sequence) const { return stop(sequence) - first(sequence); }
    int64_t stop(int64_t sequence) const { return field(STOP, sequence); }

  private:
    int64_t field(RowField which, int64_t sequence) const { return row_table[which * sequences + sequence]; }
};

// Tokens of a step whose output of the last layer is used.
struct SelectedTokens {
    const int64_t* indices;  // [count] ascending token numbers
    int64_t count;
    Step step;  // the step without each sequence's tokens before its first selected one
};

// The sequences must cover `tokens` tokens in order, and all their positions must be in valid blocks.
inline void check(const Step& step, int64_t tokens, int64_t block_size, int64_t blocks) {
    check_count("sequences", step.sequences);
    check_count("width", step.width);
    if (step.sequences) check_address("row_table", step.row_table);
    if (step.sequences) check_address("table", step.table);
    int64_t next = 0, most = step.width * block_size;
    for (int64_t s = 0; s < step.sequences; s++) {
        check_equal("first", step.first(s), next);
        require(step.count(s) >= 1 && step.stop(s) <= tokens, "stop", "behind its first token, within the step",
                step.stop(s));
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

// Selected tokens must be tokens of the step, and their step ("late" in messages) must be a part of it.
inline void check(const SelectedTokens& selected, const Step& step, int64_t tokens) {
    check_count("selected", selected.count);
    check_equal("late sequences", selected.step.sequences, step.sequences);
    check_equal("late width", selected.step.width, step.width);
    require(selected.step.table == step.table, "late table", "that of the step", 0);
    if (selected.count) check_address("selected indices", selected.indices);
    for (int64_t n = 0, before = -1; n < selected.count; before = selected.indices[n++])
        require(before < selected.indices[n] && selected.indices[n] < tokens, "selected index",
                "ascending tokens of the step", selected.indices[n]);
    if (step.sequences) check_address("late row_table", selected.step.row_table);
    for (int64_t s = 0; s < step.sequences; s++) {
        int64_t skipped = selected.step.first(s) - step.first(s);
        check_equal("late stop", selected.step.stop(s), step.stop(s));
        require(skipped >= 0 && skipped <= step.count(s), "late first", "a token of its sequence",
                selected.step.first(s));
        check_equal("late start", selected.step.start(s), step.start(s) + skipped);
    }
}

}  // namespace decant
