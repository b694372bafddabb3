"""Mistral, in two versions: ``[TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...]`` and, later,
``[TOOL_CALLS]f[ARGS]{...}`` once for each call.
"""

from __future__ import annotations

from decant.router.text.tools.call_format import (
    ARGUMENTS,
    NAME,
    OBJECT,
    SPACE,
    TOOL,
    CallFormat,
    Pattern,
    Tail,
    WrittenCalls,
    named_object,
    written_object,
)

_CALLS = (named_object("arguments"), OBJECT)
_ID: Pattern = (SPACE, ",", SPACE, '"id"', SPACE, ":", SPACE, '"', NAME, '"')
_ENDS: tuple[Pattern, ...] = ((SPACE, "}"), (*_ID, SPACE, "}"))

MISTRAL = CallFormat(
    name="mistral",
    declared_by=("[TOOL_CALLS]",),
    markers=("[TOOL_CALLS]",),
    heads=tuple((SPACE, "[", *call) for call in _CALLS),
    tails=tuple(tail for end in _ENDS for tail in (Tail((*end, SPACE, ","), _CALLS), Tail((*end, SPACE, "]", SPACE)))),
    object_tails=(Tail((SPACE, ","), _CALLS), Tail((SPACE, "]", SPACE))),
    written=WrittenCalls(written_object("arguments"), begin="[TOOL_CALLS] [", between=", ", end="]"),
)

MISTRAL_ARGS = CallFormat(
    name="mistral-args",
    declared_by=("[TOOL_CALLS]", "[ARGS]"),
    markers=("[TOOL_CALLS]",),
    heads=((SPACE, NAME, "[CALL_ID]", NAME, "[ARGS]", SPACE, "{"), (SPACE, NAME, "[ARGS]", SPACE, "{")),
    tails=(Tail((SPACE,)),),
    written=WrittenCalls(("[TOOL_CALLS]", TOOL, "[ARGS]", ARGUMENTS)),
)
