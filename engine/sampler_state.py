"""What sampling keeps of one sequence from step to step, beside its frozen request. Pure: arrays of Python's own.

The request says how to sample and never changes; this object grows with the tokens. It belongs to the sequence, and
travels with every ``Row`` of it. Nothing of it is handed over or stored: everything is derived from the request and the
tokens, so a sequence that was preempted, imported with its output, or adopted with it has the same state. Whatever else
follows a sequence's tokens to change its logits, such as the matcher of a grammar, belongs here too.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence

from decant.engine.request import Request


class TokenCounts:
    """The distinct tokens of a sequence, and how often its output has each.

    tokens  distinct token ids, in the order in which they were first read
    output  of each, its occurrences in the output; 0 for a token of the prompt alone
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
        """Count the first ``length`` tokens of the sequence: reads those that were added since the last call."""
        if length < self._length:  # an output that got shorter
            self._clear()
        start, end = self._length, self._prompt_len
        self._add(Counter(tokens[start : min(length, end)]), 0)
        self._add(Counter(tokens[max(start, end) : length]), 1)
        self._length = max(length, start)

    def _add(self, found: Counter[int], weight: int) -> None:
        for token, count in found.items():
            index = self._index.setdefault(token, len(self.tokens))
            if index == len(self.tokens):
                self.tokens.append(token)
                self.output.append(0)
            self.output[index] += weight * count


class SamplerState:
    """Of one sequence whose logits are changed before a token is drawn, or whose token is drawn at random.

    bias_tokens, bias  the request's logit bias, as two arrays of one length
    counts             what penalties are computed from; None without penalties
    """

    __slots__ = ("bias", "bias_tokens", "counts")

    def __init__(self, request: Request) -> None:
        sampling = request.sampling
        self.bias_tokens = array("q", sampling.logit_bias)
        self.bias = array("f", sampling.logit_bias.values())
        self.counts: TokenCounts | None = None
        if sampling.penalised:
            self.counts = TokenCounts(request.prompt_len, with_prompt=sampling.repetition_penalty != 1.0)
