from __future__ import annotations

import dataclasses
import json
import math
import os

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from decant.models import bpe, corpus, evaluate, loop, train
from decant.models.muon import orthogonalise
from decant.models.recipe import PRESETS, TRIAL

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
MARKER = "held_out_marker"


class SimulatedCrash(Exception):
    pass


@pytest.fixture(autouse=True)
def torch_settings_return():
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    torch.set_flush_denormal(False)
    torch.set_num_threads(1)


def make_documents(count: int = 30, length: int = 200) -> list[np.ndarray]:
    random = np.random.default_rng(5)
    return [random.integers(2, TRIAL.vocab_size, length).astype(np.int32) for _ in range(count)]


def crash_after(stop: int):
    def report(step: int, loss: float, seconds: float) -> None:
        if step == stop:
            raise SimulatedCrash

    return report


def no_crash(step: int, loss: float, seconds: float) -> None:
    assert math.isfinite(loss)


def weights(run: loop.Run) -> dict[str, torch.Tensor]:
    return run.model.state_dict()


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return weights(loop.train(TRIAL, make_documents(), tmp_path_factory.mktemp("run") / "whole.pt", CPU, no_crash))


@pytest.mark.parametrize("stop", [1, 4, 7, 9, 11], ids=lambda stop: f"after step {stop}")
def test_an_interrupted_run_ends_with_the_same_weights(tmp_path, monkeypatch, whole, stop):
    monkeypatch.setattr(loop, "CHECKPOINT_EVERY", 3)
    with pytest.raises(SimulatedCrash):
        loop.train(TRIAL, make_documents(), tmp_path / "cut.pt", CPU, crash_after(stop))
    resumed = loop.train(TRIAL, make_documents(), tmp_path / "cut.pt", CPU, no_crash)
    assert same(whole, weights(resumed))


def test_a_kill_while_a_checkpoint_is_written_leaves_the_one_before(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "CHECKPOINT_EVERY", 3)
    file = tmp_path / "checkpoint.pt"
    replace = os.replace

    def replace_only_once(old, new):
        if file.exists():
            raise SimulatedCrash
        replace(old, new)

    monkeypatch.setattr(os, "replace", replace_only_once)
    with pytest.raises(SimulatedCrash):
        loop.train(TRIAL, make_documents(), file, CPU, no_crash)
    assert torch.load(file, weights_only=True)["step"] == 3


def test_another_seed_gives_other_weights(tmp_path, whole):
    other = dataclasses.replace(TRIAL, seed=1)
    run = loop.train(other, make_documents(), tmp_path / "other.pt", CPU, no_crash)
    assert not same(whole, weights(run))


def test_a_checkpoint_of_another_recipe_is_refused(tmp_path):
    loop.train(TRIAL, make_documents(), tmp_path / "run.pt", CPU, no_crash)
    other = dataclasses.replace(TRIAL, muon_lr=0.5)
    with pytest.raises(loop.CheckpointMismatch, match="recipe"):
        loop.train(other, make_documents(), tmp_path / "run.pt", CPU, no_crash)


def test_training_lowers_the_loss(tmp_path):
    pattern = [np.tile(np.arange(2, 18, dtype=np.int32), 20)] * 20
    seen: list[float] = []
    loop.train(TRIAL, pattern, tmp_path / "run.pt", CPU, lambda step, loss, seconds: seen.append(loss))
    assert seen[-1] < seen[0] - 1


def test_every_token_but_the_first_is_a_target_once():
    documents = [np.arange(100 * i, 100 * (i + 1)) for i in range(5)]
    cut = corpus.windows(documents, 16, seed=3, number=0)
    targets = cut[:, 1:].flatten().tolist()
    assert len(set(targets)) == len(targets) >= 500 - 2 * 16
    again = corpus.windows(documents, 16, seed=3, number=0)
    later = corpus.windows(documents, 16, seed=3, number=1)
    assert np.array_equal(cut, again)
    assert cut.shape != later.shape or not np.array_equal(cut, later)


