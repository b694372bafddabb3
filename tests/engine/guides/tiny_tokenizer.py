"""Tokenizer of 64 tokens, for devices without torch: letters, digits, what JSON needs, and an end token."""

from __future__ import annotations

import string
import tempfile
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from decant.engine.guides.compiler import GrammarCompiler

LETTERS = string.ascii_lowercase + string.digits + '{}[]",:-.+ABCDEFGHIJKLMNOP'
END = 63


def tokenizer() -> Tokenizer:
    made = Tokenizer(models.BPE({letter: id for id, letter in enumerate(LETTERS)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([f"<{id}>" for id in range(len(LETTERS), END)])
    made.add_special_tokens(["</s>"])
    assert made.token_to_id("</s>") == END
    return made


@cache
def compiler() -> GrammarCompiler:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        tokenizer().save(str(path))
        made = GrammarCompiler(path, END + 1, frozenset({END}))
    assert not made.refusal
    return made


def text(tokens: list[int]) -> str:
    """Text of an output, without its end token."""
    return "".join(LETTERS[token] for token in tokens if token != END)
