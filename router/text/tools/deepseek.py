"""DeepSeek: calls between markers of their own; V3 and R1 with the arguments in a block of code, V3.1 without."""

from __future__ import annotations

from dataclasses import replace

from decant.router.text.tools.call_format import (
    ARGUMENTS,
    NAME,
    SPACE,
    TOOL,
    CallFormat,
    Pattern,
    Tail,
    WrittenCalls,
)

_FIRST, _LAST = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_BEGIN, _SEPARATOR, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_CALLS: tuple[Pattern, ...] = (
    (SPACE, _BEGIN, "function", _SEPARATOR, NAME, SPACE, "```json", SPACE, "{"),
    (SPACE, _BEGIN, NAME, _SEPARATOR, SPACE, "{"),
)
_ENDS: tuple[Pattern, ...] = ((SPACE, "```", SPACE, _END), (SPACE, _END))

DEEPSEEK_V3_1 = CallFormat(
    name="deepseek-v3.1",
    declared_by=(_FIRST, _SEPARATOR),
    markers=(_FIRST,),
    heads=_CALLS,
    tails=tuple(tail for end in _ENDS for tail in (Tail((*end, SPACE, _LAST, SPACE)), Tail(end, _CALLS))),
    written=WrittenCalls((_BEGIN, TOOL, _SEPARATOR, ARGUMENTS, _END), begin=_FIRST, end=_LAST),
)
DEEPSEEK = replace(
    DEEPSEEK_V3_1,
    name="deepseek",
    declared_by=(*DEEPSEEK_V3_1.declared_by, "```json"),
    written=WrittenCalls(
        (_BEGIN, "function", _SEPARATOR, TOOL, "\n```json\n", ARGUMENTS, "\n```", _END),
        begin=_FIRST,
        between="\n",
        end=_LAST,
    ),
)
