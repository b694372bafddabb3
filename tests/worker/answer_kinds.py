"""Requests of each kind: guides, calls of tools in each format, reasoning with a budget, and none of them.

Their tokenizer has a token for each printed character of ASCII and for each marker of a format: devices without torch
write the calls of every format as its models do.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from decant.engine.guides.compiler import GrammarCompiler
from decant.engine.guides.guide import Guide, GuideKind
from decant.protos import worker_pb2 as wire
from decant.router.text.answer_grammar import CallRules, LarkTerms, answer_grammar, guide_after_reasoning
from decant.router.text.reasoning.formats import Reasoning, reasoning_of
from decant.router.text.structural_tags import structural_tag_grammar
from decant.router.text.tools.call_format import CallFormat
from decant.router.text.tools.formats import FORMATS
from decant.router.text.tools.hermes import HERMES
from decant.runtime.packed import pack

MARKERS = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]"),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ),
    *("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|constrain|>"),
)
VOCABULARY = 128
END = VOCABULARY - 1
TOOLS = ("a", "b")
REASONING_TOKENS = 2
"""Budget of each reasoning."""
DRAWS = 6
"""Tokens of a call beside the letters of its arguments that are drawn among several."""
MARKUP = 140
"""All tokens of a call beside these letters, at most."""
AVOIDED = -50.0
"""Bias of what would end an output early, or lengthen it by white space: it is drawn only where nothing else may be."""


@cache
def tokenizer() -> Tokenizer:
    letters = [*map(chr, range(33, 127)), "Ġ", "Ċ"]  # a space and a line break, as byte-level tokenizers write them
    made = Tokenizer(models.BPE({letter: id for id, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([*MARKERS, *(f"<{id}>" for id in range(len(letters) + len(MARKERS), END)), "</s>"])
    assert made.token_to_id("</s>") == END
    return made


@cache
def compiler() -> GrammarCompiler:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        tokenizer().save(str(path))
        made = GrammarCompiler(path, VOCABULARY, frozenset({END}))
    assert not made.refusal, made.refusal
    return made


def text(tokens: Sequence[int]) -> str:
    """Text of an output with its markers, without its end token."""
    made: str = tokenizer().decode([token for token in tokens if token != END], skip_special_tokens=False)
    return made


@dataclass(frozen=True)
class AnswerKind:
    """``request`` has the fields of this kind, which are merged into those of any request.

    ``form`` is the format of its calls: the output is one whole call. Other outputs have any length.
    """

    name: str
    request: wire.EngineRequest = field(default_factory=wire.EngineRequest)
    form: CallFormat | None = None

    def of(self, work: wire.EngineRequest) -> wire.EngineRequest:
        made = wire.EngineRequest.FromString(work.SerializeToString())
        made.MergeFrom(self.request)
        return made

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end an output of this kind."""
        return frozenset({END} if self.request.HasField("guide") else ())


PLAIN = AnswerKind("plain", wire.EngineRequest(stopping=wire.Stopping(ignore_eos=True)))


@cache
def answer_kinds(letters: int) -> tuple[AnswerKind, ...]:
    """A request of each kind. Outputs have ``letters`` tokens or more; a call ends after about as many draws, without
    arguments if these are few.
    """
    kinds = (PLAIN, *_guides(letters), *_reasoning(letters), *(_calls(form, letters - DRAWS) for form in FORMATS))
    assert len({kind.name for kind in kinds}) == len(kinds)
    return kinds


def _guides(letters: int) -> Iterator[AnswerKind]:
    tags = {"structures": [{"begin": "(f=", "schema": {"enum": [1, 2]}, "end": ")"}], "triggers": ["(f"]}
    tagged = structural_tag_grammar(json.dumps(tags), _terms().of)
    choices = wire.Guide.Choices(choices=["a" * count + "b" for count in range(letters)])
    yield _kind("regex", "", guide=wire.Guide(regex=f"([a-p][q-z0-9]|[A-P]){{{letters}}}"))
    yield _kind("json_schema", "", guide=wire.Guide(json_schema=_numbers(letters)))
    yield _kind("json_object", "}\\", guide=wire.Guide(json_object=True))
    yield _kind("grammar", "z", guide=wire.Guide(ebnf_grammar='start: /[a-p]/ start | "z"'))
    yield _kind("choice", "b", guide=wire.Guide(choice=choices))
    yield _kind("structural_tag", "", {END: AVOIDED, _id("("): -AVOIDED}, guide=wire.Guide(structural_tag=tagged))


def _reasoning(letters: int) -> Iterator[AnswerKind]:
    reasoning = _open_reasoning()
    limit = _limit(reasoning)
    guide = Guide(GuideKind.JSON_SCHEMA, _numbers(letters)).grammar()
    answer = wire.Guide(answer=guide_after_reasoning(guide, reasoning, _terms()), answer_field="guided.json_schema")
    yield _kind("reasoning", "", reasoning=limit, stopping=wire.Stopping(ignore_eos=True))
    yield _kind("schema after reasoning", "", reasoning=limit, guide=answer)


def _calls(form: CallFormat, letters: int) -> AnswerKind:
    """One call that is required, in one of the formats behind reasoning that the prompt has begun."""
    reasoning = _open_reasoning() if form is HERMES else None
    properties = {"k": {"type": "string", "minLength": letters, "maxLength": letters}} if letters > 0 else {}
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    grammar = answer_grammar(form, CallRules(dict.fromkeys(TOOLS, schema), True, False), _terms(), reasoning)
    fields: dict[str, Any] = {
        "guide": wire.Guide(answer=grammar),
        "stopping": wire.Stopping(max_tokens=letters + MARKUP),
    }
    if reasoning is not None:
        fields["reasoning"] = _limit(reasoning)
    return replace(_kind(form.name, "", **fields), form=form)


def _kind(name: str, avoided: str, bias: dict[int, float] | None = None, **fields: Any) -> AnswerKind:
    """``avoided``: letters that are not drawn where others may be, beside white space."""
    logit_bias = {_id(letter): AVOIDED for letter in ("Ġ", "Ċ", *avoided)} | (bias or {})
    return AnswerKind(name, wire.EngineRequest(sampling=wire.Sampling(logit_bias=logit_bias), **fields))


def _numbers(count: int) -> str:
    return json.dumps({"type": "array", "items": {"type": "integer"}, "minItems": count})


def _id(token: str) -> int:
    id: int = tokenizer().get_vocab()[token]
    return id


@cache
def _terms() -> LarkTerms:
    return LarkTerms(tokenizer(), {END})


def _open_reasoning() -> Reasoning:
    """Reasoning that the prompt has begun."""
    reasoning = reasoning_of("</think>", tokenizer())
    assert reasoning is not None
    return replace(reasoning, markers=replace(reasoning.markers, is_open=True))


def _limit(reasoning: Reasoning) -> wire.ReasoningLimit:
    begin, end, is_open = reasoning.markers.begin, reasoning.markers.end, reasoning.markers.is_open
    return wire.ReasoningLimit(begin=pack(begin), end=end, is_open=is_open, max_tokens=REASONING_TOKENS)
