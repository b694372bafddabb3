"""DeepSeek: calls between markers of their own; V3 and R1 with the arguments in a block of code, V3.1 without."""

from __future__ import annotations

from decant.router.text.tools.call_format import NAME, SPACE, CallFormat, Pattern, Tail

_BEGIN, _SEPARATOR, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_LAST = "<｜tool▁calls▁end｜>"
_CALLS: tuple[Pattern, ...] = (
    (SPACE, _BEGIN, "function", _SEPARATOR, NAME, SPACE, "```json", SPACE, "{"),
    (SPACE, _BEGIN, NAME, _SEPARATOR, SPACE, "{"),
)
_ENDS: tuple[Pattern, ...] = ((SPACE, "```", SPACE, _END), (SPACE, _END))

DEEPSEEK = CallFormat(
    name="deepseek",
    declared_by=("<｜tool▁calls▁begin｜>", _SEPARATOR),
    markers=("<｜tool▁calls▁begin｜>",),
    heads=_CALLS,
    tails=tuple(tail for end in _ENDS for tail in (Tail((*end, SPACE, _LAST, SPACE)), Tail(end, _CALLS))),
)
