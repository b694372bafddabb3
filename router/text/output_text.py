"""The text of one output, as its client may see it after each token.

    tokens -> Detokenizer -> certain text -> stop texts -> what is shown
                 |                              |
          half a character is held back   the beginning of a stop text is held back

The text after k tokens is a function of these k tokens and the request alone. A token that ends the output has no text
of its own, unless stops are to be included; the last token that may be written brings what was held back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from decant.protos import worker_pb2 as wire
from decant.router.text.detokenizer import Detokenizer
from decant.router.text.served_model import ServedModel
from decant.router.text.stop_strings import StopStrings


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """What the client is shown, with nothing left unset. ``logprobs`` counts alternatives; None: no logprobs at all.
    ``prompt_logprobs`` the same of the prompt's tokens. ``echo``: what stands before each output's text.
    ``min_chunk_tokens`` go into one delta, except into the last.
    ``stops``: the texts that end an output; None: no text does."""

    text: bool = True
    token_ids: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: str = ""
    skip_special_tokens: bool = True
    stops: StopStrings | None = None
    include_stop: bool = False
    min_chunk_tokens: int = 1


def new_output_text(model: ServedModel, wanted: OutputOptions, stopping: wire.Stopping) -> OutputText:
    """The text of an output that such a request asks for, before its first token."""
    kind = OutputText if wanted.stops is None else StoppedText
    return kind(model, wanted, stopping)


class OutputText:
    """Tokens go in once, in order, none after the one that ended it."""

    stop: str | None = None
    """The stop text that ended it."""

    def __init__(self, model: ServedModel, wanted: OutputOptions, stopping: wire.Stopping) -> None:
        self._detokenizer: Detokenizer = model.token_table.detokenizer(skip_special_tokens=wanted.skip_special_tokens)
        self._left = stopping.max_tokens
        asked = frozenset(stopping.stop_token_ids)
        self._ends = asked | (frozenset() if stopping.ignore_eos else model.eos_token_ids)
        self._silent = self._ends - asked if wanted.include_stop else self._ends
        self._is_over = False

    def add(self, tokens: Sequence[int]) -> str:
        """What these tokens make certain. A stop token is the last that is written: none is drawn before the least
        number of tokens, and none goes on."""
        self._left -= len(tokens)
        if tokens and tokens[-1] in self._ends:
            shown = tokens[:-1] if tokens[-1] in self._silent else tokens
            return self._detokenizer.add(shown) + OutputText.end(self)
        text = self._detokenizer.add(tokens)
        return text if self._left else text + OutputText.end(self)

    def end(self) -> str:
        """What is held back where it was ended before the token that had to be the last."""
        self._is_over = True
        return self._detokenizer.end()


class StoppedText(OutputText):
    """The same where texts may stop it: once one has, nothing is added."""

    def __init__(self, model: ServedModel, wanted: OutputOptions, stopping: wire.Stopping) -> None:
        super().__init__(model, wanted, stopping)
        assert wanted.stops is not None
        self._stops: StopStrings = wanted.stops
        self._include = wanted.include_stop
        self._early = max(0, stopping.min_tokens - 1)  # tokens that can't complete a stop text, still to come
        self._held = ""

    def add(self, tokens: Sequence[int]) -> str:
        early, tokens = tokens[: self._early], tokens[self._early :]
        text = ""
        if early:
            self._early -= len(early)
            text = self._shown(super().add(early), may_stop=False)
        if tokens and self.stop is None:
            text += self._shown(super().add(tokens), may_stop=True)
        return text

    def end(self) -> str:
        return self._shown(super().end(), may_stop=True) if self.stop is None else ""

    def _shown(self, new: str, *, may_stop: bool) -> str:
        """Held text always begins where a stop string may begin: no match begins in what the client has."""
        text = self._held + new
        match = self._stops.find(text, len(self._held)) if may_stop else None
        if match is not None:
            self.stop, self._held = match.stop, ""
            return text[: match.end if self._include else match.end - len(match.stop)]
        end = len(text) if self._is_over else len(text) - self._stops.held(text)
        self._held = text[end:]
        return text[:end]
