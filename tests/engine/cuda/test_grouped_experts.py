"""Quantized experts in launches for all of them, in triton's interpreter if there is no GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from decant.engine.checkpoint.expert_layers import ExpertLayers, parts_of
from decant.engine.checkpoint.quantize import quantize
from decant.engine.checkpoint.weight import CodeKind, Codes
from decant.engine.cuda import coded_product, grouped_experts
from decant.engine.cuda.backend import CudaBackend
from decant.engine.cuda.coded_product import CodedProduct, TileShape
from decant.engine.cuda.coded_weights import replace_coded
from decant.engine.cuda.grouped_experts import ExpertProducts, GroupedExperts, Pairs, group_experts, place
from tests import gpu
from tests.engine import test_mxfp4
from tests.engine.codes import make_codes
from tests.engine.cuda.test_coded_product import served

DEVICE = torch.device(gpu.device_type())

CASES: dict[str, Callable[[int], Codes]] = {
    "int8": lambda seed: shuffled(make_codes(CodeKind.INT8, 37, 100, 100), seed),
    "int8-groups": lambda seed: shuffled(make_codes(CodeKind.INT8, 20, 96, 32, has_half_scales=False), seed),
    "int8-mins": lambda seed: shuffled(make_codes(CodeKind.INT8, 20, 96, 32, has_mins=True), seed),
    "int4": lambda seed: shuffled(make_codes(CodeKind.INT4, 37, 96, 32), seed),
    "int4-zeros": lambda seed: shuffled(make_codes(CodeKind.INT4, 20, 90, 32, has_zeros=True), seed),
    "int4-order": lambda seed: replace(
        make_codes(CodeKind.INT4, 20, 64, 32, has_zeros=True), order=torch.arange(64).roll(seed)
    ),
    "e2m1": lambda seed: shuffled(make_codes(CodeKind.E2M1, 20, 96, 32), seed),
    "fp8": lambda seed: shuffled(make_codes(CodeKind.FP8, 20, 96, 96, has_half_scales=False), seed),
}

EXPERTS = 4


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (coded_product, grouped_experts):
        monkeypatch.setattr(module, "MANY", TileShape(32, 32, 4, 3))
        monkeypatch.setattr(module, "EXACT", TileShape(16, 32, 4, 3))


def shuffled(codes: Codes, seed: int) -> Codes:
    """Return the codes with those of their outputs in another order: experts have weights of their own."""
    return replace(codes, codes=codes.codes.roll(seed, 0))


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(shape[0])).to(DEVICE, dtype)


def products(case: str, dtype: torch.dtype, *, is_exact: bool = False) -> tuple[ExpertProducts, list[Codes]]:
    codes = [CASES[case](seed) for seed in range(EXPERTS)]
    biases = [random(codes[0].shape[0], dtype=dtype) + seed for seed in range(EXPERTS)]
    made = [CodedProduct(*each, dtype, DEVICE, is_exact=is_exact) for each in zip(codes, biases, strict=True)]
    return ExpertProducts(made), codes


def pairs_of(chosen: Sequence[int]) -> Pairs:
    return place(torch.tensor(chosen, dtype=torch.int64, device=DEVICE), EXPERTS)


@pytest.mark.parametrize("tile", [4, 16, 64])
@pytest.mark.parametrize("count", [0, 1, 3, 16, 17, 40])
def test_pairs_are_placed_by_expert_and_in_their_order(count: int, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_experts, "PLACE_TILE", tile)
    for seed in range(3):
        most = 1 + seed * (EXPERTS - 1) // 2  # with seed 0 all pairs are of one expert
        chosen = torch.randint(most, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
        _check_places(chosen, pairs_of(chosen))


def _check_places(chosen: list[int], found: Pairs) -> None:
    by_expert = [[pair for pair, each in enumerate(chosen) if each == expert] for expert in range(EXPERTS)]
    assert found.places.tolist() == [pair for each in by_expert for pair in each]
    assert found.starts.tolist() == [sum(map(len, by_expert[:expert])) for expert in range(EXPERTS + 1)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tokens", [1, 40])
def test_each_pair_has_the_product_of_its_expert(case: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_experts, "FEW", TileShape(16, 32, 4, 3))
    made, codes = products(case, torch.float32)
    chosen = [expert for token in range(tokens) for expert in ((token * token) % 3, 3)]  # expert 3: several tiles
    rows = random(tokens, codes[0].shape[1])
    found = made(rows, pairs_of(chosen), 2)
    for pair, expert in enumerate(chosen):
        weight = codes[expert].dequantize(torch.float64).to(DEVICE)
        bias = random(len(weight)) + expert
        expected = weight @ rows[pair // 2].double() + bias.double()
        sizes = weight.abs() @ rows[pair // 2].double().abs() + 1
        assert bool(((found[pair].double() - expected).abs() <= 2.0**-19 * sizes).all()), (pair, expert)


@pytest.mark.parametrize("case", ["int8", "int4-zeros", "fp8"])
def test_a_row_has_the_same_bits_beside_any_others(case: str) -> None:
    made, codes = products(case, torch.bfloat16, is_exact=True)
    rows, chosen = random(35, codes[0].shape[1], dtype=torch.bfloat16), [row * row % EXPERTS for row in range(35)]
    together = made(rows, pairs_of(chosen), 1)
    for some in ([3], [34, 3], [*range(20), 33]):
        alone = made(rows[some], pairs_of([chosen[row] for row in some]), 1)
        assert torch.equal(alone, together[some])


def experts_of(kind: str, layout: str | None, folder: Path, dtype: torch.dtype = torch.float32) -> ExpertLayers:
    """Return the experts of a small model, whose files are quantized by a layout, or that ``--quantize`` quantizes."""
    pytest.importorskip("compressed_tensors", reason="the module that makes quantized checkpoints needs it")
    from tests.engine import quantized, test_coded_experts

    test_coded_experts.checkpoint(kind, folder)
    if layout == "mxfp4":
        test_mxfp4.quantize(folder)
    elif layout is not None:
        quantized.quantize(folder, quantized.LAYOUTS[layout], test_coded_experts.is_expert)
    model = test_coded_experts.read(folder)
    if layout is None:
        quantize(model, "int4")
    found = next(module for module in model.to(DEVICE).modules() if isinstance(module, ExpertLayers))
    assert isinstance(found, ExpertLayers)
    return found


def outputs(experts: nn.Module, tokens: int, width: int) -> torch.Tensor:
    chosen = torch.tensor([[token % 4, (token + 1 + token % 3) % 4] for token in range(tokens)], device=DEVICE)
    shares = random(tokens, 2).abs()
    with torch.inference_mode():
        found: torch.Tensor = experts(random(tokens, width), chosen, shares)
    return found


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("qwen3_moe", "awq-32"),
        ("qwen3_moe", "compressed-int8-channel"),
        ("qwen3_moe", None),
        ("mixtral", "gptq-4-64-act-order"),
        ("mixtral", "compressed-fp8-block"),
        ("gpt_oss", "mxfp4"),
    ],
)
def test_experts_compute_what_those_of_a_cpu_do_and_what_transformers_does(
    kind: str, layout: str | None, tmp_path: Path
) -> None:
    layers = experts_of(kind, layout, tmp_path)
    width = parts_of(layers.up[0])[0].source.shape[1]
    expected = outputs(layers, 9, width)
    grouped = group_experts(layers, DEVICE, is_exact=False)
    assert isinstance(grouped, GroupedExperts)
    torch.testing.assert_close(outputs(grouped, 9, width), expected, rtol=1e-4, atol=1e-5)
    restored = layers.dequantized(DEVICE)
    torch.testing.assert_close(outputs(restored, 9, width), expected, rtol=1e-4, atol=1e-5)


def test_a_router_of_one_expert_may_give_a_view_of_its_choice(tmp_path: Path) -> None:
    layers = experts_of("qwen3_moe", "awq-32", tmp_path)
    grouped = group_experts(layers, DEVICE, is_exact=False)
    assert grouped is not None
    chosen = torch.tensor([[3, 0, 0], [1, 0, 0], [0, 3, 3], [1, 2, 2]], device=DEVICE)[:, :1]
    rows, shares = random(4, 64), random(4, 1).abs()
    torch.testing.assert_close(grouped(rows, chosen, shares), layers(rows, chosen, shares), rtol=1e-4, atol=1e-5)


def replaced(layers: ExpertLayers, tried: Any = lambda trial: trial()) -> tuple[nn.Module, str | None]:
    model = nn.ModuleDict({"experts": layers})
    reason = replace_coded(model, torch.float32, DEVICE, tried, is_exact=False)
    return model["experts"], reason


def test_experts_are_tried_as_one_before_they_serve(tmp_path: Path) -> None:
    results: list[str | None] = []
    layers = experts_of("qwen3_moe", "awq-32", tmp_path)
    found, reason = replaced(layers, lambda trial: results.append(trial()))
    assert (type(found), reason, results) == (GroupedExperts, None, [None])
    assert not any(isinstance(module, CodedProduct) for module in found.modules())


def test_experts_of_different_layouts_are_dequantized(tmp_path: Path) -> None:
    layers = experts_of("qwen3_moe", "awq-32", tmp_path)
    expected = outputs(layers, 5, 64)
    (part, *_) = parts_of(layers.down[2])
    wide = part.source[:]
    eight = Codes(CodeKind.INT8, (wide * 100).round().clamp(-127, 127).to(torch.int8), torch.full((1, 64), 0.01), 64)
    part.source = replace(part.source, kind=CodeKind.INT8, read=lambda: eight)
    found, reason = replaced(layers)
    assert reason is None
    assert not isinstance(found, GroupedExperts | ExpertLayers)
    assert outputs(found, 5, 64).shape == expected.shape
    assert torch.equal(found.get_parameter("down_proj")[2].cpu(), eight.dequantize(torch.float32))


def test_experts_that_differ_from_torch_have_all_weights_dequantized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = experts_of("qwen3_moe", "awq-32", tmp_path)
    expected = outputs(layers, 5, 64)
    right = ExpertProducts.forward

    def wrong(self: ExpertProducts, rows: torch.Tensor, pairs: Pairs, top_k: int) -> torch.Tensor:
        return right(self, rows, pairs, top_k) * 1.2

    monkeypatch.setattr(ExpertProducts, "forward", wrong)
    found, reason = replaced(layers)
    assert reason is not None
    assert "experts of int4 weights differ from torch's" in reason
    torch.testing.assert_close(outputs(found, 5, 64), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_a_model_with_quantized_experts_is_served_from_their_codes(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("compressed_tensors", reason="the module that makes quantized checkpoints needs it")
    from tests.engine import served as cpu
    from tests.engine import test_coded_experts

    folder = test_coded_experts.checkpoint(kind, tmp_path)
    options: dict[str, Any] = {}
    if kind == "gpt_oss":
        test_mxfp4.quantize(folder)
    else:
        options["quantize"] = "int4"
    device = served(folder, monkeypatch, dtype="float32", **options)
    assert isinstance(device.backend, CudaBackend)
    assert device.backend.fallbacks == {}
    layers = [module for module in device.model.modules() if isinstance(module, GroupedExperts)]
    assert len(layers) == (2 if kind == "gpt_oss" else 1)
    expected = test_coded_experts.generated(cpu.serve(folder, **options))
    assert test_coded_experts.generated(device) == expected
