"""The tokens that a grammar allows next, of one sequence, and the computation of many such masks beside a step."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from decant.engine.errors import InvalidRequest
from decant.engine.guides.compiler import TOO_MANY_STATES, Grammar, GrammarCompiler
from decant.engine.logits_processors import Allow, Edit, LogitsProcessor

if TYPE_CHECKING:
    from llguidance import LLMatcher

MASK_SECONDS = 1.0
"""Longest wait for the masks of a step, which take milliseconds: the library's limits bound each. It goes on while the
process gets less of the processor's time than that.
"""
LONGEST_WAIT_SECONDS = 60.0
"""Longest wait for masks where the process gets little time of a busy processor."""
POLL_SECONDS = 0.05
STEP_LIMIT = "a grammar that can be followed token by token"


class GuideMask(LogitsProcessor):
    """Allows the tokens that continue the output to a text of the grammar, and the end tokens where it may end.

    ``error`` is set once the grammar can't be followed any more: then the draws of the sequence do not count. The
    matcher is a function of the grammar and the output's tokens: one that is made later allows the same.
    """

    __slots__ = ("_allow", "_first", "_grammar", "_length", "_matcher", "batch", "error")

    def __init__(self, prompt_len: int, grammar: Grammar) -> None:
        self.error: InvalidRequest | None = None
        self._grammar = grammar
        self._first = prompt_len
        self._matcher: LLMatcher | None = None
        self._length = prompt_len  # tokens that the matcher has consumed, with the prompt
        self._allow: tuple[int, Allow | None] | None = None  # by length
        self.batch: _MaskBatch | None = None  # that computes a mask of this sequence

    def edit(self, tokens: Sequence[int], length: int, eos: frozenset[int]) -> Edit | None:
        if (work := self.missing(tokens, length)) is not None:
            _MaskBatch([work]).compute()
            self._collect()
        assert self._allow is not None
        return self._allow[1]

    def _collect(self) -> None:
        while self.batch is not None:  # one that takes too long makes others
            self.batch.collect()

    def missing(self, tokens: Sequence[int], length: int) -> MaskWork | None:
        """What computes the mask for the draw after ``length`` tokens; None: it is known."""
        if self.batch is not None:
            self._collect()
        if self._allow is not None and self._allow[0] == length:
            return None
        grammar = self._grammar
        if length == self._first:
            grammar.prepare()
            self._allow = length, Allow(grammar.first_mask)
            return None
        if length < self._length:  # the output was rolled back
            self._matcher, self._length = None, self._first
        if self.error is not None or not grammar.compiler.eos.isdisjoint(tokens[self._length : length]):
            self._allow = length, None
            return None
        return MaskWork(self, grammar, self._matcher, tokens, self._first, self._length, length)

    def set(self, length: int, result: MaskResult | InvalidRequest) -> None:
        """Take the mask for the draw after ``length`` tokens, or why there is none."""
        self.batch = None
        if isinstance(result, InvalidRequest):
            self.error, self._matcher, self._allow = result, None, (length, None)
        else:
            self._matcher, self._length, self._allow = result.matcher, length, (length, Allow(result.mask))


class MaskResult(NamedTuple):
    matcher: LLMatcher
    mask: bytes


class MaskWork(NamedTuple):
    """The mask behind an output, tokens[first:stop]; ``matcher`` has consumed it up to ``start``. None: a new one."""

    of: GuideMask
    grammar: Grammar
    matcher: LLMatcher | None
    tokens: Sequence[int]
    first: int
    start: int
    stop: int

    def begin(self) -> LLMatcher:
        """Matcher that lacks the last token alone."""
        matcher = self.matcher or self.grammar.new_matcher()
        if self.start < self.stop - 1:
            matcher.consume_tokens(list(self.tokens[self.start : self.stop - 1]))
        return matcher

    def result(self, matcher: LLMatcher, mask: bytes) -> MaskResult | InvalidRequest:
        if matcher.is_error() and TOO_MANY_STATES in matcher.get_error():  # most may be those of other sequences
            matcher = self.grammar.renew()
            matcher.consume_tokens(list(self.tokens[self.first : self.stop]))
            mask = matcher.compute_bitmask()
        if matcher.is_error():
            return InvalidRequest(self.grammar.guide.field, STEP_LIMIT, matcher.get_error().partition("\n<")[0])
        return MaskResult(matcher, mask)

    def again(self) -> MaskWork:
        return self._replace(matcher=None, start=self.first)

    def failure(self, *, ended: bool) -> InvalidRequest:
        limit = f"a grammar whose tokens take at most {MASK_SECONDS:g} s each"
        return InvalidRequest(self.grammar.guide.field, limit, "one that fails" if ended else "one that takes longer")


class _MaskBatch:
    """Masks that one thread computes, all for one compiler. Only ``compute`` may be called from any thread.

    The library's limits bound each mask. If some grammar evades them, the masks of its batch are computed again, one
    after the other in another thread: the sequence of one that takes too long fails, and those behind it go on in the
    next thread. So there is one thread that works, and one more for each grammar that does not return.
    """

    def __init__(self, works: Sequence[MaskWork], *, is_one_by_one: bool = False) -> None:
        self._works = works
        self._compiler = works[0].grammar.compiler
        self._is_one_by_one = is_one_by_one or len(works) == 1
        self._results: list[MaskResult | InvalidRequest] = []
        self._ended = threading.Event()
        self._is_collected = False
        for work in works:
            work.of.batch = self

    def compute(self) -> None:
        try:
            for works in [[work] for work in self._works] if self._is_one_by_one else [self._works]:
                if self._is_collected:  # what this thread has not computed is another's
                    return
                self._results += self._compute(works)
        finally:
            self._ended.set()

    def _compute(self, works: Sequence[MaskWork]) -> list[MaskResult | InvalidRequest]:
        matchers = [work.begin() for work in works]
        masks = self._compiler.masks(matchers, [work.tokens[work.stop - 1] for work in works])
        return [work.result(matcher, mask) for work, matcher, mask in zip(works, matchers, masks, strict=True)]

    def collect(self) -> None:
        """Give each sequence its mask."""
        ended = self._wait()
        self._is_collected = True
        done = self._results[:]
        for work, result in zip(self._works, done, strict=False):
            work.of.set(work.stop, result)
        rest = self._works[len(done) :]
        if not rest:
            return
        thread = self._compiler.mask_thread
        thread.replace()
        if self._is_one_by_one:
            rest[0].of.set(rest[0].stop, rest[0].failure(ended=ended))
            rest = rest[1:]
        if rest:
            thread.submit(_MaskBatch([work.again() for work in rest], is_one_by_one=True).compute)

    def _wait(self) -> bool:
        """Return whether the thread has ended; it may take the longest wait for each mask of those one by one."""
        count = -1
        while not self._ended.wait(POLL_SECONDS):
            if len(self._results) != count:
                count, began, used = len(self._results), time.monotonic(), time.process_time()
            waited = time.monotonic() - began
            # Both: other threads may take a second of several processors in a part of it.
            if waited > LONGEST_WAIT_SECONDS or min(waited, time.process_time() - used) > MASK_SECONDS:
                return False
        return True


def begin_masks(masks: Sequence[tuple[GuideMask, Sequence[int], int]]) -> None:
    """Compute masks in a thread, for draws after the first ``length`` of ``tokens``, which are all known.

    The next ``edit`` of each waits for its own.
    """
    batches: dict[GrammarCompiler, list[MaskWork]] = {}
    for mask, tokens, length in masks:
        if (work := mask.missing(tokens, length)) is not None:
            batches.setdefault(work.grammar.compiler, []).append(work)
    for compiler, works in batches.items():
        compiler.mask_thread.submit(_MaskBatch(works).compute)
