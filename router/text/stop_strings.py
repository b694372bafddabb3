"""Search for stop strings in generated text, however tokens divide it.

    stop strings "abc", "bd"    text  x a b ...   "ab" is held back: it may become "abc", or hold "b" of "bd"

An output ends at the character that completes a stop string; if it completes several, the longest counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Match(NamedTuple):
    end: int
    stop: str


class StopStrings:
    __slots__ = ("_first", "_longest_prefix", "_prefixes", "texts")

    def __init__(self, stops: Iterable[str]) -> None:
        self.texts = tuple(stops)
        self._prefixes = frozenset(stop[:length] for stop in self.texts for length in range(1, len(stop)))
        self._first = frozenset(stop[0] for stop in self.texts)
        self._longest_prefix = max(map(len, self.texts), default=1) - 1

    def find(self, text: str, start: int) -> Match | None:
        """Find a stop string that ends after ``text[:start]``; it may begin before."""
        best = None
        for stop in self.texts:
            begin = text.find(stop, max(0, start - len(stop) + 1))
            if begin >= 0:
                match = Match(begin + len(stop), stop)
                if best is None or (match.end, -len(stop)) < (best.end, -len(best.stop)):
                    best = match
        return best

    def held_length(self, text: str) -> int:
        for begin in range(max(0, len(text) - self._longest_prefix), len(text)):
            if text[begin] in self._first and text[begin:] in self._prefixes:
                return len(text) - begin
        return 0
