"""Reasoning in an output: the tokens that begin and end it, and a limit of its tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from decant.engine.errors import InvalidRequest
from decant.engine.logits_processors import Allow, Edit, Forbid, LogitsProcessor


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """Tokens around each reasoning of an output; ``is_open``: the prompt has begun one."""

    begin: tuple[int, ...]
    end: int
    is_open: bool = False


class ReasoningCount:
    """Follows the tokens of an output: whether it reasons, and for how many tokens it has, without markers.

    What it knows is a function of the tokens.
    """

    __slots__ = ("_begin", "_end", "_matched", "count", "is_open")

    def __init__(self, markers: ReasoningMarkers) -> None:
        self._begin, self._end = markers.begin, markers.end
        self.is_open = markers.is_open
        self.count = 0
        self._matched: tuple[int, ...] = ()

    @property
    def may_begin(self) -> bool:
        """Whether the next token may be the one by which a marker that begins differs from others."""
        return self._matched[-1:] == self._begin[:1] or len(self._begin) == 1

    def add(self, tokens: Iterable[int]) -> ReasoningCount:
        for token in tokens:
            if self.is_open:
                self.is_open = token != self._end
                self.count += self.is_open
            else:
                self._matched = (*self._matched, token)[-len(self._begin) :]
                if self._matched == self._begin:
                    self.is_open, self._matched = True, ()
        return self


@dataclass(frozen=True, slots=True)
class ReasoningLimit:
    """After ``max_tokens`` of reasoning its end is the next token, and none begins again."""

    markers: ReasoningMarkers
    max_tokens: int

    def __post_init__(self) -> None:
        if not self.markers.begin:
            raise InvalidRequest("reasoning.begin", "at least 1 token", 0)

    @property
    def highest_token(self) -> int:
        return max(*self.markers.begin, self.markers.end)


class ReasoningBudget(LogitsProcessor):
    """Ends the reasoning at its limit, by the tokens of the output alone."""

    __slots__ = ("_close", "_count", "_first", "_length", "_limit", "_no_begin")

    def __init__(self, prompt_len: int, limit: ReasoningLimit) -> None:
        begin, end = limit.markers.begin, limit.markers.end
        self._limit = limit
        self._first = prompt_len
        self._close = Allow((1 << end).to_bytes(4 * (end // 32 + 1), "little"))
        self._no_begin = Forbid(frozenset({begin[min(1, len(begin) - 1)]}))
        self._reset()

    def _reset(self) -> None:
        self._length = self._first
        self._count = ReasoningCount(self._limit.markers)

    def edit(self, tokens: Sequence[int], length: int, eos: frozenset[int]) -> Edit | None:
        if length < self._length:  # the output was rolled back
            self._reset()
        count = self._count.add(tokens[self._length : length])
        self._length = length
        if count.count < self._limit.max_tokens:
            return None
        if count.is_open:
            return self._close
        return self._no_begin if count.may_begin else None
