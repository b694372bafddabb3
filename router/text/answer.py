"""One output as its client reads it: reasoning, text and calls of tools, after each token.

What it is after k tokens depends on these and the request alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from decant.protos import worker_pb2 as wire
from decant.router.text.output_text import OutputOptions, OutputText, new_output_text
from decant.router.text.reasoning.divider import Part, ReasoningDivider
from decant.router.text.reasoning.formats import Reasoning
from decant.router.text.served_model import ServedModel
from decant.router.text.tools.call_parser import Parsed


def new_answer(model: ServedModel, options: OutputOptions, stopping: wire.Stopping, output: int = 0) -> Answer:
    """Answer of the output with this index."""
    if options.reasoning is None:
        return Answer(model, options, stopping, output)
    return ReasonedAnswer(model, options, stopping, output, options.reasoning)


class Answer:
    """Reader of one output's tokens, which are added in order."""

    def __init__(self, model: ServedModel, options: OutputOptions, stopping: wire.Stopping, output: int) -> None:
        self._text = new_output_text(model, options, stopping)
        self._calls = options.new_call_parser(output)

    @property
    def stop(self) -> str | None:
        """The stop string that ended the output."""
        return self._text.stop

    def add(self, tokens: Sequence[int]) -> Parsed:
        return self._calls.add(self._text.add(tokens))

    def finish(self) -> Parsed:
        """What was held back; called once, after the last token."""
        parsed = self._calls.add(self._text.flush())
        parsed.extend(self._calls.finish())
        return parsed


class ReasonedAnswer(Answer):
    """Answer that may have reasoning. Stop strings and calls are searched in the text alone."""

    def __init__(
        self, model: ServedModel, options: OutputOptions, stopping: wire.Stopping, output: int, reasoning: Reasoning
    ) -> None:
        super().__init__(model, options, stopping, output)
        self._divider = ReasoningDivider(reasoning)
        self._thought = OutputText(model, replace(options, stops=None, shown_tokens={}), stopping)

    def add(self, tokens: Sequence[int]) -> Parsed:
        parsed = Parsed()
        for part, of_part in self._divider.add(tokens):
            match part:
                case Part.ANSWER:
                    self._thought.skip(len(of_part))
                    parsed.extend(super().add(of_part))
                case Part.REASONING:
                    self._text.skip(len(of_part))
                    parsed.reasoning += self._thought.add(of_part)
                case Part.MARKER:
                    self._text.skip(len(of_part))
                    self._thought.skip(len(of_part))
                    parsed.reasoning += self._thought.flush()
        return parsed

    def finish(self) -> Parsed:
        parsed = Parsed(reasoning=self._thought.flush())
        if held := self._divider.finish():
            parsed.extend(super().add(held))
        parsed.extend(super().finish())
        return parsed
