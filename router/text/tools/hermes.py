"""Hermes, Qwen 2.5 and 3: ``<tool_call>{"name": "f", "arguments": {...}}</tool_call>``, once for each call."""

from __future__ import annotations

from decant.router.text.tools.call_format import (
    OBJECT,
    SPACE,
    CallFormat,
    Tail,
    WrittenCalls,
    named_object,
    written_object,
)

HERMES = CallFormat(
    name="hermes",
    declared_by=("<tool_call>", "arguments"),
    markers=("<tool_call>",),
    heads=(named_object("arguments"), OBJECT),
    tails=(Tail((SPACE, "}", SPACE, "</tool_call>", SPACE)),),
    object_tails=(Tail((SPACE, "</tool_call>", SPACE)),),
    written=WrittenCalls(("<tool_call>\n", *written_object("arguments"), "\n</tool_call>"), between="\n"),
)
