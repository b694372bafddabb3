from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoConfig

from decant.engine.checkpoint import model_types, weight_files
from decant.engine.checkpoint.checkpoint import Checkpoint
from decant.engine.checkpoint.weight_shapes import HEADS_DIVIDE_HIDDEN, LLAMA_SHAPED
from decant.engine.errors import ModelRefused
from decant.engine.library_errors import refuse_model_on_error
from tests.engine import tiny, tiny_configs
from tests.engine.served import edit, rewrite

CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size": 128}, "hidden_size"),
    ({"vocab_size": 999}, "vocab_size"),
    ({"num_attention_heads": 8}, "num_attention_heads"),
    ({"num_key_value_heads": 4}, "num_key_value_heads"),
    ({"num_hidden_layers": 1}, "num_hidden_layers = 1"),
    ({"num_hidden_layers": 3}, "num_hidden_layers = 3"),
]


def save_checkpoint(kind: str, folder: Path) -> Path:
    changes = {"num_local_experts": 4} if kind == "mixtral" else tiny_configs.MOE if kind.endswith("_moe") else {}
    return tiny.save(tiny.config(kind, **changes), folder)


def read_by_transformers(folder: Path) -> None:
    with refuse_model_on_error(str(folder), "its configuration is not one of that type"):
        config = AutoConfig.from_pretrained(folder)
    Checkpoint(str(folder), None, config).read(torch.float32, torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(LLAMA_SHAPED))
def test_a_configuration_of_other_sizes_is_refused_by_headers_and_by_transformers(kind: str, tmp_path: Path) -> None:
    folder = save_checkpoint(kind, tmp_path)
    saved = (folder / "config.json").read_text()
    weight_files.check(folder)
    read_by_transformers(folder)
    for changes, named in CHANGES:
        with pytest.raises(ModelRefused, match=named):
            weight_files.check(edit(folder, **changes))
        with pytest.raises(ModelRefused):
            read_by_transformers(folder)
        (folder / "config.json").write_text(saved)


@pytest.mark.parametrize("kind", sorted(HEADS_DIVIDE_HIDDEN))
def test_without_a_width_of_heads_it_follows_from_the_hidden_size(kind: str, tmp_path: Path) -> None:
    folder = save_checkpoint(kind, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config.pop("head_dim", None)
    (folder / "config.json").write_text(json.dumps(config))
    weight_files.check(folder)
    read_by_transformers(folder)
    with pytest.raises(ModelRefused, match="num_key_value_heads x head_dim"):
        weight_files.check(edit(folder, num_attention_heads=2))


def test_sizes_that_the_configuration_leaves_to_its_type_are_not_compared(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    for field in ("hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "intermediate_size"):
        del config[field]
    (copy / "config.json").write_text(json.dumps(config))
    weight_files.check(copy)


Tensors = dict[str, torch.Tensor]


@pytest.mark.parametrize(
    "change",
    [
        lambda had: {name.removeprefix("model."): tensor for name, tensor in had.items()},
        lambda had: had | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)},
        lambda had: had | {"model.layers.9.self_attn.rotary_emb.inv_freq": torch.ones(8)},
    ],
)
def test_names_and_constants_of_older_checkpoints_pass(change: Callable[[Tensors], Tensors], copy: Path) -> None:
    weight_files.check(rewrite(copy, change))
    read_by_transformers(copy)


def test_an_untied_output_layer_is_compared_and_a_tied_one_is_not(copy: Path) -> None:
    rewrite(copy, lambda had: had | {"lm_head.weight": torch.ones(5, 64)})
    with pytest.raises(ModelRefused, match=r"lm_head\.weight in model\.safetensors is \[5, 64\], and by config\.json"):
        weight_files.check(edit(copy, tie_word_embeddings=False))
    weight_files.check(edit(copy, tie_word_embeddings=True))


def test_a_tensor_whose_offsets_are_not_those_of_its_shape_is_refused(copy: Path) -> None:
    file = copy / "model.safetensors"
    content = file.read_bytes()
    assert b'"shape":[64]' in content
    file.write_bytes(content.replace(b'"shape":[64]', b'"shape":[63]', 1))
    with pytest.raises(ModelRefused, match=r"has 256 bytes of model\..*, and its shape \[63\] needs 252"):
        weight_files.check(copy)
    with pytest.raises(SafetensorError):
        load_file(file)


def test_every_model_type_of_transformers_is_known_and_no_other() -> None:
    for kind in CONFIG_MAPPING:
        model_types.check("folder", {"model_type": kind})
    for unknown in ("llamma", "", None, 3, ["llama"]):
        with pytest.raises(ModelRefused, match="transformers has no code for it"):
            model_types.check("folder", {"model_type": unknown})
    with pytest.raises(ModelRefused, match=r"requires remote code \(auto_map\)"):
        model_types.check("folder", {"model_type": "own", "auto_map": {}})


def test_without_transformers_every_model_type_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_types, "_registries", lambda: "")
    model_types.check("folder", {"model_type": "own"})
