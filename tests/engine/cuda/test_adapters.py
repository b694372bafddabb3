"""Adapters' kernels against float64, and models with adapters against a CPU; interpreted if there is no GPU."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers.pytorch_utils import Conv1D

pytest.importorskip("triton")

from decant.engine.checkpoint.adapter import read
from decant.engine.checkpoint.weight import CodeKind
from decant.engine.cuda import adapters as cuda_adapters
from decant.engine.cuda import backend as cuda_backend
from decant.engine.cuda import exact
from decant.engine.cuda import runner as cuda_runner
from decant.engine.cuda.adapters import AdapterTable, Change, CudaAdapter, CudaAdapters, Parts, place_rows
from decant.engine.cuda.coded_product import CodedProduct
from decant.engine.cuda.graph_sizes import GraphLimits, GraphSize
from decant.engine.cuda.graphs import StepGraph
from decant.engine.cuda.staging import Staging
from decant.engine.engine import Engine
from decant.engine.errors import AdapterRefused, InvalidConfig
from decant.engine.loading import load
from decant.engine.model.adapter_targets import positions_of
from decant.engine.model.model import ModelConfig, ModelDevice
from decant.engine.model.step_batch import flatten
from decant.engine.plan import Row
from decant.engine.request import Request
from decant.engine.scheduler import Limits
from tests import gpu
from tests.engine import peft_adapters, tiny
from tests.engine.adapted import add, logits, rows_of
from tests.engine.codes import make_codes
from tests.engine.cuda.test_backend import SINGLE_KEY_HEAD, InterpretedBackend, shorten_trials
from tests.engine.cuda.test_steps import Rerun, recorded

DEVICE = torch.device(gpu.device_type())
OUTPUTS = {"query": 40, "key": 8, "value": 24}
DEPTH = 72
RANKS = {"one": {"query": 16, "value": 48}, "two": {"query": 32, "key": 16, "value": 16}, "three": {"key": 16}}
CHOICE = ["two", "", "one", "two", "three", "one"] + ["two"] * 20
"""Adapter of each row; the second one has two tiles."""


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in {"TILE_DEPTH": 16, "TILE_OUTPUTS": 16, "SPLIT": 32}.items():
        monkeypatch.setattr(cuda_adapters, name, size)


def random(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


class Product(NamedTuple):
    """Product of three parts, and adapters that change some of them."""

    table: AdapterTable
    parts: Parts
    adapters: Mapping[str, CudaAdapter]

    def changed(self, x: torch.Tensor, before: torch.Tensor, choice: Sequence[str]) -> torch.Tensor:
        names = dict.fromkeys(name for name in choice if name)
        rows = {
            self.table.column_of(name): np.flatnonzero(np.array([each == name for each in choice])) for name in names
        }
        step = place_rows(rows, max(self.adapters[name].rank_tiles for name in names), Staging(DEVICE))
        out = before.clone()
        self.parts.add_changes(x, out, step)
        return out

    def exact(self, x: torch.Tensor, before: torch.Tensor, choice: Sequence[str]) -> torch.Tensor:
        out = before.double()
        for row, name in enumerate(choice):
            first = 0
            for part, count in OUTPUTS.items():
                if name and (change := self.adapters[name].changes.get(part)) is not None:
                    out[row, first : first + count] += change.up.double() @ (change.down.double() @ x[row].double())
                first += count
        return out


def product(dtype: torch.dtype) -> Product:
    table, adapters = AdapterTable(["before", *OUTPUTS], DEVICE), {}
    for seed, (name, ranks) in enumerate(RANKS.items()):
        changes = {
            part: Change(
                random(rank, DEPTH, seed=seed, dtype=dtype) / 4, random(OUTPUTS[part], rank, seed=9, dtype=dtype) / 4
            )
            for part, rank in ranks.items()
        }
        adapters[name] = CudaAdapter(name, 0, 0, changes)
        table.add(adapters[name])
    return Product(table, Parts(table, "query", list(OUTPUTS.values())), adapters)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float32, 3e-6)])
@pytest.mark.parametrize("few", [0, 32], ids=["ranges in sequence", "ranges in parallel"])
def test_each_row_has_the_changes_of_its_adapter(
    dtype: torch.dtype, tolerance: float, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_adapters, "FEW_TILES", few)
    made, count = product(dtype), len(CHOICE)
    wide = torch.full((count, DEPTH + 8), float("nan"), device=DEVICE, dtype=dtype)
    wide[:, :DEPTH] = random(count, DEPTH, seed=3, dtype=dtype)
    x, before = wide[:, :DEPTH], random(count, sum(OUTPUTS.values()), seed=4, dtype=dtype)
    out, expected = made.changed(x, before, CHOICE), made.exact(x, before, CHOICE)
    added = float((expected - before.double()).norm())
    assert float((out.double() - expected).norm()) <= tolerance * added
    assert torch.equal(out[1], before[1]), "it has no adapter"
    only_key = [*range(40), *range(48, 72)]
    assert torch.equal(out[4][only_key], before[4][only_key])


@pytest.mark.slow
def test_a_row_has_the_same_bits_in_any_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    made, count = product(torch.bfloat16), len(CHOICE)
    x, before = (random(count, width, seed=5, dtype=torch.bfloat16) for width in (DEPTH, sum(OUTPUTS.values())))
    together = made.changed(x, before, CHOICE)
    monkeypatch.setattr(cuda_adapters, "FEW_TILES", 1)
    for chosen in ([2], [3, 0, 2], [25, 4, 1, 2], list(range(count - 1, -1, -1))):
        assert torch.equal(made.changed(x[chosen], before[chosen], [CHOICE[row] for row in chosen]), together[chosen])


def test_a_table_gives_columns_of_removed_adapters_to_others() -> None:
    table = AdapterTable(["query", "key"], DEVICE)

    def made(name: str, part: str, rank: int) -> CudaAdapter:
        return CudaAdapter(name, 0, 0, {part: Change(torch.ones(rank, 2), torch.ones(2, rank))})

    for rank in range(1, 10):
        table.add(made(f"{rank}", "key", rank))
    assert table.num_columns == 16
    table.remove("3")
    table.add(made("1", "key", 1))
    table.add(made("new", "query", 99))
    assert [table.column_of(name) for name in ("1", "2", "4", "9", "new")] == [0, 1, 3, 8, 2]
    assert table.entries[:, :9, 2].tolist() == [[0, 0, 99, 0, 0, 0, 0, 0, 0], [1, 2, 0, 4, 5, 6, 7, 8, 9]]


def test_kernels_that_differ_from_torch_refuse_adapters_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cuda_adapters.try_changes(torch.float32, DEVICE) is None
    monkeypatch.setattr(cuda_backend, "try_changes", lambda *_: "changes differ")
    backend = InterpretedBackend(DEVICE)
    backend._dtype = torch.float32
    with pytest.raises(InvalidConfig, match=r"adapters: off on the device \w+ \(changes differ\), got True"):
        backend.make_adapters(torch.nn.Module(), lambda: None, 1)


def test_an_adapter_for_which_the_device_has_no_memory_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = torch.nn.Linear(8, 4, bias=False)
    adapters = CudaAdapters(torch.nn.ModuleDict({"layer": layer}), {"layer": layer}, DEVICE)
    folder = peft_adapters.plain(tmp_path, {"layer": (4, 8)})

    def full(*_: Any) -> Change:
        raise torch.OutOfMemoryError

    prepared = adapters.load("a", folder)
    assert prepared.nbytes == 16 * (8 + 4) * 4
    monkeypatch.setattr(cuda_adapters, "place", full)
    with pytest.raises(AdapterRefused, match=r"adapter a is not served: \w+ has no memory left for its 768 bytes"):
        adapters.add(prepared)
    assert prepared.digest not in adapters


def test_an_adapter_takes_the_device_s_memory_only_when_it_is_added(tmp_path: Path) -> None:
    """The others may still be there while it is read: a worker's bound and ``decant plan`` have no room for both."""
    layer = torch.nn.Linear(8, 4, bias=False)
    adapters = CudaAdapters(torch.nn.ModuleDict({"layer": layer}), {"layer": layer}, DEVICE)
    adapters._device = torch.device("meta")
    prepared = adapters.load("a", peft_adapters.plain(tmp_path, {"layer": (4, 8)}))
    assert {each.device.type for change in prepared.changes.values() for each in change} == {"cpu"}
    adapters.add(prepared)
    assert {each.device.type for change in adapters._adapters[prepared.digest].changes.values() for each in change} == {
        "meta"
    }


