"""Random outputs of a grammar, without a model."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from decant import models
from decant.engine.guides.compiler import Grammar, GrammarCompiler
from decant.router.text.served_model import served
from decant.runtime.model_files import find

VOCABULARY, END = 4096, 1


@cache
def compiler() -> GrammarCompiler:
    """Compiler for the tokenizer of tiny-python."""
    return GrammarCompiler(models.path() / "tokenizer.json", VOCABULARY, frozenset({END}))


@cache
def pieces() -> list[bytes]:
    table = served(find(str(models.path()))).token_table
    return [table.bytes_of(id) for id in range(VOCABULARY)]


@cache
def _closing() -> Any:
    return np.array([any(sign in piece for sign in (b'"', b"}", b"]")) for piece in pieces()])


def allowed(mask: bytes) -> Any:
    return np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little", count=VOCABULARY))


def walk(grammar: Grammar, seed: int, most: int = 150, prefer: Callable[[Any], Any] | None = None) -> str | None:
    """Text of random tokens, among which an end is likely; None if it has not ended after ``most``.

    Raises AssertionError if the grammar can't be followed, or nothing is allowed.
    """
    draw, matcher, output = random.Random(seed), grammar.new_matcher(), list[int]()
    while len(output) < most:
        tokens = allowed(matcher.compute_bitmask())
        assert not matcher.is_error(), matcher.get_error()
        assert len(tokens)
        if END in tokens and (len(tokens) == 1 or draw.random() < 0.3):
            return b"".join(pieces()[token] for token in output).decode()
        tokens = tokens[tokens != END]
        if len(output) > 15 and draw.random() < 0.7 and len(closing := tokens[_closing()[tokens]]):
            tokens = closing
        output.append(int(draw.choice(tokens.tolist())))
        matcher.consume_token(output[-1])
    return None
