from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BEGIN, END = "<|begin|>", "<|end|>"
BEGIN_ID, END_ID = 0, 1

# Line ends and indentation are separate tokens, so a prompt may stop after either and still be split like
# training text. A single space belongs to the following word.
PIECES = (
    r"\n+"
    r"|[ \t]{2,}"
    r"| ?_*\p{L}+"
    r"| ?\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+"
    r"|\s"
)


def fit(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level tokenizer; it has all 256 bytes, so every text round-trips."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BEGIN, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A $B", special_tokens=[(BEGIN, BEGIN_ID)]
    )
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> list[np.ndarray]:
    """Encode each text as ``int32[tokens]``, with a begin and an end token."""
    encodings = tokenizer.encode_batch(texts)
    return [np.array([*encoding.ids, END_ID], dtype=np.int32) for encoding in encodings]


def save(tokenizer: Tokenizer, folder: Path, model_max_length: int) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "model_max_length": model_max_length,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
