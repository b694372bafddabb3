"""A text that knows the origin of each of its parts, through everything that a template does with it.

    TEMPLATE  the template's constants, and what it gets from the model's files
    CONTENT   what a request sends
    UNKNOWN   neither is known: a filter or format made a new text

Equal texts are equal whatever their origins: a template renders what it would render without them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, SupportsIndex

TEMPLATE, UNKNOWN, CONTENT = range(3)

Runs = Sequence[tuple[int, int]]
"""Length and origin of each part, none empty."""


class MarkedText(str):
    """Methods that are not defined here return a plain text, whose origin is unknown."""

    __slots__ = ("_runs",)

    _runs: Runs

    def __new__(cls, text: str = "", origin: int = UNKNOWN) -> MarkedText:
        made = str.__new__(cls, text)
        made._runs = ((len(text), origin),) if text else ()
        return made

    @property
    def _only_origin(self) -> int:
        """Origin of all parts; UNKNOWN if they differ."""
        return self._runs[0][1] if len(self._runs) == 1 else UNKNOWN

    def _cut(self, start: int, end: int) -> MarkedText:
        if start == 0 and end == len(self):
            return self
        if len(self._runs) == 1:
            return MarkedText(str.__getitem__(self, slice(start, end)), self._runs[0][1])
        runs, position = [], 0
        for length, origin in self._runs:
            overlap = min(end, position + length) - max(start, position)
            if overlap > 0:
                runs.append((overlap, origin))
            position += length
            if position >= end:
                break
        return _with_runs(str.__getitem__(self, slice(start, end)), runs)

    def _converted(self, text: str) -> MarkedText:
        """A text made of this one, character by character if it is as long."""
        if len(text) == len(self):
            return _with_runs(text, self._runs)
        return MarkedText(text, self._only_origin)

    def _cuts(self, pieces: Iterable[str], gap: int = 0) -> list[str]:
        """Parts that are ``pieces``, in this order, each at least ``gap`` characters after the one before."""
        cuts: list[str] = []
        position = 0
        for piece in pieces:
            start = self.find(piece, position)
            position = start + len(piece)
            cuts.append(self._cut(start, position))
            position += gap
        return cuts

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> str:
        return joined((self, other)) if _is_text(other) else NotImplemented

    def __radd__(self, other: str) -> str:
        return joined((other, self)) if _is_text(other) else NotImplemented

    def __mul__(self, count: SupportsIndex) -> str:
        text = str.__mul__(self, count)
        return (
            MarkedText(text, self._runs[0][1]) if len(self._runs) == 1 else joined([self] * (len(text) and int(count)))
        )

    __rmul__ = __mul__

    def __getitem__(self, key: Any) -> str:
        text = str.__getitem__(self, key)
        if not isinstance(key, slice):
            start = key.__index__() % len(self)
            return self._cut(start, start + 1)
        start, _, step = key.indices(len(self))
        return self._cut(start, start + len(text)) if step == 1 else MarkedText(text, self._only_origin)

    def __iter__(self) -> Iterator[str]:
        for start in range(len(self)):
            yield self._cut(start, start + 1)

    def join(self, items: Iterable[str]) -> str:
        listed = list(items)
        parts = [self] * (2 * len(listed) - 1)
        parts[::2] = listed  # type: ignore[assignment]
        return joined(parts)

    def strip(self, chars: str | None = None) -> str:
        start = len(self) - len(str.lstrip(self, chars))
        return self._cut(start, max(start, len(str.rstrip(self, chars))))

    def lstrip(self, chars: str | None = None) -> str:
        return self._cut(len(self) - len(str.lstrip(self, chars)), len(self))

    def rstrip(self, chars: str | None = None) -> str:
        return self._cut(0, len(str.rstrip(self, chars)))

    def removeprefix(self, prefix: str, /) -> str:
        return self._cut(len(self) - len(str.removeprefix(self, prefix)), len(self))

    def removesuffix(self, suffix: str, /) -> str:
        return self._cut(0, len(str.removesuffix(self, suffix)))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._cuts(str.split(self, sep, maxsplit), len(sep or ""))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._cuts(str.rsplit(self, sep, maxsplit), len(sep or ""))

    def splitlines(self, keepends: bool = False) -> list[str]:
        return self._cuts(str.splitlines(self, keepends))

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        head, middle, tail = self._cuts(str.partition(self, sep))
        return head, middle, tail

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        head, middle, tail = self._cuts(str.rpartition(self, sep))
        return head, middle, tail

    def replace(self, old: str, new: str, /, count: SupportsIndex = -1) -> str:
        return MarkedText.join(_marked(new), self.split(old, count)) if old else str.replace(self, old, new, count)

    def upper(self) -> str:
        return self._converted(str.upper(self))

    def lower(self) -> str:
        return self._converted(str.lower(self))

    def casefold(self) -> str:
        return self._converted(str.casefold(self))

    def title(self) -> str:
        return self._converted(str.title(self))

    def capitalize(self) -> str:
        return self._converted(str.capitalize(self))

    def swapcase(self) -> str:
        return self._converted(str.swapcase(self))


def _is_text(value: Any) -> bool:
    return type(value) is str or isinstance(value, MarkedText)  # not Markup, whose sums escape


def _marked(text: str) -> MarkedText:
    return text if isinstance(text, MarkedText) else MarkedText(text)


def _with_runs(text: str, runs: Runs) -> MarkedText:
    made = str.__new__(MarkedText, text)
    made._runs = runs
    return made


def runs_of(text: str) -> Runs:
    if isinstance(text, MarkedText):
        return text._runs
    return ((len(text), UNKNOWN),) if text else ()


def joined(parts: Iterable[str]) -> MarkedText:
    """Concatenate texts, as ``"".join`` does."""
    listed = list(parts)
    text = "".join(listed)  # raises for what is no text
    runs: list[tuple[int, int]] = []
    for part in listed:
        for length, origin in runs_of(part):
            if runs and runs[-1][1] == origin:
                runs[-1] = (runs[-1][0] + length, origin)
            else:
                runs.append((length, origin))
    return _with_runs(text, runs)


def of_content(value: Any) -> Any:
    """A value read from JSON whose texts, keys included, are marked as content."""
    match value:
        case str():
            return MarkedText(value, CONTENT)
        case list():
            return [of_content(item) for item in value]
        case dict():
            return {MarkedText(key, CONTENT): of_content(item) for key, item in value.items()}
    return value


def filtered(source: Any, result: Any) -> Any:
    """Result of a filter: new text that was made of content alone is content."""
    if type(result) is str and isinstance(source, MarkedText) and source._only_origin == CONTENT:
        return MarkedText(result, CONTENT)
    return result
