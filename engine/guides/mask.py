"""The tokens that a grammar allows next, of one sequence, and the computation of many such masks beside a step."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from decant.engine.errors import InvalidRequest
from decant.engine.guides.compiler import Grammar, MaskThreads
from decant.engine.logits_processors import Allow, Edit, LogitsProcessor

if TYPE_CHECKING:
    from llguidance import LLMatcher

MASK_SECONDS = 1.0
"""Longest wait for one mask, which takes milliseconds."""
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
        self._job: _MaskJob | None = None

    def edit(self, tokens: Sequence[int], length: int, eos: frozenset[int]) -> Edit | None:
        if (work := self._missing(tokens, length)) is not None:
            work.compute()
        assert self._allow is not None
        return self._allow[1]

    def _missing(self, tokens: Sequence[int], length: int) -> _MaskWork | None:
        """What computes the mask for the draw after ``length`` tokens; None: it is known."""
        job, self._job = self._job, None
        if job is not None:
            job.wait_for(self)
        if self._allow is not None and self._allow[0] == length:
            return None
        if length < self._length:  # the output was rolled back
            self._matcher, self._length = None, self._first
        return _MaskWork(self, tokens[self._length : length], length)

    def abandon(self, length: int) -> None:
        """Give up a mask that is still being computed."""
        limit = f"a grammar whose tokens take at most {MASK_SECONDS:g} s each"
        self.error = InvalidRequest(self._grammar.guide.field, limit, "one that takes longer")
        self._matcher = None
        self._allow = (length, None)

    def compute(self, new: Sequence[int], length: int) -> None:
        """Consume the tokens that the matcher lacks, up to ``length``, and compute the mask behind them."""
        allow = self._mask(new, length)
        if self.error is None or allow is None:
            self._allow = (length, allow)

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


class _MaskJob:
    """Masks that one thread computes in turn. A grammar may keep the thread for ever: then the others go to another."""

    def __init__(self, works: Sequence[_MaskWork], threads: MaskThreads) -> None:
        self._works = works
        self._threads = threads
        self._place = 0
        self._is_abandoned = False
        self._done = threading.Event()
        for work in works:
            work.mask._job = self
        threads.submit(self._run)

    def _run(self) -> None:
        for place, work in enumerate(self._works):
            self._place = place
            work.compute()
            if self._is_abandoned:
                return
        self._done.set()

    def wait_for(self, mask: GuideMask) -> None:
        """Wait for all masks of the job; abandon it if one takes longer, and compute those behind that one anew."""
        place = -1
        while not self._is_abandoned and not self._done.wait(MASK_SECONDS):
            if place == self._place:
                self._abandon(place)
            place = self._place
        if mask._job is not None:  # of a job that continues this one
            job, mask._job = mask._job, None
            job.wait_for(mask)

    def _abandon(self, place: int) -> None:
        self._is_abandoned = True
        self._threads.replace()
        stuck, left = self._works[place], self._works[place + 1 :]
        stuck.mask.abandon(stuck.length)
        if left:
            _MaskJob(left, self._threads)


def begin_masks(masks: Sequence[tuple[GuideMask, Sequence[int], int]]) -> None:
    """Compute masks in threads, for draws after the first ``length`` of ``tokens``, which are all known.

    The next ``edit`` of each waits for its own.
    """
    works = [work for mask, tokens, length in masks if (work := mask._missing(tokens, length)) is not None]
    if not works:
        return
    threads = works[0].mask._grammar.compiler.mask_threads
    for first in range(min(threads.count, len(works))):
        _MaskJob(works[first :: threads.count], threads)
