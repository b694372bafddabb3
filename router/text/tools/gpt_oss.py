"""GPT-OSS: a message to a function.

<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>
"""

from __future__ import annotations

from decant.router.text.tools.call_format import ARGUMENTS, NAME, SPACE, TOOL, CallFormat, Pattern, Tail, WrittenCalls

_TO = "to=functions."
_MESSAGE = ("<|constrain|>json<|message|>", "json<|message|>", "<|message|>")
_CHANNELS: tuple[Pattern, ...] = ((), ("<|channel|>commentary", SPACE))

GPT_OSS = CallFormat(
    name="gpt-oss",
    declared_by=("<|channel|>", _TO),
    markers=tuple(
        start + channel + _TO for start in ("<|start|>assistant", "") for channel in ("<|channel|>commentary ", " ")
    ),
    heads=tuple((NAME, SPACE, *channel, message, SPACE, "{") for channel in _CHANNELS for message in _MESSAGE),
    tails=(Tail((SPACE, "<|call|>")), Tail((SPACE,))),
    written=WrittenCalls(
        ("<|channel|>commentary to=functions.", TOOL, " <|constrain|>json<|message|>", ARGUMENTS, "<|call|>"),
        between=None,
        text="<|channel|>final<|message|>",
        preamble=("<|channel|>commentary<|message|>", "<|end|><|start|>assistant"),
    ),
)
