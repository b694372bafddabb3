"""The experiment of static against continuous batching, on the engine of this process.

queues ──┬──> slots: useful sequences per step, by arithmetic
         └──> contenders: real steps ──> runs: answers and steps ──> experiment ──> reports
curve: steps of 1 to 128 sequences ──────────────────────────────────┘
"""