def test_linear_layers_of_all_kinds_add_the_changes(tmp_path: Path) -> None:
    codes, x = make_codes(CodeKind.INT4, 20, 64, 32), random(7, 64, seed=1, dtype=torch.float32)
    model = torch.nn.ModuleDict(
        {
            "plain": torch.nn.Linear(64, 20),
            "transposed": Conv1D(20, 64),
            "coded": CodedProduct(codes, None, torch.float32, DEVICE, is_exact=False),
        }
    )
    model.to(DEVICE).requires_grad_(False)
    adapters = CudaAdapters(model, cuda_adapters.linear_layers(model), DEVICE)
    folder = peft_adapters.plain(tmp_path, dict.fromkeys(model, (20, 64)), rank=5)
    digest, changes = add(SimpleNamespace(adapters=adapters), folder), read("a", folder).changes  # type: ignore[arg-type]
    lengths, blocks = {"": 2, digest: 4, "another": 1}, (array("i", [0]),)
    rows = [
        Row(Request(adapter or "none", (1,) * length, adapter=adapter), [1] * length, 0, length, blocks, False)
        for adapter, length in lengths.items()
    ]
    expected = {name: layer(x).double() for name, layer in model.items()}
    flat = flatten(rows, 16, 9)
    changed = positions_of(flat, digest)
    assert len(changed) == 4
    for name, change in changes.items():
        low = x[changed].double() @ change.down.to(DEVICE).double().T
        expected[name][changed] += change.scaling * low @ change.up.to(DEVICE).double().T
    nothing = Change(torch.zeros(16, 64, device=DEVICE), torch.zeros(20, 16, device=DEVICE))
    adapters.add(CudaAdapter("another", 16, 0, {"plain": nothing}))
    with adapters.applied(flat):
        for name, layer in model.items():
            torch.testing.assert_close(layer(x[None])[0].double(), expected[name], rtol=1e-4, atol=1e-4)
    for layer in model.values():
        assert "forward" not in vars(layer)


