"""A row has the same bits in any batch, with each adapter, and without one the bits of no adapters."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from decant.engine.checkpoint import adapter
from decant.engine.cpu import fused_layer
from decant.engine.cpu.backend import CpuBackend
from decant.engine.engine import Engine
from decant.engine.errors import AdapterRefused, InvalidConfig, InvalidRequest
from decant.engine.fake import FakeAdapter
from decant.engine.loading import load
from decant.engine.model.backend import TorchBackend
from decant.engine.model.model import ModelConfig, ModelDevice
from decant.engine.plan import Row
from decant.engine.request import Request, StopParams
from decant.engine.scheduler import Limits
from tests.engine import peft_adapters, tiny
from tests.engine.adapted import add, logits, serve
from tests.engine.factories import make_device, make_engine, make_request, run

SMALL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
}
LENGTHS = [70, 1, 33, 17, 40]
CHOICE = ["one", "two", "", "one", "two"]

LAYER = {
    "self_attn.q_proj": (128, 128),
    "self_attn.k_proj": (64, 128),
    "mlp.gate_proj": (384, 128),
    "mlp.down_proj": (128, 384),
}
SHAPES = {f"model.layers.{layer}.{name}": shape for layer in range(2) for name, shape in LAYER.items()}

KINDS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "float32": {"dtype": "float32"},
    "int4": {"dtype": "bfloat16", "quantize": "int4"},
    "int4, rows in int8": {"dtype": "bfloat16", "quantize": "int4", "activations": "int8"},
    "int8 keys and values": {"dtype": "bfloat16", "kv_dtype": "int8"},
    "torch alone": {"dtype": "bfloat16", "backend": CpuBackend()},
}

slow = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**SMALL), dtype=torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    few = {name: shape for name, shape in SHAPES.items() if "down" not in name}
    return {
        "one": peft_adapters.plain(root / "one", SHAPES, rank=16),
        "two": peft_adapters.plain(root / "two", few, rank=3, seed=1),
    }


@pytest.fixture(scope="module", params=KINDS)
def device(request: pytest.FixtureRequest, model: Path) -> ModelDevice:
    return serve(model, **{"kv_bytes": 4 << 20, **KINDS[request.param]})


class Batch:
    """Prompts of ``LENGTHS``, each with its adapter of ``CHOICE``."""

    def __init__(self, device: ModelDevice, folders: Mapping[str, Path]) -> None:
        self._device = device
        self._digests = {"": "", **{name: add(device, folder) for name, folder in folders.items()}}
        self._tokens = [tiny.prompt(length, length) for length in LENGTHS]
        size, first = device.block_size, 0
        self._blocks = []
        for length in LENGTHS:
            self._blocks.append(array("i", range(first, first + -(-length // size))))
            first += -(-length // size)

    def row(self, index: int, start: int = 0, end: int | None = None) -> Row:
        tokens = self._tokens[index]
        request = Request(f"{index}", tokens, adapter=self._digests[CHOICE[index]])
        return Row(request, tokens, start, end or len(tokens), (self._blocks[index],), True)

    def step(self, *rows: Row) -> list[torch.Tensor]:
        return logits(self._device, rows)

    def apart(self) -> list[torch.Tensor]:
        return [self.step(self.row(index))[0] for index in range(len(LENGTHS))]


def equal(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


@slow
def test_rows_have_the_same_bits_alone_and_in_a_batch_of_adapters(
    device: ModelDevice, folders: Mapping[str, Path]
) -> None:
    batch = Batch(device, folders)
    apart = batch.apart()
    assert equal(batch.step(*(batch.row(index) for index in range(len(LENGTHS)))), apart)


@slow
def test_rows_have_the_same_bits_in_any_chunking_beside_others(
    device: ModelDevice, folders: Mapping[str, Path]
) -> None:
    batch = Batch(device, folders)
    apart = batch.apart()
    for start, end in ((0, 7), (7, 31), (31, 69), (69, 70)):
        chunk, *decodes = batch.step(batch.row(0, start, end), *(batch.row(at, LENGTHS[at] - 1) for at in (2, 3, 4)))
        assert torch.equal(chunk, apart[0][start:end])
        assert equal([each[-1] for each in decodes], [apart[at][-1] for at in (2, 3, 4)])


@slow
def test_a_row_without_an_adapter_has_the_bits_of_a_device_that_has_none(
    device: ModelDevice, folders: Mapping[str, Path]
) -> None:
    plain, digests = Batch(device, {"one": folders["one"], "two": folders["two"]}), list(folders)
    expected = plain.step(plain.row(2))[0]
    beside = plain.step(plain.row(0), plain.row(2), plain.row(1))[1]
    assert torch.equal(beside, expected)
    for name in digests:
        device.adapters.remove(adapter.read(name, folders[name]).digest)
    assert torch.equal(plain.step(plain.row(2))[0], expected)


@slow
def test_a_step_without_adapters_runs_the_fused_layers(model: Path, folders: Mapping[str, Path]) -> None:
    device = serve(model, dtype="bfloat16")
    batch = Batch(device, folders)
    forwards = {name: module.forward for name, module in device.model.named_modules()}
    batch.step(batch.row(0))
    assert {name: module.forward for name, module in device.model.named_modules()} == forwards
    calls = {"model.layers.0.mlp.gate_proj": 0}

    def count(x: torch.Tensor) -> torch.Tensor:
        calls["model.layers.0.mlp.gate_proj"] += 1
        out: torch.Tensor = original(x)
        return out

    module = device.model.get_submodule("model.layers.0.mlp.gate_proj")
    original = module.forward
    module.forward = count
    batch.step(batch.row(2))
    assert calls["model.layers.0.mlp.gate_proj"] == (0 if device.backend.fused_layers(device.model) else 1)


@slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_fused_layers_have_the_bits_of_their_parts(dtype: str, model: Path, folders: Mapping[str, Path]) -> None:
    device = serve(model, dtype=dtype, kv_bytes=4 << 20)
    if not device.backend.fused_layers(device.model):
        pytest.skip("there are no kernels")
    batch = Batch(device, folders)
    rows = [batch.row(index) for index in range(len(LENGTHS))]
    fused, last = batch.step(*rows), device.runner.logits(rows, np.cumsum(LENGTHS) - 1).clone()
    assert len(fused_layer.unfuse(device.model)) == SMALL["num_hidden_layers"]
    assert equal(batch.step(*rows), fused)
    assert torch.equal(device.runner.logits(rows, np.cumsum(LENGTHS) - 1), last)


@slow
def test_an_engine_continues_each_request_with_its_adapter(model: Path, folders: Mapping[str, Path]) -> None:
    device = serve(model, dtype="float32", kv_bytes=4 << 20)
    digests = {"": "", **{name: add(device, folder) for name, folder in folders.items()}}

    def outputs(names: Sequence[str]) -> dict[str, list[int]]:
        engine = Engine(device, Limits(token_budget=16, max_running=4, context_length=128))
        requests = [
            Request(name or "none", tiny.prompt(40, 3), stop=StopParams(max_tokens=12), adapter=digests[name])
            for name in names
        ]
        return {id: list(tokens) for id, tokens in tiny.run(engine, requests).tokens.items()}

    together = outputs(["one", "", "two"])  # one prompt: a block of another adapter would be found in the prefix cache
    apart = outputs(["one"]) | outputs(["two"]) | outputs([""])
    assert together == apart
    assert len({tuple(tokens) for tokens in apart.values()}) == 3


@slow
def test_answers_are_of_one_revision_while_adapters_are_added_replaced_and_removed(
    model: Path, folders: Mapping[str, Path]
) -> None:
    device = serve(model, dtype="float32", kv_bytes=4 << 20)
    digests = {name: add(device, folder) for name, folder in folders.items()}
    tokens: dict[str, list[int]] = {}

    def begin(engine: Engine, id: str, name: str) -> None:
        stop = StopParams(max_tokens=12)
        engine.add(Request(id, tiny.prompt(40, 3), stop=stop, adapter=digests.get(name, "")))
        tokens[id] = []

    def step(engine: Engine, count: int) -> None:
        for _ in range(count):
            for token in engine.step().tokens:
                tokens[token.id].append(token.token)

    def make() -> Engine:
        return Engine(device, Limits(token_budget=64, max_running=8, context_length=128))

    for name in ("none", "one", "two"):
        alone = make()
        begin(alone, name, name)
        step(alone, 20)
    engine = make()
    for name, digest in digests.items():
        engine.remove_adapter(digest)
        assert digest not in device.adapters
        engine.add_adapter(device.adapters.load(name, folders[name]))
    begin(engine, "running", "one")
    begin(engine, "plain", "none")
    step(engine, 4)
    engine.remove_adapter(digests["one"])  # it stays for the one that runs, and the other takes its place
    begin(engine, "new", "two")
    step(engine, 2)
    engine.add_adapter(device.adapters.load("one", folders["one"]))
    begin(engine, "again", "one")
    engine.remove_adapter(digests["two"])
    step(engine, 30)
    for id, name in (("running", "one"), ("plain", "none"), ("new", "two"), ("again", "one")):
        assert tokens[id] == tokens[name], id
    assert [digest in device.adapters for digest in digests.values()] == [True, False]
    assert len({tuple(tokens[name]) for name in ("none", "one", "two")}) == 3


def test_sequences_of_other_adapters_share_no_blocks() -> None:
    device = make_device(32)
    for digest in ("a1", "b2"):
        device.adapters.add(FakeAdapter(digest))
    engine = make_engine(device=device)
    prompt = tuple(range(1, 13))
    for name, digest in (("none", ""), ("a", "a1"), ("b", "b2"), ("again", "a1")):
        started = run(engine, make_request(name, prompt, adapter=digest))[name].started
        assert started is not None
        assert started.cached == (8 if name == "again" else 0)


def test_an_adapter_is_dropped_once_no_sequence_has_it() -> None:
    engine = make_engine()
    engine.add_adapter(FakeAdapter("a1"))
    engine.add(make_request("running", adapter="a1"))
    engine.step()
    engine.add(make_request("waiting", adapter="a1"))
    engine.remove_adapter("a1")
    assert "a1" in engine.device.adapters
    engine.cancel("running")
    engine.step()
    assert "a1" in engine.device.adapters
    assert run(engine)["waiting"].ended is not None
    assert "a1" not in engine.device.adapters


def test_an_adapter_that_is_added_again_stays() -> None:
    engine = make_engine()
    engine.add_adapter(FakeAdapter("a1"))
    engine.add(make_request("a", adapter="a1"))
    engine.remove_adapter("a1")
    engine.add_adapter(FakeAdapter("a1"))
    run(engine)
    assert "a1" in engine.device.adapters


def test_a_request_with_an_adapter_that_is_not_loaded_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="adapter: one that is loaded here, got 'a1'"):
        make_engine().add(make_request("a", (1, 2), adapter="a1"))


REFUSED: dict[str, tuple[dict[str, tuple[int, int]], dict[str, Any], str]] = {
    "no such module": ({"model.layers.7.self_attn.q_proj": (128, 128)}, {}, "layers.7.self_attn.q_proj, which the"),
    "another width": ({"model.layers.0.self_attn.q_proj": (128, 64)}, {}, r"is \[128, 64\], and the model's weight"),
    "the head": ({"lm_head": (320, 128)}, {}, "it changes lm_head, which is no linear layer that computes each token"),
    "a missing module": (
        {"model.layers.0.self_attn.q_proj": (128, 128)},
        {"target_modules": "all|.*q_proj"},
        "it lacks the matrices of 1 of its target modules, model.layers.1.self_attn.q_proj among them",
    ),
    "too large": ({"model.layers.0.mlp.up_proj": (384, 128)}, {"lora_alpha": 1e39, "layers_to_transform": 0}, "finite"),
}


@slow
@pytest.mark.parametrize("case", REFUSED)
def test_an_adapter_that_does_not_fit_the_model_is_refused_by_name(case: str, model: Path, tmp_path: Path) -> None:
    shapes, settings, reason = REFUSED[case]
    if "target_modules" not in settings:
        settings = {"target_modules": list(shapes), **settings}
    device = serve(model, dtype="bfloat16")
    with pytest.raises(AdapterRefused, match=f"adapter bad is not served: .*{reason}"):
        device.adapters.load("bad", peft_adapters.plain(tmp_path / "bad", shapes, **settings))


@slow
def test_an_adapter_of_experts_is_refused_by_name(tmp_path: Path) -> None:
    device = serve(tiny.save(tiny.config("jetmoe"), tmp_path / "model"))
    (name, layer) = next((name, each) for name, each in device.model.named_modules() if name.endswith("_experts.0"))
    folder = peft_adapters.plain(tmp_path / "bad", {name: tuple(layer.weight.shape)})
    with pytest.raises(AdapterRefused, match=f"it changes {name}, which is no linear layer that computes each token"):
        device.adapters.load("bad", folder)


@slow
def test_a_device_without_products_for_adapters_is_refused_by_name(model: Path) -> None:
    reason = "adapters: off on the device cpu: CPUs, and GPUs with triton, compute with them, got True"
    with pytest.raises(InvalidConfig, match=reason):
        load(ModelConfig(str(model), adapters=True, kv_bytes=1 << 20), backend=TorchBackend(torch.device("cpu")))


@slow
def test_a_model_that_was_loaded_without_adapters_refuses_them(model: Path, folders: Mapping[str, Path]) -> None:
    device = load(ModelConfig(str(model), kv_bytes=1 << 20, device="cpu"))
    with pytest.raises(AdapterRefused, match="the model was loaded without adapters"):
        device.adapters.load("one", folders["one"])
