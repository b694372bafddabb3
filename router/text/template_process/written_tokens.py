"""Search for the tokens that a template wrote in a rendered text: control tokens no part of which is content.

Where the origin is unknown, a token counts as the template's unless some content contains it, in any case of letters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from decant.router.text.template_process.marked_text import CONTENT, UNKNOWN, MarkedText, runs_of


class TokenSearch:
    """Search for tokens: the first in a text, of those the longest; ``others`` can't be part of the ones found."""

    def __init__(self, tokens: Sequence[str], others: Sequence[str] = ()) -> None:
        self._index: Mapping[str, int | None] = {**dict.fromkeys(others), **{text: i for i, text in enumerate(tokens)}}
        self._lengths = sorted({len(token) for token in self._index}, reverse=True)
        first = "".join(re.escape(letter) for letter in {token[0] for token in self._index})
        self._first = re.compile(f"[{first}]" if first else "(?!)")

    def find(self, text: str, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield start, end and index of each token in ``text[start:end]``."""
        while (match := self._first.search(text, start, end)) is not None:
            start = match.start()
            for length in self._lengths:
                token = text[start : start + length]
                if start + length <= end and token in self._index:
                    index = self._index[token]
                    if index is not None:
                        yield start, start + length, index
                    start += length
                    break
            else:
                start += 1


def written_tokens(search: TokenSearch, text: MarkedText, contents: Sequence[str]) -> list[int]:
    """Position and index of each token that the template wrote, in pairs."""
    plain = str.__str__(text)  # without marks: searches slice it
    forged = _Forged(contents)
    written: list[int] = []
    for start, end, unknown in _regions(text):
        for begin, after, index in search.find(plain, start, end):
            is_uncertain = any(begin < unknown_end and unknown_start < after for unknown_start, unknown_end in unknown)
            if not (is_uncertain and forged.has(plain[begin:after])):
                written += (begin, index)
    return written


def _regions(text: MarkedText) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
    """Parts without content, each with what is of unknown origin in it."""
    start = position = 0
    unknown: list[tuple[int, int]] = []
    for length, origin in (*runs_of(text), (0, CONTENT)):
        if origin == CONTENT:
            if position > start:
                yield start, position, unknown
            start, unknown = position + length, []
        elif origin == UNKNOWN:
            unknown.append((position, position + length))
        position += length


class _Forged:
    """Tokens that contents contain."""

    def __init__(self, contents: Sequence[str]) -> None:
        self._contents = contents
        self._known: dict[str, bool] = {}

    def has(self, token: str) -> bool:
        if token not in self._known:
            lower = token.lower()
            self._known[token] = any(lower in str.lower(content) for content in self._contents)
        return self._known[token]
