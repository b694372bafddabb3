from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from decant.engine.backends import make_backend
from decant.engine.cuda import backend as cuda_backend
from decant.engine.cuda import exact, gemm_kernels
from decant.engine.cuda.attention import TritonAttention
from decant.engine.cuda.exact import ExactLinear, make_exact
from decant.engine.cuda.fused_layer import TritonLayer
from decant.engine.errors import InvalidConfig
from decant.engine.loading import load
from decant.engine.model import probe
from decant.engine.model.attention.masks import AttentionWindow
from decant.engine.model.backend import PARTS
from decant.engine.model.kv_store import KvStore
from decant.engine.model.model import ModelConfig
from decant.engine.model.step_batch import flatten
from decant.engine.plan import Row
from decant.engine.request import Request
from tests import gpu
from tests.engine import tiny
from tests.engine.cuda.test_backend import LAYOUT, SINGLE_KEY_HEAD, InterpretedBackend

DEVICE = torch.device(gpu.device_type())


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in {"TILE_ROWS": 16, "TILE_COLUMNS": 16, "TILE_DEPTH": 16, "SPLIT": 32}.items():
        monkeypatch.setattr(exact, name, size)


def linear(depth: int, columns: int, dtype: torch.dtype, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(depth, columns, bias=bias).to(DEVICE, dtype).requires_grad_(False)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float32, 1e-6)])
def test_a_product_agrees_with_float64(dtype: torch.dtype, tolerance: float) -> None:
    layer = linear(50, 37, dtype)
    rows = torch.randn(2, 19, 50, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    wide = torch.full((2, 19, 64), float("nan"), device=DEVICE, dtype=dtype)
    wide[..., :50] = rows
    expected = nn.functional.linear(rows.double(), layer.weight.double(), layer.bias.double())
    out = ExactLinear(layer)(wide[..., :50])
    assert out.dtype == dtype
    assert float((out.double() - expected).norm()) <= tolerance * float(expected.norm())


@pytest.mark.slow
def test_a_row_has_the_same_bits_in_any_batch() -> None:
    layer = ExactLinear(linear(70, 20, torch.bfloat16, bias=False))
    rows = torch.randn(35, 70, generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.bfloat16)
    together = layer(rows)
    for chosen in ([3], [34, 3], [*range(16), 33, 3], list(range(34, -1, -1))):
        assert torch.equal(layer(rows[chosen]), together[chosen])
    assert layer(rows[:0]).shape == (0, 20)


@pytest.mark.parametrize("bias", [False, True])
def test_ranges_of_a_sum_in_parallel_have_the_bits_of_ranges_in_sequence(
    bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = ExactLinear(linear(70, 20, torch.bfloat16, bias=bias))
    rows = torch.randn(3, 70, generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.bfloat16)
    added: list[int] = []
    launch = gemm_kernels.add_splits

    class Counted:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            added.append(grid[0])
            return launch[grid]

    monkeypatch.setattr(gemm_kernels, "add_splits", Counted())
    results = []
    for processors in (1, 4):
        monkeypatch.setattr(exact, "_processors", lambda device, count=processors: count)
        results.append(layer(rows))
    assert added == [1], "few tiles have a program for each range"
    assert torch.equal(*results)


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))


def test_a_model_with_other_parts_is_refused() -> None:
    model = nn.Sequential(linear(4, 4, torch.float32), Router())
    with pytest.raises(InvalidConfig, match=r"exact: off for a model with other parts .* got '1'"):
        make_exact(model, torch.float32)
    assert not isinstance(model[0].forward, ExactLinear), "it is left as it was"


@pytest.mark.slow
def test_a_model_is_exact_by_the_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_backend, "TRIAL_SAMPLING", cuda_backend.TRIAL_SAMPLING[:1])
    for name, size in {"TILE_ROWS": 64, "TILE_COLUMNS": 256, "TILE_DEPTH": 64, "SPLIT": 64}.items():
        monkeypatch.setattr(exact, name, size)
    monkeypatch.setattr(probe, "LENGTHS", (19, 4, 3))  # one has two blocks
    config = tiny.config("qwen3", **SINGLE_KEY_HEAD)
    config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
    options: Any = {"device": DEVICE.type, "context_length": 64, "kv_bytes": 1 << 20, "exact": True}
    backend = InterpretedBackend(DEVICE, exact=True)
    device = load(ModelConfig(str(tiny.save(config, tmp_path)), dtype="bfloat16", **options), backend=backend)
    assert device.equal_bits
    assert device.probe_result.exact
    linears = [module for module in device.model.modules() if type(module) is nn.Linear]
    assert linears
    (layer,) = [module.forward for module in device.model.modules() if isinstance(module.forward, TritonLayer)]
    assert all(isinstance(module.forward, ExactLinear) for module in (*linears, *layer.merged))


def test_decoded_tokens_and_chunks_have_one_compiled_kernel() -> None:
    rows = [Row(Request(str(start), (1,) * 9), [1] * 9, start, 9, (array("i", [start]),), True) for start in (0, 8)]
    flat = flatten(rows, 16, 9)
    for is_exact, count in ((True, 1), (False, 2)):
        backend = InterpretedBackend(DEVICE, exact=is_exact)
        store = KvStore(LAYOUT, 9, torch.bfloat16, DEVICE)
        attention = backend.make_attention(store, [AttentionWindow()], flat, np.arange(10))
        assert isinstance(attention, TritonAttention)
        step = attention._make_lists(attention._layers(0, 4))
        assert len({part.shape for part in step.lists}) == count
        assert step.is_windowed == is_exact, "the probe's last row has a window, the others have none"


def test_exact_needs_the_kernels() -> None:
    with pytest.raises(InvalidConfig, match="exact: off on a CUDA device without triton"):
        make_backend(torch.device("cuda"), "none", exact=True)
    assert make_backend(torch.device("cpu"), exact=True).exact == PARTS


def test_a_part_that_fails_its_trial_refuses_an_exact_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_backend, "try_attention", lambda *_, **__: "differs")
    monkeypatch.setattr(cuda_backend, "try_sampler", lambda *_: None)
    backend = InterpretedBackend(DEVICE, exact=True)
    backend.prepare(nn.Module(), torch.float32)
    with pytest.raises(InvalidConfig, match=r"exact: off, as torch has to compute attention \(differs\)"):
        backend.make_store(LAYOUT, 1, torch.float32)
