"""The tokenizer of a GGUF file gives the token ids of the tokenizer that the file was made of."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoTokenizer

from decant.router.text.served_model import ServedModel, load
from decant.runtime.gguf.tokenizer import GgufTokenizer
from tests import gguf_files
from tests.router.tokenizer_factories import TEXT, byte_level

TEXTS = [
    *TEXT,
    "the theory's  end\n\n  then 12345 x=1\r\n\t'LL I'm  ",
    "<|im_start|>user\nhi<|im_end|><think>why</think>",
    "e\u0301 \u212b ﬁ",
    "",
    " ",
]
KIND = {"normal": 1, "unknown": 2, "control": 3, "user": 4, "byte": 6}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def served(path: Path, metadata: dict[str, Any]) -> ServedModel:
    size = len(metadata["tokenizer.ggml.tokens"])
    file = gguf_files.small(**metadata)
    numbers, kind = file.tensors["token_embd.weight"]
    file.tensors["token_embd.weight"] = numbers[:1].repeat(size, 0), kind
    return load([str(file.write(path))]).default


def of_bytes(pre: str, **values: Any) -> dict[str, Any]:
    """Metadata of the tokenizer ``byte_level``, as the converter writes it."""
    described = json.loads(byte_level().to_str())
    tokens = {**described["model"]["vocab"], **{token["content"]: token["id"] for token in described["added_tokens"]}}
    listed = sorted(tokens, key=lambda token: tokens[token])
    special = {token["content"]: token["special"] for token in described["added_tokens"]}
    kinds = [
        KIND["normal"] if token not in special else KIND["control" if special[token] else "user"] for token in listed
    ]
    metadata = {
        "model": "gpt2",
        "pre": pre,
        "tokens": listed,
        "token_type": kinds,
        "merges": [" ".join(merge) for merge in described["model"]["merges"]],
        "bos_token_id": tokens["<s>"],
        "eos_token_id": tokens["</s>"],
        "padding_token_id": None,
        "add_bos_token": None,
        **values,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in metadata.items()}


@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe"])
def test_token_ids_are_those_of_transformers_reading_the_same_file(pre: str, tmp_path: Path) -> None:
    model = served(tmp_path / "m.gguf", of_bytes(pre))
    expected = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    for text in TEXTS:
        ids = model._encode(text, False)
        composed = unicodedata.normalize("NFC", text) if pre == "qwen2" else text  # as the published tokenizer does
        assert ids == expected(composed, add_special_tokens=False).input_ids, text
        assert model._decode(ids, False) == expected.decode(ids)


def test_the_steps_before_the_merges_are_those_of_the_name(tmp_path: Path) -> None:
    original = byte_level()  # as GPT-2 splits a text
    model = served(tmp_path / "m.gguf", of_bytes("gpt-2"))
    for text in TEXTS:
        assert model._encode(text, False) == original.encode(text, add_special_tokens=False).ids
    digits = served(tmp_path / "digits.gguf", of_bytes("smollm"))
    original.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in TEXTS:
        assert digits._encode(text, False) == original.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize(
    ("pre", "values", "begins"),
    [
        ("qwen2", {}, False),
        ("llama-bpe", {}, True),
        ("llama-bpe", {"add_bos_token": False}, False),
        ("gpt-2", {"add_bos_token": True}, True),
        ("llama-bpe", {"bos_token_id": None}, False),
    ],
)
def test_a_prompt_begins_with_the_bos_token_as_in_llama_cpp(
    pre: str, values: dict[str, Any], begins: bool, tmp_path: Path
) -> None:
    model = served(tmp_path / "m.gguf", of_bytes(pre, **values))
    plain = model._encode("the end", False)
    bos = model.tokenizer.token_to_id("<s>")
    assert model._encode("the end", True) == ([bos, *plain] if begins else plain)
    assert not model.contradictions


def test_a_word_that_is_a_token_is_that_token_in_llama_3_alone(tmp_path: Path) -> None:
    tokens, merges = sorted([*gguf_files.byte_characters(), "zqz", "zq"]), ["z q"]
    metadata = {"tokens": tokens, "token_type": [1] * len(tokens), "merges": merges, "bos_token_id": None}
    metadata |= {"eos_token_id": None, "padding_token_id": None}
    named = {f"tokenizer.ggml.{name}": value for name, value in metadata.items()}
    for pre, expected in (("llama-bpe", ["zqz"]), ("qwen2", ["zq", "z"])):
        model = served(tmp_path / f"{pre}.gguf", {**named, "tokenizer.ggml.pre": pre})
        assert [model.tokenizer.id_to_token(id) for id in model._encode("zqz", False)] == expected


WORDS = ["▁", "t", "h", "e", "a", "n", "d", "th", "the", "▁the", "an", "and", "▁and", "▁▁", "en", "hen", "é", "▁then"]
PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS, "[INST]"]


def of_pieces(**values: Any) -> dict[str, Any]:
    """Metadata as of a SentencePiece model: longer words have lower scores, as those found later in its training."""
    kinds = [KIND["unknown"], KIND["control"], KIND["control"], *[KIND["byte"]] * 256, *[KIND["normal"]] * len(WORDS)]
    metadata = {
        "model": "llama",
        "pre": "default",
        "tokens": PIECES,
        "token_type": [*kinds, KIND["user"]],
        "scores": [0.0] * 259 + [-float(index) for index in range(len(WORDS))] + [0.0],
        "merges": None,
        "unknown_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "padding_token_id": None,
        "add_bos_token": None,
        **values,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in metadata.items()}


def test_sentencepiece_ids_are_those_of_transformers_reading_the_same_file(tmp_path: Path) -> None:
    model = served(tmp_path / "m.gguf", of_pieces())
    expected = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    for text in ("the hen and then the end", "日本 é x", "then\nand", "thethe  and"):
        ids = model._encode(text, True)
        assert ids == expected(text).input_ids
        assert ids[0] == 1
        assert model._decode(ids, True) == text


def test_spaces_before_a_prompt_stay_and_one_is_added(tmp_path: Path) -> None:
    model = served(tmp_path / "m.gguf", of_pieces())
    texts = {text: [PIECES[id] for id in model._encode(text, False)] for text in (" the", "the[INST]and")}
    assert texts == {" the": ["▁", "▁the"], "the[INST]and": ["▁the", "[INST]", "▁and"]}
    without = served(tmp_path / "n.gguf", of_pieces(add_space_prefix=False))
    assert [PIECES[id] for id in without._encode("the and", False)] == ["the", "▁and"]


@given(text=st.text(st.sampled_from("thean d▁é\n日"), max_size=30))
def test_any_text_of_bytes_comes_back(text: str) -> None:
    tokenizer = Tokenizer.from_str(json.dumps(_converted()))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == text.replace("▁", " ")


def _converted() -> dict[str, Any]:
    return GgufTokenizer({name: value for name, value in of_pieces().items() if value is not None}).tokenizer_json()


def test_templates_with_names_are_kept(tmp_path: Path) -> None:
    values: dict[str, Any] = {"tokenizer.chat_template": "{{ 1 }}", "tokenizer.chat_template.tool_use": "{{ 2 }}"}
    model = load([str(gguf_files.small(**values).write(tmp_path / "m.gguf"))]).default
    assert model.chat is not None
    assert model.tool_chat is not None
    assert load([str(gguf_files.small().write(tmp_path / "n.gguf"))]).default.has_chat_template
