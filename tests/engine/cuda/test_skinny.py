from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from decant.engine.cuda import dependent_launch, skinny
from decant.engine.cuda.dependent_launch import dependent_options
from decant.engine.cuda.exact import ExactLinear
from decant.engine.cuda.fused_layer import Norm
from decant.engine.cuda.skinny import RowShape, RowsShape, is_skinny, multiply
from tests import gpu

DEVICE = torch.device(gpu.device_type())


def linear(depth: int, columns: int, *, bias: bool = False, dtype: torch.dtype = torch.bfloat16) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(depth, columns, bias=bias).to(DEVICE, dtype).requires_grad_(False)


def random(rows: int, width: int) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(rows)).to(DEVICE, torch.bfloat16)


@pytest.mark.parametrize("rows", [1, 2, 16])
@pytest.mark.parametrize(("depth", "columns"), [(64, 32), (50, 38)], ids=["even", "uneven"])
@pytest.mark.parametrize("kind", ["plain", "added", "gated"])
def test_a_product_of_few_rows_agrees_with_float64(
    rows: int, depth: int, columns: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(skinny, "ROW", RowShape(8, 32, 4, 2))
    monkeypatch.setattr(skinny, "ROWS", RowsShape(16, 32, 4, 3))
    layer, x = linear(depth, columns), random(rows, depth)
    wide = torch.full((rows, depth + 16), float("nan"), device=DEVICE, dtype=x.dtype)
    wide[:, :depth] = x
    expected = nn.functional.linear(x.double(), layer.weight.double())
    addend = random(rows, columns) if kind == "added" else None
    if addend is not None:
        expected = expected + addend.double()
    if kind == "gated":
        gates, ups = expected.chunk(2, 1)
        expected = nn.functional.silu(gates) * ups
    out = multiply(layer, wide[:, :depth], addend, is_gated=kind == "gated")
    assert float((out.double() - expected).norm()) <= 6e-3 * float(expected.norm())
    assert addend is None or out is addend


def test_torch_computes_what_the_kernels_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = linear(64, 32)
    assert is_skinny(layer, random(skinny.SKINNY_ROWS, 64))
    assert not is_skinny(layer, random(skinny.SKINNY_ROWS + 1, 64))
    assert not is_skinny(linear(64, 32, bias=True), random(1, 64))
    assert not is_skinny(linear(64, 32, dtype=torch.float32), random(1, 64))
    layer.forward = ExactLinear(layer)  # type: ignore[assignment, method-assign]
    assert not is_skinny(layer, random(1, 64))
    monkeypatch.setattr(skinny, "SKINNY_ROWS", 0)
    assert not is_skinny(linear(64, 32), random(1, 64))


def test_dependent_launches_need_a_gpu_that_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_type, cpu, capability = torch.device("cuda"), torch.device("cpu"), (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr("triton.knobs.runtime.interpret", False)
    assert dependent_options(gpu_type) == {"DEPENDENT": True, "launch_pdl": True}
    assert dependent_options(cpu) == {}
    capability = (8, 9)
    assert dependent_options(gpu_type) == {}
    capability = (9, 0)
    monkeypatch.setattr("triton.knobs.runtime.interpret", True)
    assert dependent_options(gpu_type) == {}, "the interpreter has no such instructions"


@pytest.mark.skipif(
    DEVICE.type != "cuda" or torch.cuda.get_device_capability() < dependent_launch.LEAST_CAPABILITY,
    reason="dependent launches need a GPU of compute capability 9.0",
)
@pytest.mark.parametrize("rows", [1, 16])
def test_a_chain_of_dependent_launches_keeps_its_bits_in_a_graph(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    width, inner, depth = 1024, 4096, 8
    gate_up, down = linear(width, 2 * inner), linear(inner, width)
    norm, start = Norm(torch.ones(width, device=DEVICE, dtype=torch.bfloat16), 1e-5), random(rows, width)

    def run() -> torch.Tensor:
        total = start.clone()
        for _ in range(depth):
            multiply(down, multiply(gate_up, norm(total), is_gated=True), total)  # in place, as in a layer
        return total

    with torch.inference_mode():
        monkeypatch.setattr(dependent_launch, "ENABLED", False)
        expected = run()
        monkeypatch.setattr(dependent_launch, "ENABLED", True)
        assert torch.equal(run(), expected)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run()
        for _ in range(100):
            captured.zero_()
            graph.replay()
            assert torch.equal(captured, expected)
