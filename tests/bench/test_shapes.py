import json
from pathlib import Path

import pytest
from safetensors import safe_open

from decant.bench import model_shapes as shapes
from decant.bench.errors import InvalidBenchmark
from decant.engine.engine import Engine
from decant.engine.loading import load
from decant.engine.model.model import ModelConfig
from decant.engine.request import Request, StopParams
from decant.engine.scheduler import Limits
from decant.router.text.served_model import served
from decant.runtime import model_files


def test_tiny_is_served(tiny: Path) -> None:
    device = load(ModelConfig(str(tiny), device="cpu", context_length=64, kv_bytes=1 << 20))
    engine = Engine(device, Limits(context_length=64))
    engine.add(Request("a", (1, 2, 3), stop=StopParams(max_tokens=2, ignore_eos=True)))
    written = []
    while engine.has_work:
        written += engine.step().tokens
    assert len(written) == 2


def test_every_token_has_text_and_texts_become_tokens(tiny: Path) -> None:
    model = served(model_files.find(str(tiny)))
    assert model.vocab_size == model.tokenizer.get_vocab_size() == 512
    assert all(model.token_table.bytes_of(id) for id in range(512))
    text = "def add(a, b):\n"
    assert model.tokenizer.decode(model.tokenizer.encode(text).ids) == text


def test_an_older_checkpoint_gets_its_tokenizer(tiny: Path, tmp_path: Path) -> None:
    older = tmp_path / "older"
    older.mkdir()
    for name in ("config.json", "model.safetensors"):
        (older / name).write_bytes((tiny / name).read_bytes())
    assert (shapes.make("tiny", older) / "tokenizer.json").read_bytes() == (tiny / "tokenizer.json").read_bytes()


def test_the_same_seed_gives_the_same_weights_and_another_gives_others(tiny: Path, tmp_path: Path) -> None:
    first = (tiny / "model.safetensors").read_bytes()
    assert (shapes.make("tiny", tmp_path / "again") / "model.safetensors").read_bytes() == first
    assert (shapes.make("tiny", tmp_path / "other", seed=1) / "model.safetensors").read_bytes() != first


def test_weights_are_bf16_and_the_head_is_tied(tiny: Path) -> None:
    with safe_open(tiny / "model.safetensors", framework="pt") as file:
        names = list(file.keys())
        assert {file.get_slice(name).get_dtype() for name in names} == {"BF16"}
    assert "lm_head.weight" not in names
    assert json.loads((tiny / "config.json").read_text())["tie_word_embeddings"]


def test_an_existing_checkpoint_is_used_and_other_folders_are_left_alone(tiny: Path, tmp_path: Path) -> None:
    made = (tiny / "model.safetensors").stat().st_mtime_ns
    assert shapes.make("tiny", tiny) == tiny
    assert (tiny / "model.safetensors").stat().st_mtime_ns == made
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InvalidBenchmark, match="folder: empty, or a checkpoint, got"):
        shapes.make("tiny", tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_a_cache_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidBenchmark, match="cache of models: a folder that can be written"):
        shapes.make("tiny", tmp_path / "file" / "folder")
