"""Format in which a chat template has its model write calls."""

from __future__ import annotations

from decant.router.text.tools.call_format import CallFormat
from decant.router.text.tools.deepseek import DEEPSEEK, DEEPSEEK_V3_1
from decant.router.text.tools.gpt_oss import GPT_OSS
from decant.router.text.tools.hermes import HERMES
from decant.router.text.tools.llama import LLAMA
from decant.router.text.tools.mistral import MISTRAL, MISTRAL_ARGS

FORMATS = (DEEPSEEK, DEEPSEEK_V3_1, GPT_OSS, MISTRAL_ARGS, MISTRAL, HERMES, LLAMA)
"""The first one that a template declares counts."""
_OTHERS = ("<function=",)
"""Texts of formats that are not known here, in templates with markers of those that are."""


def format_of(template: str) -> CallFormat | None:
    if any(text in template for text in _OTHERS):
        return None
    return next((form for form in FORMATS if all(text in template for text in form.declared_by)), None)
