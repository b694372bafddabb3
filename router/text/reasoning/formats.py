"""Markers around the reasoning of a model, by the texts in its chat template.

They are tokens: a text that spells a marker, from a user or from the model, marks nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from tokenizers import Tokenizer

from decant.router.text.detokenizer import TokenTable


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """``declared_by``: texts in the template. ``then`` is what the model writes before its next part."""

    name: str
    declared_by: Sequence[str]
    begin: str
    end: str
    then: str = ""


FORMATS = (
    ReasoningFormat(
        "gpt-oss", ("<|channel|>", "analysis"), "<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant"
    ),
    ReasoningFormat("think", ("</think>",), "<think>", "</think>"),
    ReasoningFormat("mistral", ("[/THINK]",), "[THINK]", "[/THINK]"),
)
"""The first one that a template declares counts."""


@dataclass(frozen=True, slots=True)
class ReasoningTokens:
    """A format in the tokens of one model: ``begin`` has at least one, ``end`` is one."""

    form: ReasoningFormat
    begin: tuple[int, ...]
    end: int


def reasoning_tokens(template: str, tokenizer: Tokenizer) -> ReasoningTokens | None:
    """Reasoning that a template declares, if the tokenizer has its markers as tokens of their own."""
    form = next((form for form in FORMATS if all(text in template for text in form.declared_by)), None)
    if form is None:
        return None
    begin, end = (tuple(tokenizer.encode(text, add_special_tokens=False).ids) for text in (form.begin, form.end))
    added = tokenizer.get_added_tokens_decoder()
    is_marked = len(end) == 1 and begin and {begin[0], begin[-1], *end} <= added.keys()
    return ReasoningTokens(form, begin, end[0]) if is_marked else None


class Opening(Enum):
    """What a prompt says of the reasoning behind it."""

    OPEN = "it has begun"
    CLOSED = "there is none"
    FREE = "the model may begin it"


def opening_of(reasoning: ReasoningTokens, prompt: Sequence[int], table: TokenTable) -> Opening:
    """Opening by the markers at the prompt's end, behind which there is white space alone."""
    for place in range(len(prompt) - 1, -1, -1):
        if prompt[place] == reasoning.end:
            return Opening.CLOSED
        if tuple(prompt[max(0, place + 1 - len(reasoning.begin)) : place + 1]) == reasoning.begin:
            return Opening.OPEN
        if not table.bytes_of(prompt[place]).isspace():
            break
    return Opening.FREE
