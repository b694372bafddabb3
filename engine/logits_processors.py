"""What changes the logits of a draw: a processor of a sequence says it as edits, which each sampler applies.

``Request.logits_processors`` lists the processors of a request, and nothing else does: a sampler knows the kinds of
``Edit`` alone. Processors are derived from a request and its tokens, and are never transferred or stored.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from typing import NamedTuple


class Add(NamedTuple):
    """Add ``values`` (32-bit floats) to the logits of the distinct ``tokens`` (64-bit integers)."""

    tokens: array[int]
    values: array[float]


class Forbid(NamedTuple):
    """Set the logits of ``tokens`` to minus infinity."""

    tokens: Set[int]


class Penalise(NamedTuple):
    """Penalise the distinct ``tokens``, of which the output has ``output`` occurrences each (64-bit integers).

    First ``repetition`` divides positive logits and multiplies others, within the range of a 32-bit float. Then
    ``presence`` is subtracted once and ``frequency`` for each occurrence in the output.
    """

    tokens: array[int]
    output: array[int]
    repetition: float
    presence: float
    frequency: float


class Allow(NamedTuple):
    """Set the logits of all other tokens to minus infinity.

    Token t is allowed if bit t % 8 of byte t // 8 is set; those beyond the last byte are not. There is at least
    one word of 32 tokens, and no part of one.
    """

    mask: bytes

    def allows(self, token: int) -> bool:
        return token < 8 * len(self.mask) and bool(self.mask[token >> 3] >> (token & 7) & 1)

    @property
    def only(self) -> int | None:
        """The token that is allowed alone; None: several are, or none."""
        match = _ONE_BYTE.fullmatch(self.mask)
        if match is None or (byte := match[1][0]) & (byte - 1):
            return None
        return 8 * match.start(1) + byte.bit_length() - 1


_ONE_BYTE = re.compile(rb"\0*+([^\0])\0*+", re.DOTALL)


Edit = Add | Forbid | Penalise | Allow
"""Change of the logits of one row. A sampler reads it before the next draw of the sequence, and never changes it."""


def only_token(edits: Sequence[Edit]) -> int | None:
    """The token that a draw returns whatever the logits are, as an edit allows it alone; None: there is none."""
    only = next((token for edit in edits if isinstance(edit, Allow) and (token := edit.only) is not None), None)
    if only is None or any(not _permits(edit, only) for edit in edits):
        return None
    return only


def _permits(edit: Edit, token: int) -> bool:
    match edit:
        case Allow():
            return edit.allows(token)
        case Forbid():
            return token not in edit.tokens
        case Add() | Penalise():
            return True


class LogitsProcessor(ABC):
    """Changes the logits of one sequence. Calls come from one thread, in the order of the draws or after a rollback."""

    __slots__ = ()

    reads_tokens = True
    """Whether the next draw depends on earlier draws: then a step is not planned before their tokens are known."""

    @abstractmethod
    def edit(self, tokens: Sequence[int], length: int, eos: frozenset[int]) -> Edit | None:
        """Return the change for the draw after the first ``length`` tokens; None: nothing changes.

        ``eos`` are the end tokens of the model. If ``reads_tokens`` is false, ``tokens`` may lack the last ones.
        """


class Bias(LogitsProcessor):
    __slots__ = ("_edit",)
    reads_tokens = False

    def __init__(self, bias: Mapping[int, float]) -> None:
        self._edit = Add(array("q", bias), array("f", bias.values()))

    def edit(self, tokens: Sequence[int], length: int, eos: frozenset[int]) -> Edit | None:
        return self._edit


class MinLength(LogitsProcessor):
    """Forbids the tokens that end the sequence before it has ``least`` tokens.

    ``ends`` returns them, given the end tokens of the model.
    """

    __slots__ = ("_ends", "_least")
    reads_tokens = False

    def __init__(self, least: int, ends: Callable[[Set[int]], Set[int]]) -> None:
        self._least = least
        self._ends = ends

    def edit(self, tokens: Sequence[int], length: int, eos: frozenset[int]) -> Edit | None:
        if length >= self._least or not (ends := self._ends(eos)):
            return None
        return Forbid(ends)


class Penalties(LogitsProcessor):
    """Penalties of tokens that occurred; only the repetition penalty counts the prompt."""

    __slots__ = ("_frequency", "_presence", "_repetition", "counts")

    def __init__(self, prompt_len: int, repetition: float, presence: float, frequency: float) -> None:
        self.counts = TokenCounts(prompt_len, with_prompt=repetition != 1.0)
        self._repetition, self._presence, self._frequency = repetition, presence, frequency

    def edit(self, tokens: Sequence[int], length: int, eos: frozenset[int]) -> Edit | None:
        counts = self.counts
        counts.update(tokens, length)
        if not counts.tokens:
            return None
        return Penalise(counts.tokens, counts.output, self._repetition, self._presence, self._frequency)


class TokenCounts:
    """Distinct ``tokens`` in order of first occurrence; ``output`` counts each one's occurrences in the output."""

    __slots__ = ("_first", "_index", "_length", "_prompt_len", "output", "tokens")

    def __init__(self, prompt_len: int, *, with_prompt: bool) -> None:
        self._prompt_len = prompt_len
        self._first = 0 if with_prompt else prompt_len
        self._clear()

    def _clear(self) -> None:
        self.tokens, self.output = array("q"), array("q")
        self._index: dict[int, int] = {}
        self._length = self._first

    def update(self, tokens: Sequence[int], length: int) -> None:
        if length < self._length:  # the output was rolled back
            self._clear()
        start, end = self._length, self._prompt_len
        self._add(Counter(tokens[start : min(length, end)]), 0)
        self._add(Counter(tokens[max(start, end) : length]), 1)
        self._length = max(length, start)

    def _add(self, occurrences: Counter[int], weight: int) -> None:
        for token, count in occurrences.items():
            index = self._index.setdefault(token, len(self.tokens))
            if index == len(self.tokens):
                self.tokens.append(token)
                self.output.append(0)
            self.output[index] += weight * count
