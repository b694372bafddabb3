"""Grammar of a whole answer, in the form of llguidance: reasoning, then text or calls of tools, or a client's guide.

One grammar covers all of it, from the first token on: none begins at a marker that the model may write otherwise.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from decant.engine.guides.guide import JSON_OPTIONS, lark_literal, tokens_in_lark
from decant.router.text.reasoning.formats import Reasoning
from decant.router.text.tools.call_format import ARGUMENTS, PARAMETERS, TOOL, CallFormat, WrittenCalls
from decant.router.text.tools.xml_grammar import parameter_rules


@dataclass(frozen=True, slots=True)
class CallRules:
    """``arguments`` has the schema of each tool that may be called, by its name."""

    arguments: Mapping[str, Mapping[str, Any]]
    is_required: bool
    is_parallel: bool


class LarkTerms:
    """Texts as terms of rules, for one tokenizer. A text that is a token of its own stands for that token alone; one of
    an end token for nothing, since the output ends there.
    """

    def __init__(self, tokenizer: Tokenizer, eos: Collection[int]) -> None:
        self.eos = sorted(eos)
        added = tokenizer.get_added_tokens_decoder().items()
        self._ids = {token.content: id for id, token in added if token.special or _is_tag(token.content)}
        longest_first = sorted(filter(None, self._ids), key=len, reverse=True)
        self._pattern = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")

    def of(self, text: str) -> str:
        return " ".join(self._terms(text))

    def end_token_in(self, lark: str) -> str | None:
        """An end token that a grammar names, whose output would end there without a match."""
        return next((token for token in tokens_in_lark(lark) if self._ids.get(token) in self.eos), None)

    def _terms(self, text: str) -> Iterator[str]:
        for part in filter(None, self._pattern.split(text)):
            if part not in self._ids:
                yield lark_literal(part)
            elif self._ids[part] not in self.eos:
                yield f"<[{self._ids[part]}]>"


def _is_tag(text: str) -> bool:
    """Whether llguidance takes an added token with this text for a special one."""
    return text.startswith("<") and text.endswith(">")


def answer_grammar(form: CallFormat, rules: CallRules, terms: LarkTerms, reasoning: Reasoning | None = None) -> str:
    """Grammar of answers of ``form``. Reasoning may come first, and does if the prompt has begun it."""
    lines = [*_start(reasoning, terms), *_answer(form, rules, terms), *_calls(form.written, rules, terms)]
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(lines) + "\n"}]})


def guide_after_reasoning(grammar: str, reasoning: Reasoning, terms: LarkTerms) -> str:
    """Grammar of a guide, in the form of llguidance, behind the reasoning."""
    first, *others = json.loads(grammar)["grammars"]
    lines = [*_start(reasoning, terms), f"answer: {terms.of(reasoning.form.answer)} @guide"]
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(lines) + "\n"}, {**first, "name": "guide"}, *others]})


def _start(reasoning: Reasoning | None, terms: LarkTerms) -> Iterator[str]:
    if reasoning is None:
        yield "start: answer"
        return
    markers, form = reasoning.markers, reasoning.form
    begin = "" if markers.is_open else " ".join(f"<[{id}]>" for id in markers.begin)
    others = ",".join(map(str, sorted({markers.begin[0], markers.end, *terms.eos})))
    yield f"start: {'thought' if markers.is_open else 'thought?'} answer"
    yield f"thought: {begin} <[^{others}]>* <[{markers.end}]> {terms.of(form.then)}"


def _answer(form: CallFormat, rules: CallRules, terms: LarkTerms) -> Iterator[str]:
    written = form.written
    if rules.is_required:
        yield "answer: calls"
        return
    if not form.markers:
        yield "answer: TEXT? | calls"
        yield r"TEXT: /(?s:.+)/ & ~(/\s*/ " + f"({_any_of(['{', *_marks(form)])}) ANY)"
    else:
        before, behind = map(terms.of, written.preamble)
        calls = f"({before} TEXT {behind})? calls"
        yield f"answer: {terms.of(written.text)} TEXT? | {calls}"
        yield f"TEXT: /(?s:.+)/ & ~(ANY ({_any_of(form.markers)}) ANY)"
    yield "ANY: /(?s:.*)/"


def _marks(form: CallFormat) -> list[str]:
    """Texts before the first brace of the calls of a format without markers."""
    return [part for head in form.heads for part in head[:2] if isinstance(part, str) and "{" not in part]


def _any_of(texts: Collection[str]) -> str:
    return " | ".join(map(lark_literal, dict.fromkeys(texts)))


def _calls(written: WrittenCalls, rules: CallRules, terms: LarkTerms) -> Iterator[str]:
    several = rules.is_parallel and written.between is not None
    others = f"({terms.of(written.between or '')} call)*" if several else ""
    yield f"calls: {terms.of(written.begin)} call {others} {terms.of(written.end)}"
    yield "call: " + " | ".join(f"call_{place}" for place in range(len(rules.arguments)))
    for place, (tool, schema) in enumerate(rules.arguments.items()):
        yield from _call(f"call_{place}", written.call, tool, schema, terms)


def _call(
    rule: str, pattern: Sequence[object], tool: str, schema: Mapping[str, Any], terms: LarkTerms
) -> Iterator[str]:
    """Rules of a call. The texts around the name and the name are one text, as the tokenizer sees them."""
    made, text = [], ""
    for part in pattern:
        if part is ARGUMENTS:
            arguments = json.dumps({**schema, "x-guidance": JSON_OPTIONS}, ensure_ascii=False)
            made += [terms.of(text), f"%json {arguments}"]
            text = ""
        elif part is PARAMETERS:
            parameters = parameter_rules(f"{rule}_parameter", schema)
            yield from parameters.lines
            made += [terms.of(text), parameters.term]
            text = ""
        else:
            text += tool if part is TOOL else str(part)
    yield f"{rule}: " + " ".join([*made, terms.of(text)])
