// The sequences of a step as engine/flat.py lays them out: rows.h writes it, attention reads it.
#pragma once

#include <cstdint>

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
    int64_t count(int64_t sequence) const { return line(STOP, sequence) - line(FIRST, sequence); }  // tokens in this step

  private:
    int64_t line(Line which, int64_t sequence) const { return lines[which * sequences + sequence]; }
};

// Tokens of a step that somebody reads when all layers are through: the last ones of its sequences.
struct Asked {
    const int64_t* places;  // [count] where they stand among the step's tokens, in this order
    int64_t count;
    Step step;              // the same, without all tokens before the first that is asked of a sequence
};

}  // namespace decant
