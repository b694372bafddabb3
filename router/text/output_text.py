"""Text of one output after each token; incomplete characters and beginnings of stop strings are held back.

The text after k tokens depends on these and the request alone. A token that ends the output has no text, unless the
request includes stops. The last possible token completes what was held back. A special token whose text is a stop
string ends the output also where special tokens are skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from decant.protos import worker_pb2 as wire
from decant.router.text.detokenizing.token_table import Detokenizer, PromptEnd
from decant.router.text.reasoning.formats import Reasoning
from decant.router.text.served_model import ServedModel
from decant.router.text.stop_strings import StopStrings
from decant.router.text.tools.call_parser import PlainText


def _no_calls(_: int) -> PlainText:
    return PlainText()


@dataclass(frozen=True, slots=True)
class OutputOptions:
    text: bool = True
    token_ids: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: str = ""
    after: PromptEnd | None = None
    """End of the prompt that the text follows; None: the text begins by itself, as an answer in a conversation does."""
    skip_special_tokens: bool = True
    shown_tokens: Mapping[int, str] = field(default_factory=dict)
    """Special tokens that have text although such tokens are skipped: parts of calls."""
    new_call_parser: Callable[[int], PlainText] = _no_calls
    """Parser of calls in an output, by its index."""
    stops: StopStrings | None = None
    include_stop: bool = False
    min_chunk_tokens: int = 1
    reasoning: Reasoning | None = None
    """Of outputs that may begin with it; None: all is text."""

    def without_calls(self) -> OutputOptions:
        """Options for the same text, in which calls are not parsed."""
        return replace(self, new_call_parser=_no_calls)


def new_output_text(model: ServedModel, options: OutputOptions, stopping: wire.Stopping) -> OutputText:
    kind = OutputText if options.stops is None else StoppableText
    return kind(model, options, stopping)


class OutputText:
    """Text of tokens that are added in order, none after one that ends the output."""

    stop: str | None = None

    def __init__(self, model: ServedModel, options: OutputOptions, stopping: wire.Stopping) -> None:
        self._detokenizer: Detokenizer = model.token_table.detokenizer(
            skip_special_tokens=options.skip_special_tokens, after=options.after
        )
        self._shown_tokens = options.shown_tokens
        self._remaining_tokens = stopping.max_tokens
        requested = frozenset(stopping.stop_token_ids)
        self._end_tokens = requested | (frozenset() if stopping.ignore_eos else model.eos_token_ids)
        self._hidden_end_tokens = self._end_tokens - requested if options.include_stop else self._end_tokens
        self._is_over = False

    def add(self, tokens: Sequence[int]) -> str:
        """Add tokens and return their text; only the last can be a stop token, as none is sampled before
        ``min_tokens``.
        """
        self._remaining_tokens -= len(tokens)
        if tokens and tokens[-1] in self._end_tokens:
            visible = tokens[:-1] if tokens[-1] in self._hidden_end_tokens else tokens
            return self._decode(visible) + OutputText.flush(self)
        text = self._decode(tokens)
        return text if self._remaining_tokens else text + OutputText.flush(self)

    def skip(self, count: int) -> None:
        """Count tokens of the output that are not of this text."""
        self._remaining_tokens -= count

    def _decode(self, tokens: Sequence[int]) -> str:
        text, begin = "", 0
        if self._shown_tokens:
            for place, token in enumerate(tokens):
                if token in self._shown_tokens:
                    text += self._detokenizer.add(tokens[begin:place]) + self._detokenizer.flush()
                    text, begin = text + self._shown_tokens[token], place + 1
        return text + self._detokenizer.add(tokens[begin:])

    def flush(self) -> str:
        self._is_over = True
        return self._detokenizer.flush()


class StoppableText(OutputText):
    def __init__(self, model: ServedModel, options: OutputOptions, stopping: wire.Stopping) -> None:
        super().__init__(model, options, stopping)
        assert options.stops is not None
        self._stops: StopStrings = options.stops
        self._include = options.include_stop
        self._tokens_before_stops = max(0, stopping.min_tokens - 1)  # coming tokens that can't complete a stop string
        self._held = ""
        ids = model.token_table.special_tokens if options.skip_special_tokens else {}
        self._stop_tokens = {ids[stop]: stop for stop in self._stops.texts if stop in ids}  # they have no text

    def skip(self, count: int) -> None:
        super().skip(count)
        self._tokens_before_stops = max(0, self._tokens_before_stops - count)

    def add(self, tokens: Sequence[int]) -> str:
        before_stops, tokens = tokens[: self._tokens_before_stops], tokens[self._tokens_before_stops :]
        text = ""
        if before_stops:
            self._tokens_before_stops -= len(before_stops)
            text = self._release(super().add(before_stops), may_stop=False)
        if tokens and self.stop is None:
            is_stopped = tokens[-1] in self._stop_tokens and tokens[-1] not in self._end_tokens
            text += self._release(super().add(tokens[:-1] if is_stopped else tokens), may_stop=True)
            if is_stopped and self.stop is None:
                text += self._stop_at(self._stop_tokens[tokens[-1]])
        return text

    def _stop_at(self, stop: str) -> str:
        text = self._release(super().flush(), may_stop=True)
        if self.stop is None:
            self.stop = stop
            text += stop if self._include else ""
        return text

    def flush(self) -> str:
        return self._release(super().flush(), may_stop=True) if self.stop is None else ""

    def _release(self, new: str, *, may_stop: bool) -> str:
        text = self._held + new
        match = self._stops.find(text, len(self._held)) if may_stop else None
        if match is not None:
            self.stop, self._held = match.stop, ""
            return text[: match.end if self._include else match.end - len(match.stop)]
        end = len(text) if self._is_over else len(text) - self._stops.held_length(text)
        self._held = text[end:]
        return text[:end]
