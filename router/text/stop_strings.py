"""Texts that end an output, found letter by letter, wherever tokens or messages are cut.

    stop texts "abc", "bd"           text  x a b ...   "ab" is held back: it may become "abc", or hold "b" of "bd"
                                     text  x a b d     "bd" is complete: the output is "xa"

An output ends at the letter that completes a stop text; of several that this letter completes the longest counts. So
where a text is cut depends on the text alone, not on the order of the list nor on how it became tokens.

The search is that of Aho and Corasick (1975): its cost per letter depends neither on how many texts there are nor on
how long they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple


class Scan(NamedTuple):
    """``place``: letters that were read, up to and including the one that completed ``stop``."""

    state: int
    place: int
    stop: str | None


class StopStrings:
    """Some texts of at least one letter. States are ints; 0 is that of a search that begins."""

    __slots__ = ("_depth", "_ends", "_fallback", "_next")

    def __init__(self, texts: Iterable[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._ends: list[str | None] = [None]  # the longest text that ends in this state
        for text in texts:
            self._plant(text)
        self._fallback = [0] * len(self._next)  # the longest end of what was read that is another state
        self._link()

    def scan(self, state: int, text: str) -> Scan:
        """Reads on up to the first letter that completes a stop text, or to the end."""
        nexts, ends = self._next, self._ends
        for place, letter in enumerate(text, 1):
            state = self._step(nexts, state, letter)
            if (found := ends[state]) is not None:
                return Scan(state, place, found)
        return Scan(state, len(text), None)

    def pass_over(self, state: int, text: str) -> int:
        """Reads on to the end; what is completed doesn't count."""
        for letter in text:
            state = self._step(self._next, state, letter)
        while state and not self._next[state]:  # complete, and no beginning of a longer one
            state = self._fallback[state]
        return state

    def held(self, state: int) -> int:
        """How many of the last letters may be the beginning of a stop text."""
        return self._depth[state]

    def _step(self, nexts: list[dict[str, int]], state: int, letter: str) -> int:
        while state and letter not in nexts[state]:
            state = self._fallback[state]
        return nexts[state].get(letter, 0)

    def _plant(self, text: str) -> None:
        state = 0
        for depth, letter in enumerate(text, 1):
            state = self._next[state].setdefault(letter, len(self._next))
            if state == len(self._next):
                self._next.append({})
                self._depth.append(depth)
                self._ends.append(None)
        self._ends[state] = text

    def _link(self) -> None:
        """Shorter states first: each stands on those that are shorter."""
        waiting = deque(self._next[0].values())
        while waiting:
            state = waiting.popleft()
            for letter, after in self._next[state].items():
                waiting.append(after)
                shorter = self._fallback[after] = self._step(self._next, self._fallback[state], letter)
                if self._ends[after] is None:
                    self._ends[after] = self._ends[shorter]
