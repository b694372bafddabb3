from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from decant.engine.cpu import gemm
from decant.engine.cpu.gemm import OneDnn, SingleRows
from decant.engine.cpu.kernels import loader as kernels

ROOT = Path(__file__).parents[2]

SCRIPT = """
import torch
torch.backends.mkldnn.is_available = lambda: False
from decant import models
from decant.engine.cpu import gemm
from decant.engine.cpu.kernels import loader as kernels
from decant.engine.engine import Engine
from decant.engine.loading import load
from decant.engine.model.model import ModelConfig
from decant.engine.request import Request, StopParams
gemm.OneDnn = None

assert kernels.KERNELS is None
device = load(ModelConfig(str(models.path()), kv_bytes=16 << 20))
assert device.probe_result.exact, "a row has other bits among others than alone"
engine = Engine(device)
for name, prompt in (("a", range(50, 70)), ("b", range(80, 85))):
    engine.add(Request(name, tuple(prompt), stop=StopParams(max_tokens=6)))
tokens = []
while engine.has_work:
    tokens += [event.token for event in engine.step().tokens]
print(len(tokens))
"""


@pytest.mark.slow
def test_a_model_is_served_without_kernels_and_without_onednn() -> None:
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "default", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 12


def test_without_kernels_and_without_onednn_rows_are_multiplied_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(gemm.prepare(torch.ones(4, 8), None, None), OneDnn)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert isinstance(gemm.prepare(torch.ones(4, 8), None, None), SingleRows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_a_row_has_the_same_bits_alone_and_among_others_without_onednn(dtype: torch.dtype, bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 100, generator=generator).to(dtype)
    add = torch.randn(48, generator=generator).to(dtype) if bias else None
    x = torch.randn(3, 7, 100, generator=generator).to(dtype)
    product = SingleRows(weight, add)
    together = product(x)
    assert together.dtype == dtype
    assert together.shape == (3, 7, 48)
    for row, one in zip(x.view(-1, 100), together.view(-1, 48), strict=True):
        assert torch.equal(product(row), one)
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if add is None else add.double())
    assert torch.allclose(together.double(), exact, rtol=1e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-2)
    assert product(x[:0]).shape == (0, 7, 48)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["kernels", "onednn", "torch"])
def test_a_product_does_not_read_the_weights_that_it_was_made_from(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, kind: str
) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: kind != "torch")
    generator = torch.Generator().manual_seed(0)
    weight, bias, x = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((48, 96), (48,), (3, 96)))
    product = gemm.prepare(weight, bias, kernels.KERNELS if kind == "kernels" else None)
    before = product(x)
    weight.zero_()  # as a mapped file that is written again
    bias.zero_()
    assert torch.equal(product(x), before)


def test_workers_on_cpus_of_two_architectures_are_of_two_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    kinds = set()
    for machine in ("x86_64", "aarch64"):
        monkeypatch.setattr(platform, "machine", lambda machine=machine: machine)
        kinds.add(kernels.kind(None))
    assert len(kinds) == 2
