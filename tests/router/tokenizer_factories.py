from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors, trainers
from tokenizers import models as kinds

TEXT = [
    "def route(request): return await pool.place(request, 0.5)",
    "Größe, naïve café, señor; the quick brown fox jumps over the lazy dog, and then the dog jumps too",
    "日本語のテキスト и немного русского, 中文字符",
    "emoji 😀 👨‍👩‍👧 🇩🇪 and numbers 1234567890 !?-_ ##x can't do n't",
]
SPECIAL = ["<s>", "</s>", "<|tool|>"]


def byte_level() -> Tokenizer:
    """Tokenizer like those of GPT-2, Llama 3 and Qwen."""
    tokenizer = Tokenizer(kinds.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    tokenizer.add_tokens([AddedToken("<tool call>", normalized=False), AddedToken("é!", normalized=False)])
    return tokenizer


def _begin(tokenizer: Tokenizer) -> None:
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )


def byte_fallback(*, strip: bool = True) -> Tokenizer:
    """Tokenizer like those of Llama 2 (with the strip) and Gemma (without): what has no token is written in bytes."""
    special = ["<unk>", *SPECIAL]
    words = ["▁", "a", "b", "x", "▁the", "▁a", "th", "e", "é", "日", "▁▁", "�", "<0x4>"]
    listed = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    tokenizer = Tokenizer(
        kinds.BPE(
            {token: id for id, token in enumerate(listed)}, [("t", "h")][:0], byte_fallback=True, unk_token="<unk>"
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens([" odd ", "<0xZZ>"])
    _begin(tokenizer)
    return tokenizer


def metaspace() -> Tokenizer:
    """Tokenizer like those of T5 and XLNet."""
    tokenizer = Tokenizer(kinds.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(
        TEXT, trainers.UnigramTrainer(vocab_size=150, special_tokens=["<unk>", *SPECIAL], unk_token="<unk>")
    )
    _begin(tokenizer)
    return tokenizer


def word_piece() -> Tokenizer:
    """Tokenizer like BERT's."""
    tokenizer = Tokenizer(kinds.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.train_from_iterator(TEXT, trainers.WordPieceTrainer(vocab_size=300, special_tokens=["<unk>", *SPECIAL]))
    _begin(tokenizer)
    return tokenizer


def end_of_word() -> Tokenizer:
    """Tokenizer like those of CLIP's text side and GPT: a word's last token contains its end."""
    tokenizer = Tokenizer(kinds.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder()
    tokenizer.train_from_iterator(
        TEXT,
        trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", *SPECIAL], end_of_word_suffix="</w>"),
    )
    return tokenizer


def words() -> Tokenizer:
    tokenizer = Tokenizer(kinds.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(TEXT, trainers.WordLevelTrainer(special_tokens=["<unk>", *SPECIAL]))
    return tokenizer


MADE = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "byte_fallback_unstripped": lambda: byte_fallback(strip=False),
    "metaspace": metaspace,
    "word_piece": word_piece,
    "end_of_word": end_of_word,
    "words": words,
}


def folder(path: Path, tokenizer: Tokenizer, config: Mapping[str, Any] | None = None) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    described = {"model_type": "llama", "max_position_embeddings": 64, "vocab_size": size, "eos_token_id": 2}
    (path / "config.json").write_text(json.dumps(described))
    written = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", **(config or {})}
    (path / "tokenizer_config.json").write_text(json.dumps(written))
    return path
