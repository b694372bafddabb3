"""Products with quantized weights: right, and with the same bits for a row in any batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decant.engine.checkpoint.weight import CodeKind, Codes
from decant.engine.cpu.gemm import CodedWeight, Product, prepare_codes
from decant.engine.cpu.kernels import loader as native
from tests.engine.codes import make_codes

DTYPES = [torch.bfloat16, torch.float32]
BUILDS = [*native.supported_modules(), "torch"]

every_build = pytest.mark.parametrize("build", BUILDS)


def kernels(build: str) -> ModuleType | None:
    return None if build == "torch" else pytest.importorskip(f"decant.engine.cpu.kernels.{build}")


def product_of(codes: Codes, dtype: torch.dtype, build: str, bias: torch.Tensor | None = None) -> Product:
    return prepare_codes(codes, bias, dtype, kernels(build))


@st.composite
def any_codes(draw: st.DrawFn) -> Codes:
    kind, inner = draw(st.sampled_from(list(CodeKind))), draw(st.integers(1, 1700))
    group = draw(st.sampled_from([inner, 8, 32, 64, 128, 24, 512]))
    options = {"has_half_scales": draw(st.booleans())}
    if kind in (CodeKind.INT8, CodeKind.INT4) and draw(st.booleans()):
        options["has_mins" if kind is CodeKind.INT8 or draw(st.booleans()) else "has_zeros"] = True
    return make_codes(kind, draw(st.sampled_from([64, 128])), inner, group, **options)


def is_close(found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> bool:
    """Whether the error is what the rounding of float32 sums and of the result explains."""
    exact = x.double() @ weight.T + bias.double()
    sizes = x.double().abs() @ weight.T.abs() + bias.double().abs()
    rounding = 2.0**-8 if found.dtype == torch.bfloat16 else 2.0**-23
    return bool(((found.double() - exact).abs() <= rounding * exact.abs() + 2.0**-19 * sizes + 1e-30).all())


@pytest.mark.slow
@every_build
@given(data=st.data())
def test_a_product_is_that_of_the_float64_weight_up_to_rounding(build: str, data: st.DataObject) -> None:
    codes, dtype = data.draw(any_codes()), data.draw(st.sampled_from(DTYPES))
    outputs, inner = codes.shape
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(data.draw(st.sampled_from([1, 2, 4, 5, 10, 11, 33])), inner, generator=generator).to(dtype)
    bias = torch.randn(outputs, generator=generator).to(dtype)
    weight = codes.dequantize(torch.float64)
    if build == "torch":  # which rounds the weight to the dtype of the rows
        weight = codes.dequantize(dtype).double()
    assert is_close(product_of(codes, dtype, build, bias)(x), x, weight, bias)


CASES: list[Callable[[], Codes]] = [
    lambda: make_codes(CodeKind.INT8, 192, 2601, 2601),
    lambda: make_codes(CodeKind.INT8, 128, 1536, 128, has_half_scales=False),
    lambda: make_codes(CodeKind.INT8, 128, 1536, 32, has_mins=True),
    lambda: make_codes(CodeKind.INT4, 192, 2624, 64),
    lambda: make_codes(CodeKind.INT4, 128, 1403, 32, has_zeros=True),
    lambda: make_codes(CodeKind.INT4, 128, 1403, 32, has_mins=True, has_half_scales=False),
    lambda: make_codes(CodeKind.FP8, 128, 1500, 128),
    lambda: make_codes(CodeKind.E2M1, 128, 1504, 32),
]


@pytest.mark.slow
@every_build
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", CASES)
def test_a_row_has_the_same_bits_among_others_and_with_any_number_of_threads(
    make: Callable[[], Codes], dtype: torch.dtype, build: str
) -> None:
    codes = make()
    product, before = product_of(codes, dtype, build), torch.get_num_threads()
    rows = torch.randn(301, codes.shape[1], generator=torch.Generator().manual_seed(2)).to(dtype)
    try:
        torch.set_num_threads(1)
        whole = product(rows)
        for count in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 30, 111, 300):
            torch.set_num_threads(1 + count % 3)
            first = (count * 13) % (301 - count)
            assert torch.equal(product(rows[first : first + count]), whole[first : first + count]), count
    finally:
        torch.set_num_threads(before)


@every_build
@pytest.mark.parametrize("kind", CodeKind)
def test_every_code_is_its_number(kind: CodeKind, build: str) -> None:
    every = torch.arange(256).to(torch.uint8)[:, None].expand(256, 24).contiguous()
    match kind:
        case CodeKind.INT8:
            codes = every.view(torch.int8)
        case CodeKind.INT4 | CodeKind.E2M1:
            codes = every % 16
        case CodeKind.FP8:
            codes = torch.where(every & 127 == 127, 0, every).view(torch.float8_e4m3fn)
    weight = Codes(kind, codes, torch.ones(3, 256), 8)
    numbers = product_of(weight, torch.bfloat16, build)(torch.eye(24).bfloat16())
    assert torch.equal(numbers.T.float(), weight.dequantize(torch.float32))


@every_build
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rounds_rows", [False, True])
def test_a_product_of_e2m1_has_the_bits_of_that_with_doubled_numbers_in_int8(
    rounds_rows: bool, dtype: torch.dtype, build: str
) -> None:
    doubled = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8)
    for inner, group in ((1504, 32), (1403, 64), (77, 77)):
        codes = make_codes(CodeKind.E2M1, 128, inner, group)
        whole = Codes(CodeKind.INT8, doubled[codes.codes.long()], codes.scales / 2, group)
        x = torch.randn(33, inner, generator=torch.Generator().manual_seed(inner)).to(dtype)
        product, expected = (
            prepare_codes(each, None, dtype, kernels(build), rounds_rows=rounds_rows) for each in (codes, whole)
        )
        for count in (1, 3, 5, 7, 33):
            assert torch.equal(product(x[:count]), expected(x[:count])), (inner, count)


@every_build
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_minimum_is_subtracted_from_each_weight_of_its_group(dtype: torch.dtype, build: str) -> None:
    codes = torch.arange(16).to(torch.uint8).repeat(64, 4)
    scales, mins = torch.tensor([[0.5], [2.0]]).repeat(1, 64), torch.tensor([[1.0], [-3.0]]).repeat(1, 64)
    weight = Codes(CodeKind.INT4, codes, scales, 32, mins=mins)
    expected = torch.cat([torch.arange(16) * 0.5 - 1] * 2 + [torch.arange(16) * 2.0 + 3] * 2)
    assert torch.equal(weight.dequantize(torch.float64)[7], expected.double())
    assert torch.equal(product_of(weight, dtype, build)(torch.eye(64).to(dtype))[:, 7].float(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_coded_weight_takes_little_more_than_its_codes(dtype: torch.dtype) -> None:
    for build in native.supported_modules():
        module = kernels(build)
        assert module is not None
        for kind, group, most in (
            (CodeKind.INT8, 896, 1.01),
            (CodeKind.FP8, 896, 1.01),
            (CodeKind.INT4, 64, 0.54),
            (CodeKind.E2M1, 32, 0.57),
        ):
            weight = CodedWeight(module, make_codes(kind, 1152, 896, group), None, dtype)
            assert weight._weight.nbytes < most * 1152 * 896
        with_mins = make_codes(CodeKind.INT4, 1152, 896, 32, has_mins=True, has_half_scales=False)
        assert CodedWeight(module, with_mins, None, dtype)._weight.nbytes < 0.76 * 1152 * 896


@pytest.mark.parametrize(
    ("outputs", "inner", "group", "limit"),
    [(48, 64, 64, "outputs: a multiple of 64"), (64, 640, 20, "group: a multiple of 8"), (64, 2000, 1000, "group")],
)
def test_kernels_refuse_sizes_that_they_do_not_take(outputs: int, inner: int, group: int, limit: str) -> None:
    for build in native.supported_modules():
        module = kernels(build)
        assert module is not None
        with pytest.raises(ValueError, match=limit):
            CodedWeight(module, make_codes(CodeKind.INT8, outputs, inner, group), None, torch.float32)


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        (CodeKind.E2M1, {"mins": torch.ones(1, 64)}, "minima: not of fp8 and e2m1"),
        (CodeKind.E2M1, {"zeros": torch.ones(1, 64, dtype=torch.uint8)}, "zero points: of int4 alone, not of e2m1"),
        (CodeKind.INT4, {"zeros": torch.full((1, 64), 16, dtype=torch.uint8)}, "a zero point is 16"),
        (CodeKind.E2M1, {"codes": torch.full((64, 32), 16, dtype=torch.uint8)}, "a code is 16"),
        (CodeKind.INT4, {"codes": torch.full((64, 32), 16, dtype=torch.uint8)}, "a code is 16"),
        (CodeKind.E2M1, {"codes": torch.zeros(64, 32, dtype=torch.int8)}, "codes: torch.uint8, got torch.int8"),
    ],
)
def test_codes_refuse_what_their_kind_does_not_have(kind: CodeKind, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        replace(make_codes(kind, 64, 32, 32), **options)


@every_build
def test_groups_that_kernels_do_not_take_are_dequantized(build: str) -> None:
    codes = make_codes(CodeKind.INT4, 64, 60, 20)
    x = torch.randn(3, 60)
    assert torch.allclose(product_of(codes, torch.float32, build)(x), x @ codes.dequantize(torch.float32).T, atol=1e-4)
