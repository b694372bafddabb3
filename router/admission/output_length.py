"""Prediction of output lengths from recent answers: most end before their ``max_tokens``."""

from __future__ import annotations

import math

from decant.router.admission.request_size import RequestSize

DEVIATIONS = 2.0
"""Standard deviations above the mean: few answers are longer."""
_MEMORY = 64
"""Answers of which a mean consists, about."""


class RecentMoments:
    """Mean and standard deviation of recent values; both are zero before the first."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self._variance = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        weight = 1 / min(self.count, _MEMORY)
        difference = value - self.mean
        self.mean += weight * difference
        self._variance = (1 - weight) * (self._variance + weight * difference * difference)

    @property
    def high(self) -> float:
        return self.mean + DEVIATIONS * math.sqrt(self._variance)


class OutputLengths:
    """Lengths of the answers of one model.

    Where the client sets ``max_tokens``, an answer is a share of it; elsewhere lengths count as they are. While no
    answer has ended, an output is expected to have one token: alone, no request is refused for a guess.
    """

    def __init__(self) -> None:
        self._shares = RecentMoments()
        self._lengths = RecentMoments()

    def add(self, size: RequestSize, tokens: int) -> None:
        """Add a complete answer; one whose length was forced says nothing about others."""
        if size.min_tokens >= size.max_tokens:
            return
        if size.is_limit_set:
            self._shares.add(tokens / size.max_tokens)
        else:
            self._lengths.add(tokens)

    def mean(self, size: RequestSize) -> float:
        expected = self._shares.mean * size.max_tokens if size.is_limit_set else self._lengths.mean
        return _bounded(expected, size)

    def high(self, size: RequestSize) -> float:
        """Length that few answers exceed."""
        expected = self._shares.high * size.max_tokens if size.is_limit_set else self._lengths.high
        return _bounded(expected, size)


def _bounded(tokens: float, size: RequestSize) -> float:
    return float(min(max(1, tokens, size.min_tokens), size.max_tokens))
