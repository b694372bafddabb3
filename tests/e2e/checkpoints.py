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
