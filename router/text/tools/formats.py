"""Format in which a chat template has its model write calls."""

from __future__ import annotations

from decant.router.text.tools.call_format import CallFormat
from decant.router.text.tools.deepseek import DEEPSEEK, DEEPSEEK_V3_1
from decant.router.text.tools.gpt_oss import GPT_OSS
from decant.router.text.tools.hermes import HERMES
from decant.router.text.tools.llama import LLAMA
from decant.router.text.tools.mistral import MISTRAL, MISTRAL_ARGS
from decant.router.text.tools.qwen3_coder import QWEN3_CODER

FORMATS = (QWEN3_CODER, DEEPSEEK, DEEPSEEK_V3_1, GPT_OSS, MISTRAL_ARGS, MISTRAL, HERMES, LLAMA)
"""The first one that a template declares counts."""
_OTHERS = ("<function=",)
"""Texts of formats that are not known here, in templates with markers of those that are."""


def format_of(template: str) -> CallFormat | None:
    form = next((form for form in FORMATS if all(text in template for text in form.declared_by)), None)
    if form is not None and any(text in template for text in _OTHERS if text not in form.declared_by):
        return None
    return form
