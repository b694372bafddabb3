"""Which running sequences a decode worker should hand to another one.

A step takes longer with each sequence of its batch, by p seconds for each of them. With a sequences here and b there,
the move of one saves 2 p (a - b - 1) seconds of waiting, over both batches, at every later step; it costs the pause of
the moved sequence. How many steps follow is unknown: as many as it has had is the usual guess for lengths that vary
widely, at most those that it may still have.
"""

from __future__ import annotations

from dataclasses import dataclass

MIN_DIFFERENCE = 4
"""Sequences by which the larger batch is ahead before any moves."""
MAX_MOVES = 8
"""Sequences that move at once."""
MARGIN = 2.0
"""Times by which the gain exceeds the cost: both are estimates."""
ASSUMED_TRANSFER_S = 0.2
"""Pause of a move while none was measured."""


@dataclass(frozen=True, slots=True)
class BatchMove:
    """A move of sequences from a batch of ``here`` to one of ``there``."""

    here: int
    there: int
    step_s_per_sequence: float

    @property
    def count(self) -> int:
        """Sequences to move: half of the difference, unless the batches are large and nearly equal."""
        difference = self.here - self.there
        if difference < max(MIN_DIFFERENCE, self.here / 2):
            return 0
        return min(difference // 2, MAX_MOVES)

    def is_worth(self, steps_left: int, transfer_s: float | None) -> bool:
        saved_s = 2 * self.step_s_per_sequence * (self.here - self.there - 1) * steps_left
        return saved_s > MARGIN * (ASSUMED_TRANSFER_S if transfer_s is None else transfer_s)


def expected_steps(generated: int, limit: int) -> int:
    """Steps that are likely left to a sequence with ``generated`` output tokens, which may have ``limit`` more."""
    return min(generated, limit)
