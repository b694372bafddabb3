"""State of a sequence that changes its logits; derived from request and tokens, never transferred or stored."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence

from decant.engine.request import Request


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


class SamplerState:
    __slots__ = ("bias", "bias_tokens", "counts")

    def __init__(self, request: Request) -> None:
        sampling = request.sampling
        self.bias_tokens = array("q", sampling.logit_bias)
        self.bias = array("f", sampling.logit_bias.values())
        self.counts: TokenCounts | None = None
        if sampling.has_penalties:
            self.counts = TokenCounts(request.prompt_len, with_prompt=sampling.repetition_penalty != 1.0)

    @property
    def reads_tokens(self) -> bool:
        """Whether the next draw depends on earlier draws."""
        return self.counts is not None
