"""Grammars without a library: the tokens that may come next are a function of the output."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from decant.engine.guides.compiler import MaskThread
from decant.engine.guides.guide import Guide, GuideKind

WORDS = 16
"""Of a mask: 512 tokens."""

Allowed = Callable[[Sequence[int]], Iterable[int]]


class ScriptedMatcher:
    """Matcher with the methods of ``llguidance`` that a mask calls; an exception of ``allowed`` is its error."""

    def __init__(self, allowed: Allowed) -> None:
        self._allowed = allowed
        self._output: list[int] = []
        self._error = ""

    def consume_tokens(self, tokens: list[int]) -> bool:
        self._output += tokens
        return True

    def compute_bitmask(self) -> bytes:
        try:
            return packed(self._allowed(self._output))
        except ValueError as error:
            self._error = str(error)
            return bytes(4 * WORDS)

    def is_error(self) -> bool:
        return bool(self._error)

    def get_error(self) -> str:
        return self._error


@dataclass(frozen=True)
class ScriptedCompiler:
    eos: frozenset[int]

    @property
    def mask_thread(self) -> MaskThread:
        return _thread()

    def masks(self, matchers: Sequence[ScriptedMatcher], tokens: Sequence[int]) -> list[bytes]:
        for matcher, token in zip(matchers, tokens, strict=True):
            matcher.consume_tokens([token])
        return [matcher.compute_bitmask() for matcher in matchers]


class ScriptedGrammar:
    def __init__(self, allowed: Allowed, eos: frozenset[int] = frozenset()) -> None:
        self.guide = Guide(GuideKind.REGEX, "scripted")
        self.compiler: Any = ScriptedCompiler(eos)
        self.made = 0  # matchers
        self._allowed = allowed

    def __repr__(self) -> str:
        return "a scripted grammar"  # the same in each test process

    def prepare(self) -> None:
        pass

    @property
    def first_mask(self) -> bytes:
        return packed(self._allowed([]))

    def new_matcher(self) -> ScriptedMatcher:
        self.made += 1
        return ScriptedMatcher(self._allowed)

    def renew(self) -> ScriptedMatcher:
        return self.new_matcher()


def packed(tokens: Iterable[int]) -> bytes:
    return sum(1 << token for token in tokens).to_bytes(4 * WORDS, "little")


@cache
def _thread() -> MaskThread:
    return MaskThread()
