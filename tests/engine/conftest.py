from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

import pytest

from decant.engine.plan import Device
from tests.engine.factories import BLOCK, CONTEXT_LENGTH, VOCABULARY, make_device


class MakeDevice(Protocol):
    def __call__(self, num_blocks: int = 64, eos: Iterable[int] = ()) -> Device: ...


@pytest.fixture
def one_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint with spread logits, so that output depends on all earlier tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_LENGTH,
        initializer_range=0.4,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    folder = tmp_path_factory.mktemp("tiny_llama")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def make_real(tiny_llama: Path) -> MakeDevice:
    from decant.engine.loading import load
    from decant.engine.model.model import ModelConfig
    from decant.engine.model.runner import ModelRunner

    loaded = load(ModelConfig(str(tiny_llama), dtype="float32", kv_bytes=1 << 20, block_size=BLOCK))

    def make(num_blocks: int = 64, eos: Iterable[int] = ()) -> Device:
        store = loaded.backend.make_store(loaded.store.layout, num_blocks, loaded.store.blocks.dtype)
        ends = frozenset(eos)
        runner = ModelRunner(loaded.model, store, loaded.runner._layer_windows, ends, loaded.backend)
        return dataclasses.replace(loaded, store=store, runner=runner, eos_token_ids=ends)

    return make


@pytest.fixture(params=["fake", "real"])
def make(request: pytest.FixtureRequest) -> MakeDevice:
    if request.param == "fake":
        return make_device
    real: MakeDevice = request.getfixturevalue("make_real")
    return real


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.engine import tiny

    return tiny.save(tiny.config("llama"), tmp_path_factory.mktemp("llama"))


@pytest.fixture
def copy(llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "model"))
