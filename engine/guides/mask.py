"""The tokens that a grammar allows next, of one sequence, and the computation of many such masks beside a step."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, NamedTuple

from decant.engine.errors import InvalidRequest
from decant.engine.guides.compiler import Grammar
from decant.engine.logits_processors import Allow, Edit, LogitsProcessor

if TYPE_CHECKING:
    from llguidance import LLMatcher

STEP_LIMIT = "a grammar that can be followed token by token"


class GuideMask(LogitsProcessor):
    """Allows the tokens that continue the output to a text of the grammar, and the end tokens where it may end.

    ``error`` is set once the grammar can't be followed any more: then the draws of the sequence do not count. The
    matcher is a function of the grammar and the output's tokens: one that is made later allows the same.
    """

    __slots__ = ("_allow", "_first", "_grammar", "_job", "_length", "_matcher", "error")

    def __init__(self, prompt_len: int, grammar: Grammar) -> None:
        self.error: InvalidRequest | None = None
        self._grammar = grammar
        self._first = prompt_len
        self._matcher: LLMatcher | None = None
        self._length = prompt_len  # tokens that the matcher has consumed, with the prompt
        self._allow: tuple[int, Allow | None] | None = None  # by length
        self._job: Future[None] | None = None

    def edit(self, tokens: Sequence[int], length: int, eos: frozenset[int]) -> Edit | None:
        if (work := self._missing(tokens, length)) is not None:
            work.compute()
        assert self._allow is not None
        return self._allow[1]

    def _missing(self, tokens: Sequence[int], length: int) -> _MaskWork | None:
        """What computes the mask for the draw after ``length`` tokens; None: it is known."""
        job, self._job = self._job, None
        if job is not None:
            job.result()
        if self._allow is not None and self._allow[0] == length:
            return None
        if length < self._length:  # the output was rolled back
            self._matcher, self._length = None, self._first
        return _MaskWork(self, tokens[self._length : length], length)

    def compute(self, new: Sequence[int], length: int) -> None:
        """Consume the tokens that the matcher lacks, up to ``length``, and compute the mask behind them."""
        self._allow = (length, self._mask(new, length))

    def _mask(self, new: Sequence[int], length: int) -> Allow | None:
        grammar = self._grammar
        if self.error is not None or not grammar.compiler.eos.isdisjoint(new):
            return None
        if length == self._first:
            grammar.prepare()
            return Allow(grammar.first_mask)
        matcher = self._matcher = self._matcher or grammar.new_matcher()
        matcher.consume_tokens(list(new))
        self._length = length
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            reason = matcher.get_error().partition("\n<")[0]
            self.error = InvalidRequest(grammar.guide.field, STEP_LIMIT, reason)
            return None
        return Allow(mask)


class _MaskWork(NamedTuple):
    mask: GuideMask
    new: Sequence[int]
    length: int

    def compute(self) -> None:
        self.mask.compute(self.new, self.length)


def begin_masks(masks: Sequence[tuple[GuideMask, Sequence[int], int]]) -> None:
    """Compute masks in threads, for draws after the first ``length`` of ``tokens``, which are all known.

    The next ``edit`` of each waits for its own.
    """
    works = [work for mask, tokens, length in masks if (work := mask._missing(tokens, length)) is not None]
    if not works:
        return
    pool, count = works[0].mask._grammar.compiler.mask_threads
    for first in range(min(count, len(works))):
        part = works[first::count]
        job = pool.submit(_compute_all, part)
        for work in part:
            work.mask._job = job


def _compute_all(works: Sequence[_MaskWork]) -> None:
    for work in works:
        work.compute()
