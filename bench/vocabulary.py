"""Tokenizers of any size: that of tiny-python, with further words that random merges of its words give."""

from __future__ import annotations

import json
import random
from pathlib import Path

from decant import models

MAX_LETTERS = 14


def write(size: int, path: Path) -> None:
    """Write a ``tokenizer.json`` with ``size`` tokens, at least those of tiny-python; the same file each time."""
    made = json.loads((models.path() / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary, merges = made["model"]["vocab"], made["model"]["merges"]
    starts = [token for token in vocabulary if token.removeprefix("\u0120").isalpha()]
    ends = [token for token in starts if token.isalpha() and not token.startswith("\u0120")]
    draw = random.Random(0)
    while len(vocabulary) < size:
        pair = [draw.choice(starts), draw.choice(ends)]
        token = "".join(pair)
        if len(token) > MAX_LETTERS or token in vocabulary:
            continue
        vocabulary[token] = len(vocabulary)
        merges.append(pair)
        starts.append(token)
    path.write_text(json.dumps(made), encoding="utf-8")
