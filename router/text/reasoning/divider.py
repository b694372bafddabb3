"""Division of an output's tokens into reasoning, answer, and what is neither."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from typing import NamedTuple

from decant.router.text.reasoning.formats import Reasoning


class Part(Enum):
    REASONING = "reasoning"
    ANSWER = "answer"
    MARKER = "marker"


class Piece(NamedTuple):
    part: Part
    tokens: Sequence[int]


class ReasoningDivider:
    """Divides tokens as they arrive: those that may become a marker are held back."""

    def __init__(self, reasoning: Reasoning) -> None:
        markers = reasoning.markers
        self._begin, self._end = markers.begin, markers.end
        self._headers = set(reasoning.headers)
        self._sequences = sorted({markers.begin, *reasoning.dropped, *self._headers}, key=len, reverse=True)
        self._prefixes = {marker[:count] for marker in self._sequences for count in range(1, len(marker))}
        self._is_open = markers.is_open
        self._begins_part = True
        self._held: tuple[int, ...] = ()

    def add(self, tokens: Sequence[int]) -> list[Piece]:
        """Pieces of the tokens, in order; what is left is held back."""
        self._held = (*self._held, *tokens)
        return list(self._pieces())

    def finish(self) -> Sequence[int]:
        """What was held back, of the answer."""
        held, self._held = self._held, ()
        return held

    def _pieces(self) -> Iterator[Piece]:
        begin = place = 0
        held = self._held
        while place < len(held):
            marker = self._marker_at(place)
            if marker is None:  # more tokens decide
                break
            if marker:
                if place > begin:
                    yield Piece(self._part, held[begin:place])
                yield Piece(Part.MARKER, marker)
                self._is_open = marker == self._begin if not self._is_open else False
                begin = place + len(marker)
            self._begins_part = bool(marker)
            place += len(marker) or 1
        if place > begin:
            yield Piece(self._part, held[begin:place])
        self._held = held[place:]

    @property
    def _part(self) -> Part:
        return Part.REASONING if self._is_open else Part.ANSWER

    def _marker_at(self, place: int) -> tuple[int, ...] | None:
        """The marker that begins there, or none; None: more tokens decide."""
        held = self._held
        if self._is_open:
            return (self._end,) if held[place] == self._end else ()
        rest = held[place : place + len(self._sequences[0])]
        if place + len(rest) == len(held) and rest in self._prefixes:
            return None
        found = next((marker for marker in self._sequences if rest[: len(marker)] == marker), ())
        return () if found in self._headers and not self._begins_part else found
