"""Weight files as people publish them: served as transformers has them, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from decant.engine.engine import Engine
from decant.engine.errors import ModelRefused
from decant.engine.scheduler import Limits
from tests.engine import tiny
from tests.engine.served import serve

pytestmark = pytest.mark.slow

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
Weights = dict[str, torch.Tensor]
PROMPT, COUNT = (5, 6, 7, 8), 8


def same_head(weights: Weights) -> Weights:
    return {**weights, HEAD: weights[EMBEDDING].clone()}


def other_head(weights: Weights) -> Weights:
    return {**weights, HEAD: weights[EMBEDDING].flip(0).contiguous()}


def without_head(weights: Weights) -> Weights:
    return {name: tensor for name, tensor in weights.items() if name != HEAD}


def published(folder: Path, tied: bool, change: Any, metadata: dict[str, str] | None) -> Path:
    tiny.save(tiny.config("llama", tie_word_embeddings=tied), folder)
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata=metadata)
    return folder


SERVED: dict[str, tuple[bool, Any, dict[str, str] | None]] = {
    "no metadata": (False, dict, None),
    "metadata of another framework": (False, dict, {"format": "mlx"}),
    "tied, with the same head": (True, same_head, None),
    "tied, with another head": (True, other_head, None),
    "tied, without a head": (True, without_head, None),
}


@pytest.mark.parametrize("name", SERVED)
def test_a_file_that_differs_from_the_usual_gives_the_tokens_of_transformers(tmp_path, name):
    folder = published(tmp_path, *SERVED[name])
    engine = Engine(serve(folder, dtype="float32"), Limits(context_length=64))
    tokens = tiny.run(engine, [tiny.greedy("r", PROMPT, COUNT)]).tokens["r"]
    assert tuple(tokens) == tuple(tiny.generate(tiny.reference(folder), PROMPT, COUNT).tokens)


def test_a_head_that_is_neither_there_nor_tied_is_refused_with_the_setting_to_look_at(tmp_path):
    folder = published(tmp_path, False, without_head, None)
    with pytest.raises(ModelRefused, match=r"lm_head\.weight among them; .*tie_word_embeddings"):
        serve(folder, dtype="float32")
