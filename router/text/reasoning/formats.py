"""Markers around the reasoning of a model, by the texts in its chat template.

They are tokens: a text that spells a marker, from a user or from the model, marks nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tokenizers import Tokenizer

from decant.engine.reasoning import ReasoningMarkers
from decant.router.text.detokenizing.token_table import TokenTable


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a family of models reasons.

    declared_by  texts in the chat template
    begin, end   around the reasoning
    then         what the model writes behind the end, before its next part
    answer       begins an answer
    dropped      what the answer has between its parts, which is no text
    headers      the same where a part begins; elsewhere it belongs to a call
    """

    name: str
    declared_by: Sequence[str]
    begin: str
    end: str
    then: str = ""
    answer: str = ""
    dropped: Sequence[str] = ()
    headers: Sequence[str] = ()


FORMATS = (
    ReasoningFormat(
        "gpt-oss",
        declared_by=("<|channel|>", "analysis"),
        begin="<|channel|>analysis<|message|>",
        end="<|end|>",
        then="<|start|>assistant",
        answer="<|channel|>final<|message|>",
        dropped=("<|start|>assistant", "<|end|>"),
        headers=("<|channel|>final<|message|>", "<|channel|>commentary<|message|>"),
    ),
    ReasoningFormat("think", ("</think>",), "<think>", "</think>"),
    ReasoningFormat("mistral", ("[/THINK]",), "[THINK]", "[/THINK]"),
)
"""The first one that a template declares counts."""


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A format in the tokens of one model."""

    form: ReasoningFormat
    markers: ReasoningMarkers
    dropped: Sequence[tuple[int, ...]] = ()
    headers: Sequence[tuple[int, ...]] = ()

    def after(self, prompt: Sequence[int], table: TokenTable, *, is_continued: bool = False) -> Reasoning | None:
        """Reasoning of an output behind a prompt: open if the prompt has begun it, None if the prompt has ended it.

        Between the marker and the end of the prompt there is white space alone, or what an output continues.
        """
        begin = self.markers.begin
        for place in range(len(prompt) - 1, -1, -1):
            if prompt[place] == self.markers.end:
                return self if is_continued else None
            if tuple(prompt[max(0, place + 1 - len(begin)) : place + 1]) == begin:
                return replace(self, markers=replace(self.markers, is_open=True))
            if not is_continued and not table.bytes_of(prompt[place]).isspace():
                break
        return self


def reasoning_of(template: str, tokenizer: Tokenizer) -> Reasoning | None:
    """Reasoning that a template declares, if the tokenizer has its markers as tokens of their own."""
    form = next((form for form in FORMATS if all(text in template for text in form.declared_by)), None)
    if form is None:
        return None

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False).ids)

    begin, end, added = ids(form.begin), ids(form.end), tokenizer.get_added_tokens_decoder()
    if len(end) != 1 or not begin or not {begin[0], begin[-1], *end} <= added.keys():
        return None
    return Reasoning(
        form,
        ReasoningMarkers(begin, end[0]),
        *([ids(text) for text in texts] for texts in (form.dropped, form.headers)),
    )
