from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers import models as kinds

from decant import models as trained
from decant.router.text.token_bounds import TextBound, text_bound
from tests.router.tokenizer_factories import MADE, SPECIAL, TEXT, byte_fallback, byte_level


def with_tokens(*added: AddedToken, normalizer: Any = None) -> Tokenizer:
    tokenizer = byte_level()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_tokens(list(added))
    return tokenizer


def characters() -> Tokenizer:
    tokenizer = Tokenizer(kinds.BPE({"<unk>": 0, "a": 1, "é": 2}, [], unk_token="<unk>"))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


BOUNDED = {
    "tiny-python": lambda: Tokenizer.from_file(str(trained.path() / "tokenizer.json")),
    "byte level": byte_level,
    "byte fallback": byte_fallback,
    "composed": lambda: with_tokens(AddedToken("ñañ", normalized=True), normalizer=normalizers.NFC()),
    "lower case": lambda: with_tokens(AddedToken("QUICK"), normalizer=normalizers.Lowercase()),
    "strips spaces": lambda: with_tokens(AddedToken("<mask>", lstrip=True), AddedToken("<end>", rstrip=True)),
    "halves": lambda: with_tokens(normalizer=normalizers.Replace("dogs", "yz")),
    "one by one": characters,
}


@cache
def make_tokenizer(kind: str) -> tuple[Tokenizer, TextBound]:
    tokenizer = BOUNDED[kind]()
    bound = text_bound(tokenizer)
    assert bound is not None, kind
    return tokenizer, bound


PARTS = [
    *SPECIAL,
    *TEXT,
    "<mask>",
    "<end>",
    "dogs" * 9,
    " \t\n\u3000",
    " " * 200,
    "ñañ",
    "n\u0303an\u0303",
    "\u1f82",
    "QUICK",
]
DECOMPOSED = "α\u0313\u0300\u0345"  # four code points, which NFC makes one
TEXTS = st.lists(st.one_of(st.text(max_size=20), st.sampled_from([*PARTS, DECOMPOSED * 50])), max_size=8).map("".join)


@pytest.mark.slow
@pytest.mark.parametrize("kind", BOUNDED)
@given(TEXTS)
@settings(max_examples=150, deadline=None)
def test_no_text_has_fewer_tokens_than_its_bound(kind: str, text: str) -> None:
    tokenizer, bound = make_tokenizer(kind)
    assert bound.least_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("kind", BOUNDED)
def test_a_long_text_has_a_bound_that_grows_with_it(kind: str) -> None:
    _, bound = make_tokenizer(kind)
    assert bound.least_tokens("x" * 100_000) >= 100 * bound.least_tokens("x" * 900) > 0
    assert bound.least_tokens("") == 0


def no_bound() -> dict[str, Tokenizer]:
    unknown_joined = characters()
    unknown_joined.model = kinds.BPE({"<unk>": 0, "a": 1}, [], unk_token="<unk>", fuse_unk=True)
    unknown_dropped = characters()
    unknown_dropped.model = kinds.BPE({"a": 1}, [])
    few_bytes = characters()
    few_bytes.model = kinds.BPE({"<unk>": 0, "<0x41>": 1}, [], unk_token="<unk>", byte_fallback=True)
    removed = byte_level()
    removed.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split("x", "removed"), removed.pre_tokenizer])
    return {
        "Unigram": MADE["metaspace"](),
        "WordPiece": MADE["word_piece"](),
        "unknown characters are joined": unknown_joined,
        "unknown characters are dropped": unknown_dropped,
        "bytes are missing": few_bytes,
        "a pattern is removed": removed,
        "a pattern is replaced": with_tokens(normalizer=normalizers.Replace(Regex(" +"), " ")),
        "accents are removed": with_tokens(normalizer=normalizers.StripAccents()),
    }


@pytest.mark.parametrize("why", no_bound())
def test_where_a_token_may_stand_for_any_text_there_is_no_bound(why: str) -> None:
    assert text_bound(no_bound()[why]) is None
