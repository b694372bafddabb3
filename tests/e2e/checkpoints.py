from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from decant import models

THINK = "<think>", "</think>"


def name_last_tokens(folder: Path, *texts: str) -> list[int]:
    """Give other texts to the last tokens of a copy of the small model, as added tokens; return their ids."""
    file = folder / "tokenizer.json"
    described = json.loads(file.read_text())
    vocabulary = described["model"]["vocab"]
    last = sorted(vocabulary, key=vocabulary.__getitem__)[-len(texts) :]
    ids = [vocabulary.pop(token) for token in last]
    del described["model"]["merges"][-len(texts) :]
    vocabulary.update(zip(texts, ids, strict=True))
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    described["added_tokens"] += [{"id": id, "content": text, **plain} for id, text in zip(ids, texts, strict=True)]
    file.write_text(json.dumps(described))
    return ids


def small_with(folder: Path, name: str, **entries: Any) -> Path:
    shutil.copytree(models.path(), folder)
    file = folder / name
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))
    return folder


TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}# {{ m.role }}: {{ m.content }}{{ m.name }}{{ m.tool_call_id }}{{ m.reasoning }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}def {% endif %}"
    "{% if enable_thinking %}<think>{% endif %}{# </think> #}"
    "{# the format of calls: <tool_call> arguments </tool_call> #}"
)


def chat_model(folder: Path) -> Path:
    """The small model with a template for conversations, tools and reasoning."""
    small_with(folder, "tokenizer_config.json", chat_template=TEMPLATE, split_special_tokens=False)
    name_last_tokens(folder, *THINK)
    return folder
