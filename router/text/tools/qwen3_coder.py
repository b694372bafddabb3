"""Qwen3-Coder and Qwen 3.5: ``<tool_call><function=f><parameter=k>value</parameter></function></tool_call>``, once for
each call.
"""

from __future__ import annotations

from decant.router.text.tools.call_format import NAME, PARAMETERS, SPACE, TOOL, CallFormat, Tail, WrittenCalls
from decant.router.text.tools.xml_parameters import BEGIN, END, LAST, XmlParameters

QWEN3_CODER = CallFormat(
    name="qwen3-coder",
    declared_by=("<tool_call>", "<function=", BEGIN),
    markers=("<tool_call>",),
    heads=((SPACE, "<function=", NAME, ">"),),
    tails=(Tail((SPACE, "</tool_call>", SPACE)),),
    written=WrittenCalls(
        ("<tool_call>\n<function=", TOOL, ">\n", PARAMETERS, f"{LAST}\n</tool_call>"),
        between="\n",
    ),
    arguments=XmlParameters,
    opening="",
    inner=(BEGIN, END, LAST),
)
