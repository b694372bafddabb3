"""Checkpoints in known shapes with random weights, on which speed does not depend.

python -m decant.bench.model_shapes --shape qwen2.5-0.5b --out DIR
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from decant.bench.errors import InvalidBenchmark

_COMMON = {"tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}

SHAPES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "qwen2.5-0.5b": {
            **_COMMON,
            "model_type": "qwen2",
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
        "smollm2-135m": {
            **_COMMON,
            "model_type": "llama",
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "vocab_size": 49152,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
        },
        "tiny": {
            **_COMMON,
            "model_type": "llama",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 512,
            "max_position_embeddings": 4096,
        },
    }
)
"""``tiny`` is for tests."""


TOKENIZER = "tokenizer.json"


def cache_folder() -> Path:
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "decant" / "bench"


def make(shape: str, folder: Path | None = None, *, seed: int = 0) -> Path:
    """Make a checkpoint in bfloat16, determined by `seed` and the version of torch; an existing one is kept. Raises
    KeyError for an unknown shape, InvalidBenchmark for a folder with other content.
    """
    config = SHAPES[shape]
    folder = folder or cache_folder() / f"{shape}-{seed}"
    if (folder / "model.safetensors").is_file() and (folder / "config.json").is_file():
        if not (folder / TOKENIZER).is_file():  # of an earlier version
            _write_tokenizer(config["vocab_size"], folder)
        return folder
    if folder.exists() and any(folder.iterdir()):
        raise InvalidBenchmark("folder", "empty, or a checkpoint", folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Write aside and rename when complete: an interrupted run leaves no partial checkpoint.
        aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        limit = f"a folder that can be written ({error.strerror}); HOME or XDG_CACHE_HOME chooses it"
        raise InvalidBenchmark("cache of models", limit, folder.parent) from None
    try:
        _write(dict(config), aside, seed)
        _write_tokenizer(config["vocab_size"], aside)
        aside.chmod(0o755)
        aside.replace(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def source(model: str) -> str:
    """Return the folder of a known shape, made if missing; any other `model` as it is. Raises InvalidBenchmark."""
    return str(make(model)) if model in SHAPES and not Path(model).is_dir() else model


def checkpoint(model: str) -> Path:
    """Return the folder of a checkpoint, as `source` does. Raises FileNotFoundError and InvalidBenchmark."""
    folder = Path(source(model))
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"--model {model}: neither a checkpoint's folder nor one of {', '.join(SHAPES)}")
    return folder


def _write(config: dict[str, Any], folder: Path, seed: int) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    built = AutoConfig.for_model(config.pop("model_type"), **config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(built, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="100GB")


def _write_tokenizer(vocab_size: int, folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"\u0120w{number}" for number in range(vocab_size - len(letters))]
    vocabulary = {token: id for id, token in enumerate([*letters, *words])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    aside = folder / f".{TOKENIZER}-{os.getpid()}"
    tokenizer.save(str(aside))
    aside.replace(folder / TOKENIZER)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m decant.bench.model_shapes", description="make a checkpoint of random weights"
    )
    parser.add_argument("--shape", choices=list(SHAPES), required=True)
    parser.add_argument("--out", type=Path, help="a new or empty folder (default: in the cache)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    try:
        print(make(args.shape, args.out, seed=args.seed))
    except InvalidBenchmark as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
