"""Measured capacity of a model's workers, as the forecast of a new request uses it."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PoolCapacity:
    """Rates of the usable workers together; seconds and tokens.

    A decode step takes ``step_s`` and ``step_s_per_sequence`` for each sequence of its batch, so that more sequences
    make every output slower.
    """

    decode_workers: int = 0
    batch_limit: int = 0
    """Sequences in the batches of all decode workers."""
    step_s: float = 0.0
    step_s_per_sequence: float = 0.0
    prompt_tokens_per_s: float = math.inf
    queued_prompt_tokens: int = 0
    """Uncached prompt tokens at the workers."""
    other_sequences: int = 0
    """Sequences of other routers."""

    def seconds_per_token(self, sequences: float) -> float:
        """Seconds for the next token of each of ``sequences``, which the decode workers share evenly."""
        if not self.decode_workers:
            return 0.0
        return self.step_s + self.step_s_per_sequence * min(sequences, self.batch_limit) / self.decode_workers

    def tokens_per_s(self, sequences: float) -> float:
        """Output tokens of all ``sequences`` together."""
        seconds = self.seconds_per_token(sequences)
        return min(sequences, self.batch_limit) / seconds if seconds else math.inf

    def sequences_within(self, seconds_per_token: float) -> float:
        """Sequences that leave each a token within ``seconds_per_token``."""
        left = seconds_per_token - self.step_s
        if left < 0:
            return 0.0
        return self.decode_workers * left / self.step_s_per_sequence if self.step_s_per_sequence else math.inf
