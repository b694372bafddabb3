from __future__ import annotations

import hashlib
import json
import math
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from transformers import LlamaForCausalLM

from decant import models
from decant.models.corpus import Source

LARGEST = 10 * 1000 * 1000


def test_the_folder_is_complete_and_at_most_ten_megabytes():
    files = {file.name: file.stat().st_size for file in models.path().iterdir()}
    needed = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "README.md"}
    assert needed | {"tokenizer_config.json", "excerpt.txt", "figures.json"} == set(files)
    assert sum(files.values()) <= LARGEST


def test_weights_are_bfloat16():
    with safe_open(models.path() / "model.safetensors", "pt") as file:
        kinds = {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118, not a dict
        names = set(file.keys())
    assert kinds == {"BF16"}
    assert "lm_head.weight" not in names, "tied embeddings are stored once"


def test_the_model_is_a_small_llama_with_shared_key_value_heads(model, figures):
    config = model.config
    assert isinstance(model, LlamaForCausalLM)
    assert config.tie_word_embeddings
    assert config.num_key_value_heads < config.num_attention_heads
    assert config.max_position_embeddings >= 2048
    assert config.rope_parameters["rope_type"] == "default"
    assert 3_000_000 <= model.num_parameters() <= 5_500_000
    assert model.num_parameters() == figures["training"]["parameters"]
    assert json.loads((models.path() / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.slow
def test_text_late_in_the_window_is_predicted_as_well_as_early(model, tokenizer):
    text = (models.path() / "excerpt.txt").read_text(encoding="utf-8")
    ids = tokenizer(text).input_ids
    size = model.config.max_position_embeddings
    early, late = slice(0, len(ids) - 1), slice(size - len(ids), size - 1)
    repeated = (ids * (size // len(ids) + 1))[-size:]  # the last copy ends where the window does
    losses = []
    for tokens, part in ((ids, early), (repeated, late)):
        with torch.inference_mode():
            logits = model(torch.tensor([tokens])).logits[0]
        nats = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(tokens[1:]), reduction="none")
        losses.append(nats[part].mean().item())
    assert losses[1] < losses[0] + 0.3


def test_hashes_on_the_card_are_those_of_the_files(figures):
    card = (models.path() / "README.md").read_text(encoding="utf-8")
    described = {file.name for file in models.path().iterdir()} - {"README.md", "figures.json"}
    assert set(figures["sha256"]) == described
    for name, digest in figures["sha256"].items():
        assert hashlib.sha256((models.path() / name).read_bytes()).hexdigest() == digest
        assert f"| `{name}` | `{digest}` |" in card


def test_the_card_gives_the_measured_figures(figures):
    card = (models.path() / "README.md").read_text(encoding="utf-8")
    loss, training = figures["loss"], figures["training"]
    for name in ("model", "5-gram", "unigram"):
        row = f"| {name} | {loss['nats_per_token'][name]:.4f} | {loss['bits_per_byte'][name]:.4f} |"
        assert row in card
    assert f"{figures['excerpt']['nats_per_token']:.4f} nats per token" in card
    assert f"{training['recipe']['steps']:,} steps" in card
    assert f"CPython {figures['machine']['python']}" in card
    assert "Python Software Foundation License" in card
    assert card.count("```python") == 3
    for sample in figures["samples"]:
        assert sample["prompt"] + sample["text"].rstrip() in card


def test_quantized_weights_cost_little_quality_and_the_card_says_how_much(figures):
    card = (models.path() / "README.md").read_text(encoding="utf-8")
    for to, most in (("int8", 1.005), ("int4", 1.03)):
        nats = figures["quantized"][to]
        assert f"| model, `--quantize {to}` | {nats:.4f} |" in card
        assert math.exp(nats - figures["loss"]["nats_per_token"]["model"]) < most


def test_the_model_beats_counting(figures):
    nats = figures["loss"]["nats_per_token"]
    assert nats["model"] < nats["5-gram"] < nats["unigram"]


def test_held_out_files_are_those_that_their_names_hold_out(figures):
    names = figures["training"]["held_out_files"]
    assert figures["excerpt"]["source"] in names
    assert all(Source(name, "").held_out for name in names)


def test_finding_the_model_needs_neither_torch_nor_transformers():
    program = "import sys, models; models.path(); sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], cwd=models.path().parents[1]).returncode == 0
