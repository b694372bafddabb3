"""Inputs of linear layers in 8 bits: right, and with the same bits in any batch and in each build."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decant.engine.checkpoint.quantize import quantize
from decant.engine.checkpoint.weight import CodeKind, Codes
from decant.engine.cpu.fused_layer import unfuse
from decant.engine.cpu.gemm import CodesForInt8, Product, prepare_codes
from decant.engine.cpu.int8_rows import MOST_INNER, RoundedRows
from decant.engine.cpu.kernels import loader as native
from decant.engine.errors import InvalidConfig, ModelRefused
from decant.engine.loading import load
from decant.engine.model.backend import TorchBackend
from decant.engine.model.model import ModelConfig
from tests.engine import tiny
from tests.engine.codes import make_codes
from tests.engine.fused_layer.harness import compute_steps, equal, fused, needs_kernels, saved
from tests.engine.served import rewrite, serve
from tests.engine.test_coded_weight import DTYPES, any_codes, every_build, kernels


def product_of(codes: Codes, dtype: torch.dtype, build: str, bias: torch.Tensor | None = None) -> Product:
    return prepare_codes(codes, bias, dtype, kernels(build), rounds_rows=True)


def some_rows(count: int, inner: int, dtype: torch.dtype) -> torch.Tensor:
    rows = torch.randn(count, inner, generator=torch.Generator().manual_seed(count + inner))
    return (rows * torch.logspace(-3, 3, count)[:, None]).to(dtype)


def rounded(rows: torch.Tensor) -> torch.Tensor:
    """The numbers that codes of int8 stand for, in float64; the largest of a row is 127 times its scale."""
    numbers = rows.double()
    largest = numbers.abs().amax(1, keepdim=True)
    factor = torch.div(torch.tensor(127.0), largest.float())  # 127 / x is 127 times the reciprocal, in torch
    codes = (rows.float() * factor).round().double()
    assert int(codes.abs().max()) == 127
    assert bool(((codes * largest / 127 - numbers).abs() <= largest / 127 * 0.50001).all())
    return codes * largest / 127


integer_codes = any_codes().filter(lambda codes: codes.kind is not CodeKind.FP8)


@pytest.mark.slow
@every_build
@given(data=st.data())
def test_products_are_those_of_the_rounded_rows_with_the_same_bits_in_each_build(
    build: str, data: st.DataObject
) -> None:
    codes, dtype = data.draw(integer_codes), data.draw(st.sampled_from(DTYPES))
    x = some_rows(data.draw(st.sampled_from([1, 2, 5, 6, 7, 13])), codes.shape[1], dtype)
    bias = torch.randn(codes.shape[0]).to(dtype)
    found = product_of(codes, dtype, build, bias)(x)
    assert torch.equal(found, RoundedRows(codes, bias)(x))
    weight, rows = codes.dequantize(torch.float64), rounded(x)
    exact = rows @ weight.T + bias.double()
    # Without minima no sum is larger than this; with them, a group's sum is less a number that is at most as large.
    sizes = rows.abs() @ codes_sizes(codes).T + bias.double().abs()
    rounding = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-23
    assert bool(((found.double() - exact).abs() <= rounding * exact.abs() + 2.0**-18 * sizes + 1e-30).all())


def codes_sizes(codes: Codes) -> torch.Tensor:
    if codes.mins is None:
        return codes.dequantize(torch.float64).abs()
    zeros = None if codes.kind is CodeKind.INT8 else torch.zeros_like(codes.mins, dtype=torch.uint8)
    plain = replace(codes, mins=None, zeros=zeros)
    return plain.dequantize(torch.float64).abs() + codes.mins.T.repeat_interleave(codes.group, 1)[:, : codes.shape[1]]


CASES: list[Callable[[], Codes]] = [
    lambda: make_codes(CodeKind.INT8, 192, 2601, 2601),
    lambda: make_codes(CodeKind.INT4, 128, 1403, 64, has_zeros=True),
    lambda: make_codes(CodeKind.E2M1, 128, 1504, 32),
]


@every_build
@pytest.mark.parametrize("make", CASES)
def test_a_row_has_the_same_bits_among_others_and_with_any_number_of_threads(
    make: Callable[[], Codes], build: str
) -> None:
    codes = make()
    product, before = product_of(codes, torch.bfloat16, build), torch.get_num_threads()
    rows = some_rows(301, codes.shape[1], torch.bfloat16)
    try:
        torch.set_num_threads(1)
        whole = product(rows)
        for count in (1, 2, 5, 6, 7, 13, 111, 300):
            torch.set_num_threads(1 + count % 3)
            first = (count * 13) % (301 - count)
            assert torch.equal(product(rows[first : first + count]), whole[first : first + count]), count
    finally:
        torch.set_num_threads(before)


@every_build
def test_rows_of_zeros_and_of_numbers_that_are_not_finite_are_zeros_and_nan(build: str) -> None:
    codes = make_codes(CodeKind.INT8, 64, 100, 100)
    x = torch.ones(5, 100)
    x[0], x[1, 3], x[2, 99], x[3] = 0, torch.inf, torch.nan, 1e-38
    out = product_of(codes, torch.float32, build)(x)
    assert not out[0].any()
    assert bool(out[1:3].isnan().all())
    assert bool((out[3].abs() < 1e-25).all())
    assert bool(out[4].isfinite().all())


@every_build
def test_sums_of_the_largest_numbers_fit_and_longer_ones_are_refused(build: str) -> None:
    numbers = torch.full((64, MOST_INNER), -128, dtype=torch.int8)
    codes = Codes(CodeKind.INT8, numbers, torch.ones(1, 64), MOST_INNER)
    out = product_of(codes, torch.float32, build)(torch.full((1, MOST_INNER), -127.0))
    assert torch.equal(out, torch.full((1, 64), 127.0 * 128 * MOST_INNER))
    longer = Codes(CodeKind.INT8, torch.zeros(64, MOST_INNER + 8, dtype=torch.int8), torch.ones(1, 64), MOST_INNER + 8)
    with pytest.raises(ValueError, match=r"group: at most 131,?072 inputs, for rows in int8, got 131,?080"):
        product_of(longer, torch.float32, build)


def test_fp8_and_groups_that_kernels_do_not_take_are_multiplied_as_without() -> None:
    for build in (*native.supported_modules(), "torch"):
        for codes in (make_codes(CodeKind.FP8, 64, 64, 64), make_codes(CodeKind.INT4, 64, 60, 20)):
            x = some_rows(3, codes.shape[1], torch.float32)
            plain = prepare_codes(codes, None, torch.float32, kernels(build))
            assert torch.equal(product_of(codes, torch.float32, build)(x), plain(x))


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize("mixed", [False, True], ids=["alike", "gates and ups of other groups"])
def test_a_fused_layer_has_the_bits_of_its_parts(mixed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def quantize_both(model: Any, to: Any, piece: int) -> None:
        ups = [layer.mlp.up_proj for layer in model.model.layers]
        quantize(model, to, piece)
        for layer, up in zip(model.model.layers, ups, strict=True):
            layer.mlp.up_proj = up
        quantize(model, "int8")

    if mixed:
        monkeypatch.setattr("decant.engine.loading.quantize", quantize_both)
    config = replace(saved(tmp_path, "qwen2", "bfloat16"), quantize="int4", activations="int8")
    device = load(config)
    assert len(fused(device)) == 2
    assert {type(weight) for layer in fused(device) for weight in layer._parts.weights} == {CodesForInt8}
    whole = compute_steps(device)
    unfuse(device.model)
    assert equal(compute_steps(device), whole)


@pytest.mark.slow
def test_a_worker_says_that_it_rounds_and_shares_no_caches_with_one_that_does_not(tmp_path: Path) -> None:
    folder = tiny.save(tiny.config("llama"), tmp_path)
    device, plain = (serve(folder, quantize="int8", activations=each) for each in ("int8", "auto"))
    assert device.layout_hash != plain.layout_hash
    assert (device.quantization, plain.quantization) == ("int8, activations int8", "int8")
    assert device.equal_bits
    assert device.probe_result.exact


def test_models_without_integer_weights_and_other_devices_are_refused_by_name(tmp_path: Path) -> None:
    folder = tiny.save(tiny.config("llama"), tmp_path)
    with pytest.raises(InvalidConfig, match=r"activations: auto for .*, which has no weights of int8 or int4"):
        serve(folder, activations="int8")
    config = ModelConfig(str(folder), quantize="int8", activations="int8", device="cpu")
    backend = TorchBackend(torch.device("cpu"))
    backend.keeps_codes = True
    with pytest.raises(InvalidConfig, match="activations: auto on the device cpu: CPUs alone multiply rows of int8"):
        load(config, backend=backend)


@pytest.mark.slow
def test_a_model_whose_logits_change_much_is_refused(tmp_path: Path) -> None:
    def widen(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for name, weight in weights.items():
            if name.endswith("layernorm.weight"):
                weight[3] *= 3000
            if weight.dim() == 2 and "embed" not in name and "down" not in name and "o_proj" not in name:
                weight[:, 3] /= 3000
        return weights

    folder = rewrite(tiny.save(tiny.config("llama"), tmp_path), widen)
    with pytest.raises(ModelRefused, match=r"its activations can't be in int8: .* set activations to auto"):
        serve(folder, dtype="float32", quantize="int8", activations="int8")


@pytest.mark.slow
def test_a_cache_that_loses_much_in_8_bits_is_refused_beside_rounded_rows(tmp_path: Path) -> None:
    def widen(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for name, weight in weights.items():
            if name.endswith("v_proj.weight"):
                weight[::16] *= 50
            if name.endswith("o_proj.weight"):
                weight[:, ::16] /= 50
        return weights

    folder = rewrite(tiny.save(tiny.config("llama"), tmp_path / "plain"), widen)
    with pytest.raises(ModelRefused, match=r"its KV cache can't be in int8: .* set kv_dtype to auto"):
        serve(folder, dtype="float32", quantize="int8", activations="int8", kv_dtype="int8")
