"""Arguments of a call that are a JSON object in the output's text."""

from __future__ import annotations

import re
from typing import NamedTuple

_BRACES = re.compile(r'["{}\\]')


class Reading(NamedTuple):
    """Arguments as JSON, in the first ``length`` characters of a text, and whether they end there."""

    piece: str
    length: int
    is_ended: bool


class JsonObject:
    """Arguments as the model writes them, valid or not; a text begins with their brace."""

    __slots__ = ("_end",)

    def __init__(self, parameters: str) -> None:
        self._end = ObjectEnd(0)

    def read(self, text: str, *, is_over: bool) -> Reading:
        """Read what follows the text that was read before."""
        end = self._end.find(text)
        length = len(text) if end is None else end
        self._end.position -= length
        return Reading(text[:length], length, end is not None)


class ObjectEnd:
    """Search for the end of a JSON object, valid or not, in text that grows."""

    __slots__ = ("_depth", "_in_text", "begin", "position")

    def __init__(self, begin: int) -> None:
        self.begin = begin
        """Position of the object's brace."""
        self.position = begin
        """Where the search goes on."""
        self._depth = 0
        self._in_text = False

    def find(self, text: str) -> int | None:
        while (found := _BRACES.search(text, self.position)) is not None:
            self.position = found.end()
            letter = found[0]
            if letter == "\\":
                self.position += self._in_text
            elif letter == '"':
                self._in_text = not self._in_text
            elif not self._in_text:
                self._depth += 1 if letter == "{" else -1
                if self._depth == 0:
                    return self.position
        self.position = max(self.position, len(text))
        return None