def served(folder: Path, backend: InterpretedBackend | None) -> ModelDevice:
    options: Any = {"dtype": "float32", "context_length": 64, "kv_bytes": 1 << 20, "adapters": True, "exact": True}
    kind = "cpu" if backend is None else DEVICE.type
    return load(ModelConfig(str(folder), device=kind, **options), backend=backend)


@pytest.mark.slow
def test_requests_have_the_tokens_and_logits_of_a_cpu_and_the_bits_of_a_batch_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if DEVICE.type == "cpu":  # the interpreter takes its time for each tile, and a GPU has no memory for these
        for name, size in {"TILE_ROWS": 64, "TILE_COLUMNS": 256, "TILE_DEPTH": 64}.items():
            monkeypatch.setattr(exact, name, size)
        for name, size in {"TILE_DEPTH": 64, "TILE_OUTPUTS": 128, "SPLIT": 64}.items():
            monkeypatch.setattr(cuda_adapters, name, size)
    shorten_trials(monkeypatch)
    config = tiny.config("llama", **SINGLE_KEY_HEAD)
    config.num_hidden_layers = 1
    model = tiny.save(config, tmp_path / "model")
    folders = [
        peft_adapters.for_model(tmp_path / "one", model, rank=3),
        peft_adapters.for_model(tmp_path / "two", model, rank=17, seed=1, suffixes=("proj.weight",)),
    ]
    rerun = Rerun()
    monkeypatch.setattr(cuda_runner, "Capture", lambda device: rerun)
    monkeypatch.setattr("decant.engine.cuda.graphs.graph_sizes", lambda limits: [GraphSize(4, 4)])
    device, reference = (served(model, backend) for backend in (InterpretedBackend(DEVICE, exact=True), None))
    assert isinstance(device.backend, cuda_backend.CudaBackend)
    assert device.backend.fallbacks == {}
    assert device.backend.fused_layers(device.model) == 1
    device.runner.capture(64, GraphLimits())  # type: ignore[attr-defined]
    digests = ["", *(add(device, folder) for folder in folders)]
    assert [add(reference, folder) for folder in folders] == digests[1:]
    forwards = {module: module.forward for module in device.model.modules()}
    chosen = [digests[1], digests[2], ""]
    ours, theirs = (logits(each, rows_of(each, chosen)) for each in (device, reference))
    for row, found, expected in zip(rows_of(device, chosen), ours, theirs, strict=True):
        torch.testing.assert_close(found.cpu(), expected, rtol=0.0, atol=1e-3)
        assert len(found) > 5 or torch.equal(logits(device, [row])[0], found)
    assert {module: module.forward for module in device.model.modules()} == forwards
    graphed = recorded(monkeypatch, StepGraph, "prepare", lambda graph, flat: [row.request.id for row in flat.rows])

    def generated(of: ModelDevice, chosen: Sequence[str]) -> dict[str, list[int]]:
        requests = [tiny.greedy(f"r{digest}", tiny.prompt(9, 1), 3, adapter=digest) for digest in chosen]
        return tiny.run(Engine(of, Limits(token_budget=32, max_running=4, context_length=64)), requests).tokens

    together = generated(device, digests)
    assert not graphed, "a step with an adapter runs without a graph"
    assert together == generated(reference, digests)
    assert len({tuple(tokens) for tokens in together.values()}) == 3
    assert generated(device, [""])["r"] == together["r"]
    assert graphed, "the others run from graphs"
