from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from decant import models

# Hypothesis does not combine well with session-scoped fixtures, so the file is loaded once here.
FAST = Tokenizer.from_file(str(models.path() / "tokenizer.json"))


def byte_letters() -> dict[int, str]:
    """Letters of bytes in a byte-level vocabulary (Radford et al., 2019)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


LETTERS = byte_letters()
BYTES = {letter: byte for byte, letter in LETTERS.items()}


def bytes_of(ids: list[int]) -> bytes:
    pieces = (FAST.id_to_token(token) for token in ids)
    return bytes(BYTES[letter] for piece in pieces for letter in piece or "")


def test_begin_and_end_are_two_tokens(tokenizer):
    assert (tokenizer.bos_token, tokenizer.bos_token_id) == ("<|begin|>", 0)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|end|>", 1)
    assert tokenizer("x = 1").input_ids[0] == tokenizer.bos_token_id
    assert tokenizer.eos_token_id not in tokenizer("x = 1").input_ids


def test_the_vocabulary_is_about_four_thousand_and_fits_the_model(tokenizer, model):
    assert 3_800 <= len(tokenizer) <= 4_200
    assert len(tokenizer) == model.config.vocab_size


@pytest.mark.parametrize("byte", range(256))
def test_every_byte_has_a_token(byte):
    token = FAST.token_to_id(LETTERS[byte])
    assert token is not None
    assert bytes_of([token]) == bytes([byte])


@given(st.text())
@example("<|begin|>")
@settings(max_examples=300, deadline=None)
def test_any_text_comes_back(text):
    ids = FAST.encode(text, add_special_tokens=False).ids
    assert FAST.decode(ids, skip_special_tokens=False) == text
    assert bytes_of(ids) == text.encode()


@given(st.binary())
@settings(max_examples=300, deadline=None)
def test_any_bytes_come_back_as_latin_1_text(raw):
    text = raw.decode("latin-1")
    ids = FAST.encode(text, add_special_tokens=False).ids
    assert FAST.decode(ids, skip_special_tokens=False).encode("latin-1") == raw


@pytest.mark.slow
@given(st.binary())
@settings(max_examples=300, deadline=None)
def test_any_bytes_have_tokens_though_they_are_no_text(raw):
    ids = [token for token in (FAST.token_to_id(LETTERS[byte]) for byte in raw) if token is not None]
    assert bytes_of(ids) == raw


@given(st.text(alphabet=" \t\n\r\f_a1.<|end>é中😀"))
@settings(max_examples=300, deadline=None)
def test_spaces_line_ends_and_long_characters_come_back(text):
    ids = FAST.encode(text, add_special_tokens=False).ids
    assert FAST.decode(ids, skip_special_tokens=False) == text


def test_a_special_token_spelt_out_in_text_stays_text(tokenizer):
    text = "print('<|end|>')<|begin|>"
    ids = tokenizer(text).input_ids
    assert {tokenizer.bos_token_id, tokenizer.eos_token_id} & set(ids[1:]) == set()
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_a_prompt_cut_after_a_line_end_is_a_prefix_of_the_whole():
    whole = FAST.encode("def f(x):\n    return x\n").ids
    for cut in ("def f(x):", "def f(x):\n", "def f(x):\n    "):
        ids = FAST.encode(cut).ids
        assert whole[: len(ids)] == ids
