"""A guide as clients send it, and the grammar in the form of ``llguidance`` that it stands for."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from decant.engine.errors import InvalidRequest
from decant.engine.guides.json_schema import check_schema

MAX_GUIDE_BYTES = 128 * 1024
MAX_CHOICES = 4096

WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"
"""Whitespace between the parts of a JSON text: without a bound, a model may write it until ``max_tokens``."""

ESCAPES = 'nrbtf\\"'
"""Letters behind a backslash in JSON strings. With ``u``, a property could be written under another spelling of its
name, and its schema would not apply."""

JSON_OPTIONS = {"whitespace_pattern": WHITESPACE, "json_allowed_escapes": ESCAPES}
"""Of each schema, as llguidance takes them inside it."""
_WHOLE = '%llguidance {"no_forcing": true}\nstart: @whole\n'
"""Each token is chosen by its mask alone. Else the library writes the only text that can follow ahead of the tokens,
which takes time by its length: without end for ``T T`` and ``T: "t"+``, of which the first T takes each letter.
"""
_LITERAL_OR_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|#[^\n]*|//[^\n]*|/(?:\\.|[^/\\])+/')
_REFUSED_IN_GRAMMAR = re.compile(r"%json\b|%llguidance\b|\btemperature\b(?=\s*=)|<\[[^\]]*\]>")
_TOKEN = re.compile(r"<[^\s<>]+>")
_NOT_PRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f]")


class GuideKind(StrEnum):
    """Values are the names of the fields of ``GuidedDecoding``, and of workers' ``Guide``.

    ANSWER is a grammar in the form of llguidance, which a router made of a request's tools, guide and reasoning;
    STRUCTURAL_TAG is one that it made of the field.
    """

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "ebnf_grammar"
    CHOICE = "choice"
    JSON_OBJECT = "json_object"
    ANSWER = "answer"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True)
class Guide:
    """``text`` is the schema, the regular expression or the grammar; with CHOICE, ``choices`` are the texts.

    ``answer_field``: the client's field that an ANSWER is made of; empty: the tools.
    """

    kind: GuideKind
    text: str = ""
    choices: tuple[str, ...] = ()
    answer_field: str = ""

    def __post_init__(self) -> None:
        size = len(self.text.encode(errors="surrogatepass")) + sum(len(choice.encode()) for choice in self.choices)
        if size > MAX_GUIDE_BYTES:
            raise InvalidRequest(self.field, f"at most {MAX_GUIDE_BYTES} bytes", size)
        if self.kind is GuideKind.CHOICE:
            _check_choices(self.field, self.choices)

    @classmethod
    def of(cls, name: str, value: Any, answer_field: str = "") -> Guide:
        """Guide of the field ``name`` of a message: a text, True, or a message with choices. Raises InvalidRequest."""
        kind = GuideKind(name)
        if kind is GuideKind.CHOICE:
            return cls(kind, choices=tuple(value.choices))
        if kind is GuideKind.JSON_OBJECT:
            if not value:
                raise InvalidRequest(f"guided.{kind}", "true or unset", value)
            return cls(kind)
        return cls(kind, value, answer_field=answer_field)

    @property
    def field(self) -> str:
        """Field of the client's request, which errors name."""
        return self.answer_field or ("messages.tools" if self.kind is GuideKind.ANSWER else f"guided.{self.kind}")

    def matcher_grammar(self) -> str:
        """``grammar`` for a matcher whose masks take a bounded time."""
        first, *others = json.loads(self.grammar())["grammars"]
        return json.dumps({"grammars": [{"lark_grammar": _WHOLE}, {**first, "name": "whole"}, *others]})

    def grammar(self) -> str:
        """Grammar for ``llguidance``: its JSON. Raises InvalidRequest for what no tokenizer is needed to refuse."""
        match self.kind:
            case GuideKind.JSON_SCHEMA:
                schema = check_schema(self.field, self.text)
                return _grammar(json_schema={**schema, "x-guidance": JSON_OPTIONS})
            case GuideKind.JSON_OBJECT:
                return _grammar(json_schema={"type": "object", "x-guidance": JSON_OPTIONS})
            case GuideKind.CHOICE:
                return _grammar(lark_grammar="start: TEXT\nTEXT: " + " | ".join(map(lark_literal, self.choices)))
            case GuideKind.GRAMMAR:
                return _grammar(lark_grammar=_checked_lark(self.field, self.text))
            case GuideKind.ANSWER | GuideKind.STRUCTURAL_TAG:
                return self.text
            case GuideKind.REGEX:
                return _regex_grammar(self.field, self.text)


def _grammar(**part: Any) -> str:
    return json.dumps({"grammars": [part]})


def _check_choices(field: str, choices: Collection[str]) -> None:
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise InvalidRequest(field, f"1 to {MAX_CHOICES} texts", len(choices))
    if "" in choices:
        raise InvalidRequest(field, "texts of at least 1 character", "")


def lark_literal(text: str) -> str:
    """Term of a grammar that matches a text."""
    literal = json.dumps(text, ensure_ascii=False)
    return _NOT_PRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", literal)


def _regex_grammar(field: str, regex: str) -> str:
    from llguidance import LLMatcher

    if not regex:
        raise InvalidRequest(field, "at least 1 character", regex)
    return LLMatcher.grammar_from_regex(regex)


def _checked_lark(field: str, grammar: str) -> str:
    """Refuse what would be ignored (a temperature) and what would escape checks: of another field, or of end tokens."""
    refused = _REFUSED_IN_GRAMMAR.search(_LITERAL_OR_COMMENT.sub(" ", grammar))
    if refused is not None:
        raise InvalidRequest(field, f"a grammar without {refused[0]}", _near(grammar, refused[0]))
    return grammar


def tokens_in_lark(grammar: str) -> list[str]:
    """Texts of the tokens that a grammar names, such as ``<think>``."""
    return _TOKEN.findall(_LITERAL_OR_COMMENT.sub(" ", grammar))


def _near(text: str, part: str) -> str:
    place = text.find(part)
    return text[max(0, place - 20) : place + 40]
