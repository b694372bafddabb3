"""How long steps take, by size: what tells a stuck step from a long one."""

from __future__ import annotations


class StepDurations:
    """The longest step of each size class so far. Written by the engine's thread, read from any.

    A class is a power of two of tokens: 1, 2 to 3, 4 to 7 and so on.
    """

    def __init__(self) -> None:
        self._longest: dict[int, float] = {}

    def note(self, tokens: int, seconds: float) -> None:
        """A step of ``tokens`` tokens took ``seconds``."""
        size = tokens.bit_length()
        if seconds > self._longest.get(size, 0.0):
            self._longest[size] = seconds

    def longest(self, tokens: int) -> float:
        """Seconds of the longest step of that size; of the next larger size that was seen where none of it was,
        else of the largest. 0 before the first step."""
        size, known = tokens.bit_length(), dict(self._longest)
        larger = min((other for other in known if other >= size), default=max(known, default=0))
        return known.get(larger, 0.0)
