"""Llama 3: the output is ``{"name": "f", "parameters": {...}}``, and perhaps another after a semicolon."""

from __future__ import annotations

from decant.router.text.tools.call_format import SPACE, CallFormat, Tail, WrittenCalls, named_object, written_object

_CALLS = (named_object("parameters"), named_object("arguments"))

LLAMA = CallFormat(
    name="llama",
    declared_by=("ipython", '"name": ', '"parameters": '),
    markers=(),
    heads=(*((SPACE, "<|python_tag|>", *call) for call in _CALLS), *_CALLS),
    tails=(Tail((SPACE, "}", SPACE, ";"), _CALLS), Tail((SPACE, "}", SPACE))),
    written=WrittenCalls(written_object("parameters"), between="; "),
)