def test_definitions_are_functions_methods_and_short_classes():
    text = "import os\n\n@wraps\ndef f():\n    pass\n\nclass C:\n    x = 1\n    def g(self):\n        return 1\n"
    found = corpus.definitions(text)
    method, whole = "def g(self):\n    return 1\n", text[text.index("class") :]
    assert found == ["@wraps\ndef f():\n    pass\n", method, whole]


def write_library(root, held_out_text: str) -> None:
    for number in range(40):
        source = corpus.Source(f"package/module{number}.py", "")
        text = held_out_text if source.held_out else f"def function{number}(a, b):\n    return a + b * {number}\n"
        path = root / source.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text * 8)
    (root / "test").mkdir()
    (root / "test" / "test_it.py").write_text(MARKER)


@pytest.fixture
def library(tmp_path):
    root = tmp_path / "library"
    write_library(root, f"def {MARKER}(a):\n    return a\n")
    return root


def test_sources_leave_tests_out_and_come_in_order(library):
    names = [source.name for source in corpus.read_sources(library)]
    assert names == sorted(names)
    assert len(names) == 40


def run_trial(library, out, *more: str) -> None:
    shared = ["--size", "trial", "--threads", "1", "--corpus", str(library), "--work", str(out / "work")]
    train.main([*shared, "--set", "long_context=256", "--set", "tokens_per_step=256", *more, "--out", str(out)])


def test_one_command_makes_the_whole_folder_and_sees_nothing_held_out(library, tmp_path, monkeypatch):
    seen: list[str] = []
    fit, encode, real_train = bpe.fit, bpe.encode, loop.train

    def watch_fit(texts, size):
        kept = list(texts)
        seen.extend(kept)
        return fit(kept, size)

    def watch_train(recipe, documents, *rest):
        assert len(documents) == len(encoded[0])
        seen.extend(encoded[0])
        return real_train(recipe, documents, *rest)

    encoded: list[list[str]] = []

    def watch_encode(tokenizer, texts):
        encoded.append(texts)
        return encode(tokenizer, texts)

    monkeypatch.setattr(bpe, "fit", watch_fit)
    monkeypatch.setattr(bpe, "encode", watch_encode)
    monkeypatch.setattr(loop, "train", watch_train)
    run_trial(library, tmp_path / "out")
    assert len(seen) > 40
    assert not any(MARKER in text for text in seen)
    assert any(MARKER in text for texts in encoded[1:] for text in texts), "the held-out files were never scored"
    figures = json.loads((tmp_path / "out" / "figures.json").read_text())
    assert figures["training"]["recipe"]["steps"] == TRIAL.steps
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16


def test_an_unknown_value_is_refused(capsys):
    with pytest.raises(SystemExit):
        train.parse(["--set", "layer=3"])
    assert "layer" in capsys.readouterr().err


@pytest.mark.parametrize("recipe", PRESETS.values(), ids=PRESETS)
def test_the_learning_rate_rises_and_falls_to_almost_nothing(recipe):
    factors = [recipe.learning_rate_factor(step) for step in range(recipe.steps)]
    assert max(factors) == 1.0
    assert 0 < factors[0] < 1
    assert 0 < factors[-1] < 0.2
    assert recipe.tokens_per_step % recipe.context == recipe.tokens_per_step % recipe.long_context == 0


def test_orthogonalising_makes_singular_values_alike():
    random = torch.Generator().manual_seed(0)
    for shape in ((3, 64, 16), (2, 16, 64)):
        values = torch.linalg.svdvals(orthogonalise(torch.randn(shape, generator=random)))
        assert values.min() > 0.5
        assert values.max() < 1.4


def test_a_long_document_is_scored_once_per_token():
    model = loop.build_model(TRIAL).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.zero_()  # every token is then equally likely
    document = np.arange(2, 202)
    assert evaluate.document_nats(model, document) == pytest.approx(199 * math.log(TRIAL.vocab_size), rel=1e-5)
