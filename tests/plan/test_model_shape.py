from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from decant import models
from decant.engine.checkpoint import checkpoint
from decant.engine.errors import ModelRefused
from decant.plan.capacity.model_shape import find_shape, parse_shape, read_shape
from decant.plan.errors import InvalidPlan
from tests import gguf_files
from tests.engine import tiny, tiny_configs
from tests.engine.served import edit, serve
from tests.engine.test_architectures import REFUSED

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", tiny_configs.SERVED)
def test_a_plan_has_the_parameters_and_the_kv_layout_of_a_worker(kind: str, tmp_path: Path) -> None:
    folder = tiny.save(tiny.config(kind), tmp_path)
    shape = read_shape(folder)
    loaded = checkpoint.open(str(folder)).read(torch.float32, torch.device("cpu"))
    assert shape.params == sum(parameter.numel() for parameter in loaded.parameters())
    device = serve(folder, dtype="float32")
    assert shape.kv_layout("float32") == device.store.layout
    assert shape.context == device.context_length


@pytest.mark.parametrize("kind", REFUSED)
def test_a_plan_refuses_what_a_worker_refuses_with_the_same_words(kind: str, tmp_path: Path) -> None:
    changes, reason = REFUSED[kind]
    folder = tiny.save(tiny.config(kind, **changes), tmp_path)
    with pytest.raises(ModelRefused) as of_worker:
        serve(folder, context_length=128)
    with pytest.raises(ModelRefused, match=reason) as of_plan:
        read_shape(folder)
    assert str(of_plan.value) == str(of_worker.value)


PUBLISHED: dict[str, dict[str, Any]] = {
    "gpt_bigcode": {"n_embd": 1024, "n_layer": 4, "n_head": 16},
    "gpt2": {"n_embd": 1024, "n_layer": 4, "n_head": 16},
    "qwen2_moe": {**tiny_configs.MOE, "shared_expert_intermediate_size": 1024},
    "qwen3_moe": {**tiny_configs.MOE, "mlp_only_layers": [0, 1]},
    "glm4_moe": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 2},
    "opt": {"ffn_dim": 4096, "word_embed_proj_dim": 1024},
    **{kind: {} for kind in ("gemma", "gemma2", "gemma3_text", "gemma4_text", "cohere", "nemotron", "qwen3", "olmo2")},
}
"""Model type -> configuration without the entries that a release leaves to transformers' defaults."""


@pytest.mark.parametrize("kind", PUBLISHED)
def test_entries_that_a_configuration_lacks_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    entries: dict[str, Any] = {
        "vocab_size": 32000,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        **PUBLISHED[kind],
    }
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **entries}))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **entries))
    assert read_shape(tmp_path).params == sum(parameter.numel() for parameter in model.parameters())


def test_the_experts_of_a_token_count_as_active(tmp_path: Path) -> None:
    dense, sparse = (
        read_shape(_config(tmp_path, **{**tiny_configs.SERVED["mixtral"][1], "num_experts_per_tok": count}))
        for count in (4, 1)
    )
    expert = 2 * 3 * 64 * 96  # of both layers
    assert dense.params == sparse.params
    assert dense.active - sparse.active == 3 * expert
    assert dense.active == dense.params - dense.embeddings - 5 * 64  # and the norms


def _config(folder: Path, **changes: Any) -> Path:
    tiny.config("mixtral", **changes).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_hidden_layers": 9}, "it lacks .* of its weights"),
        ({"vocab_size": 7}, "by config.json vocab_size x hidden_size is"),
        ({"quantization_config": {"quant_method": "hqq"}}, "HQQ weights are not served yet"),
        ({"model_type": "internvl_chat"}, "transformers has no code for it"),
        ({"hidden_size": "64"}, "its configuration is not one of that type"),
    ],
)
def test_files_that_a_worker_refuses_are_not_planned(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    folder = edit(tiny.save(tiny.config("llama"), tmp_path), **changes)
    with pytest.raises(ModelRefused, match=reason) as of_worker:
        serve(folder)
    with pytest.raises(ModelRefused) as of_plan:
        read_shape(folder)
    assert str(of_plan.value) == str(of_worker.value)


def test_a_model_needs_the_packages_of_a_worker_and_a_shape_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in [name for name in sys.modules if name.startswith("decant.engine.model")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(
        InvalidPlan, match=r"--model: with the packages of decant-llm\[worker\], of which torch is missing"
    ):
        read_shape(models.path())
    assert parse_shape("layers=2,hidden=8,heads=2").heads == 2


def test_a_quantized_checkpoint_is_planned_with_its_own_bits(tmp_path: Path) -> None:
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    plain = read_shape(_config(tmp_path))
    shape = read_shape(edit(tmp_path, quantization_config=settings) / "config.json")
    assert (plain.quantization, shape.quantization) == (None, "int4")
    assert shape.params == plain.params
    assert shape.weight_bytes("bfloat16", shape.quantization) < plain.weight_bytes("bfloat16", plain.quantization)


def test_a_gguf_file_is_planned_with_the_bits_of_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shape = find_shape(str(gguf_files.small(kind=gguf_files.Type.Q4_0).write(tmp_path / "small-q4.gguf")))
    assert (shape.name, shape.quantization, shape.heads) == ("small-q4", "int4", 4)
    (tmp_path / "bad.gguf").write_bytes(b"GGML")
    with pytest.raises(InvalidPlan, match=r"a GGUF file that is served \(it does not begin with GGUF\)"):
        find_shape(str(tmp_path / "bad.gguf"))
