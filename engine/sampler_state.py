"""Per-sequence sampler state: what depends on a sequence's tokens and changes its logits.

The sequence owns it, and each ``Row`` has it. It is derived from the request and the tokens, never transferred or
stored. A grammar's matcher would be part of it.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence

from decant.engine.request import Request


class TokenCounts:
    """Distinct tokens of a sequence, and how often each occurs in its output.

    tokens  distinct token ids, in order of first occurrence
    output  occurrences of each in the output; 0 if it is only in the prompt
    """

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
        """Make the counts those of the first ``length`` tokens. Reads only the tokens added since the last call."""
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
    """State of a sequence whose request is not plain.

    bias_tokens, bias  the request's logit bias, as two arrays
    counts             input of the penalties; None without penalties
    """

    __slots__ = ("bias", "bias_tokens", "counts")

    def __init__(self, request: Request) -> None:
        sampling = request.sampling
        self.bias_tokens = array("q", sampling.logit_bias)
        self.bias = array("f", sampling.logit_bias.values())
        self.counts: TokenCounts | None = None
        if sampling.penalised:
            self.counts = TokenCounts(request.prompt_len, with_prompt=sampling.repetition_penalty != 1.0)

    @property
    def reads_tokens(self) -> bool:
        """Whether the next draw depends on which tokens were drawn: they must be known before it."""
        return self.counts is not None
