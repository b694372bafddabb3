"""What is read of an adapter's folder, and what is refused by name."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from decant.engine.checkpoint import adapter
from decant.engine.checkpoint.adapter_config import MAX_RANK
from decant.engine.errors import AdapterRefused
from tests.engine import peft_adapters
from tests.engine.peft_adapters import CONFIG, WEIGHTS

QUERY, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
SHAPES = {QUERY: (64, 64), DOWN: (64, 96)}
PREFIX = "base_model.model."


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return peft_adapters.plain(tmp_path / "adapter", SHAPES)


def read(folder: Path) -> adapter.Adapter:
    return adapter.read("pirate", folder)


def test_an_adapter_has_the_matrices_and_the_scaling_of_each_module(folder: Path) -> None:
    peft_adapters.edit(folder, rank_pattern={"q_proj": 4}, alpha_pattern={r"1\.mlp\.down_proj": 6})
    made = read(folder)
    assert {name: (change.shape, change.rank, change.scaling) for name, change in made.changes.items()} == {
        QUERY: ((64, 64), 4, 2.0),
        DOWN: ((64, 96), 4, 1.5),
    }
    assert made.rank == 4


def test_equal_content_has_an_equal_digest_under_any_name(folder: Path, tmp_path: Path) -> None:
    copy = peft_adapters.edit(peft_adapters.plain(tmp_path / "copy", SHAPES), lora_dropout=0.3)
    assert read(folder).digest == adapter.read("other", copy).digest


def _scaled(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor * 1.01 for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: peft_adapters.edit(folder, lora_alpha=9),
        lambda folder: peft_adapters.edit(folder, use_rslora=True),
        lambda folder: peft_adapters.edit(folder, alpha_pattern={"q_proj": 9}),
        lambda folder: peft_adapters.rewrite(folder, _scaled),
    ],
)
def test_other_numbers_or_settings_have_another_digest(change: Callable[[Path], Path], folder: Path) -> None:
    before = read(folder).digest
    assert read(change(folder)).digest != before


SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "another method": ({"peft_type": "IA3"}, "its peft_type is 'IA3'"),
    "DoRA": ({"use_dora": True}, "it uses DoRA"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, r"modules_to_save: \['lm_head'\]"),
    "biases": ({"bias": "all"}, "bias: 'all'"),
    "biases of its own": ({"lora_bias": True}, "it sets lora_bias"),
    "another base": ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
    "a setting of the future": ({"use_sparkles": {"a": 1}}, "it sets use_sparkles"),
    "a large rank": ({"r": MAX_RANK + 1}, f"r in adapter_config.json: a whole number from 1 to {MAX_RANK}, got 513"),
    "a large rank by pattern": ({"rank_pattern": {"q_proj": 10**9}}, r"rank_pattern\[q_proj\].*got 1000000000"),
    "no rank": ({"r": 0}, "r in adapter_config.json"),
    "another rank": ({"r": 5}, r"are \[4, 64\] and \[64, 4\], and adapter_config.json says rank 5"),
    "an alpha that is no number": ({"lora_alpha": float("nan")}, "lora_alpha in adapter_config.json: a finite number"),
    "no targets": ({"target_modules": None}, "target_modules in adapter_config.json"),
    "targets that are no names": ({"target_modules": [1]}, "target_modules in adapter_config.json: a list of names"),
    "other targets": ({"target_modules": ["q_proj"]}, f"{DOWN}, which is not among its target_modules"),
    "other layers": ({"layers_to_transform": [0]}, f"{DOWN}, which is not among its target_modules"),
    "no pattern": ({"target_modules": "(q_proj"}, r"'.*q_proj.*' is no pattern"),
    "an endless pattern": ({"target_modules": "((.*)*)*x"}, "takes more than|is no pattern|not among"),
    "patterns that are none": ({"rank_pattern": [1]}, "rank_pattern in adapter_config.json: an object"),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_that_are_not_served_are_refused_by_name(case: str, folder: Path) -> None:
    changes, reason = SETTINGS[case]
    with pytest.raises(AdapterRefused, match=f"adapter pirate is not served: .*{reason}"):
        read(peft_adapters.edit(folder, **changes))


def _with(name: str, tensor: torch.Tensor) -> Callable[[Path], object]:
    return lambda folder: peft_adapters.rewrite(folder, lambda tensors: tensors | {name: tensor})


def _without(name: str) -> Callable[[Path], object]:
    return lambda folder: peft_adapters.rewrite(
        folder, lambda tensors: {each: tensor for each, tensor in tensors.items() if each != name}
    )


def _truncate(folder: Path) -> None:
    file = folder / WEIGHTS
    file.write_bytes(file.read_bytes()[:-100])


def _pipe(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / WEIGHTS)


UP = f"{PREFIX}{QUERY}.lora_B.weight"
FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "NaN": (_with(UP, torch.full((64, 4), float("nan"))), f"{UP} has numbers that are not finite"),
    "infinite": (_with(UP, torch.full((64, 4), float("inf"))), f"{UP} has numbers that are not finite"),
    "a vector": (_with(UP, torch.ones(64)), rf"{UP} is torch.float32 \[64\]"),
    "integers": (_with(UP, torch.ones(64, 4, dtype=torch.int32)), rf"{UP} is torch.int32"),
    "half of a pair": (_without(UP), f"lacks {UP}"),
    "a magnitude": (_with(f"{PREFIX}{QUERY}.lora_magnitude_vector", torch.ones(64)), "it uses DoRA"),
    "an embedding": (_with(f"{PREFIX}model.embed_tokens.lora_embedding_A", torch.ones(4, 64)), "changes an embedding"),
    "a whole module": (_with(f"{PREFIX}lm_head.weight", torch.ones(4, 64)), "it is no LoRA's"),
    "a module of its own": (_with("x.lora_A.weight", torch.ones(4, 64)), "has x.lora_A.weight: it is no LoRA's"),
    "truncated": (_truncate, f"{WEIGHTS} can't be read as safetensors"),
    "no safetensors": (lambda folder: (folder / WEIGHTS).write_bytes(b"\x80\x04."), "can't be read as safetensors"),
    "empty": (lambda folder: peft_adapters.rewrite(folder, lambda _: {}), f"{WEIGHTS} has no tensors"),
    "a pipe": (_pipe, f"has no file {WEIGHTS}"),
    "a pickle": (lambda folder: (folder / WEIGHTS).rename(folder / "adapter_model.bin"), "pickles can run code"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), f"has no file {WEIGHTS}"),
    "no configuration": (lambda folder: (folder / CONFIG).unlink(), f"has no file {CONFIG}"),
    "no JSON": (lambda folder: (folder / CONFIG).write_text("{"), f"{CONFIG} can't be read"),
    "another JSON": (lambda folder: (folder / CONFIG).write_text("[]"), f"{CONFIG} can't be read: it is no JSON"),
    "deep JSON": (lambda folder: (folder / CONFIG).write_text("[" * 100_000), f"{CONFIG} can't be read"),
    "a long configuration": (
        lambda folder: (folder / CONFIG).write_text(" " * (adapter.MAX_CONFIG_BYTES + 1)),
        f"{CONFIG} has more than {adapter.MAX_CONFIG_BYTES} bytes",
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_files_that_are_not_an_adapter_are_refused_by_name(case: str, folder: Path) -> None:
    change, reason = FILES[case]
    change(folder)
    with pytest.raises(AdapterRefused, match=f"adapter pirate is not served: .*{reason}"):
        read(folder)


def test_a_folder_that_is_none_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(AdapterRefused, match=r"adapter pirate is not served: .*/missing is no folder"):
        read(tmp_path / "missing")


def test_weights_above_the_limit_are_refused_before_they_are_in_memory(folder: Path) -> None:
    with pytest.raises(AdapterRefused, match=f"{WEIGHTS} has more than 1000 bytes"):
        adapter.read("pirate", folder, max_bytes=1000)
