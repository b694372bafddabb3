from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from decant.engine.cpu.gemm import PANEL, OneDnn, PackedWeight
from decant.engine.cpu.kernels import loader as native
from decant.engine.cpu.kernels.loader import KERNELS

pytestmark = pytest.mark.skipif(KERNELS is None, reason="no kernels for this CPU")

SHAPES = [(64, 1), (16, 7), (48, 2601), (1152, 896), (896, 4864)]


def make_product(
    shape: tuple[int, int], dtype: torch.dtype, bias: bool = True
) -> tuple[PackedWeight, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    weight = (torch.randn(*shape, generator=generator) / shape[1] ** 0.5).to(dtype)
    add = torch.randn(shape[0], generator=generator).to(dtype) if bias else torch.zeros(shape[0], dtype=dtype)
    assert KERNELS is not None
    return PackedWeight(KERNELS, weight, add if bias else None), weight, add


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_product_is_right_up_to_rounding(shape: tuple[int, int], dtype: torch.dtype, bias: bool) -> None:
    product, weight, add = make_product(shape, dtype, bias)
    rows = torch.randn(37, shape[1], generator=torch.Generator().manual_seed(1)).to(dtype)
    exact = rows.double() @ weight.double().T + add.double()
    tolerance = 2e-5 if dtype == torch.float32 else 2**-8
    assert torch.allclose(product(rows).double(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_the_same_bits_among_others_and_with_any_number_of_threads(
    shape: tuple[int, int], dtype: torch.dtype, threads: None
) -> None:
    product = make_product(shape, dtype)[0]
    rows = torch.randn(301, shape[1], generator=torch.Generator().manual_seed(2)).to(dtype)
    torch.set_num_threads(1)
    whole = product(rows)
    for count in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 30, 111, 300):
        torch.set_num_threads(1 + count % 3)
        first = (count * 13) % (301 - count)
        assert torch.equal(product(rows[first : first + count]), whole[first : first + count]), count


def test_bfloat16_is_float32_rounded_to_the_nearest() -> None:
    half, weight, add = make_product((64, 96), torch.bfloat16)
    assert KERNELS is not None
    full = PackedWeight(KERNELS, weight.float(), add.float())
    rows = torch.randn(50, 96, generator=torch.Generator().manual_seed(3)).bfloat16()
    rows[7, 3], rows[8, 3] = float("nan"), float("inf")
    rounded, expected = half(rows), full(rows.float()).bfloat16()
    assert torch.equal(rounded.isnan(), expected.isnan())
    assert torch.equal(rounded.nan_to_num(), expected.nan_to_num())


def test_rows_may_be_strided() -> None:
    product = make_product((32, 8), torch.float32)[0]
    wide = torch.randn(6, 16)
    assert torch.equal(product(wide[::2, 4:12]), product(wide[::2, 4:12].contiguous()))


def test_a_width_that_is_no_whole_panel_is_refused() -> None:
    with pytest.raises(ValueError, match=f"outputs: a multiple of {PANEL}, got 17"):
        PackedWeight(KERNELS, torch.zeros(17, 4), None)  # type: ignore[arg-type]


def spread(shape: tuple[int, int], kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    some = torch.randn(*shape, generator=generator)
    match kind:
        case "trained":
            return (some * 0.02).bfloat16()
        case "constant":
            return torch.full(shape, -3.0).bfloat16()
        case "large":
            return (some.sign() * 3e38).bfloat16()
        case "with zeros":
            return (some * (torch.rand(*shape, generator=generator) < 0.999)).bfloat16()
        case "far apart":
            return (some * 2.0 ** torch.randint(-100, 100, shape, generator=generator)).bfloat16()
    raise ValueError(kind)


@pytest.mark.parametrize("kind", ["trained", "constant", "large", "with zeros", "far apart"])
@pytest.mark.parametrize("shape", [(48, 1300), (32, 32), (16, 97)])
def test_packing_keeps_every_number_of_a_weight(shape: tuple[int, int], kind: str) -> None:
    weight = spread(shape, kind)
    rows = torch.eye(shape[1]).bfloat16()
    for name in native.supported_modules():
        product = PackedWeight(pytest.importorskip(f"decant.engine.cpu.kernels.{name}"), weight, None)
        for count in (1, 3, 6, 10, 11, 25, 64):
            answers = torch.cat([product(some) for some in rows.split(count)])
            assert torch.equal(answers, weight.T), (name, count)


def test_the_weight_is_held_once_in_its_own_dtype_or_in_less() -> None:
    for name in native.supported_modules():
        module = pytest.importorskip(f"decant.engine.cpu.kernels.{name}")
        for dtype in (torch.bfloat16, torch.float32):
            weight = make_product((1152, 896), dtype)[1]
            held = PackedWeight(module, weight, None)._weight
            if name == "_kernels_avx512" and dtype == torch.bfloat16:
                assert held.nbytes / weight.nbytes == pytest.approx(0.76, abs=0.02)
            else:
                assert held.nbytes == weight.nbytes
            assert held.data_ptr() != weight.data_ptr()


def test_a_weight_that_can_not_be_compressed_keeps_its_size() -> None:
    weight = spread((1152, 896), "far apart")
    assert KERNELS is not None
    assert PackedWeight(KERNELS, weight, None)._weight.nbytes == pytest.approx(weight.nbytes, rel=0.005)


@pytest.mark.skipif(len(native.supported_modules()) < 2, reason="one build of the kernels for this CPU")
def test_builds_for_other_cpus_give_float32_the_same_bits() -> None:
    rows = torch.randn(29, 896, generator=torch.Generator().manual_seed(5))
    weight = make_product((1152, 896), torch.float32)[1]
    modules = [pytest.importorskip(f"decant.engine.cpu.kernels.{name}") for name in native.supported_modules()]
    first, second = (PackedWeight(module, weight, None)(rows) for module in modules)
    assert torch.equal(first, second)


def test_both_products_agree() -> None:
    ours, weight, add = make_product((256, 512), torch.float32)
    rows = torch.randn(9, 512, generator=torch.Generator().manual_seed(4))
    assert torch.allclose(ours(rows), OneDnn(weight, add)(rows), atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_product_of_no_rows_is_empty(dtype: str) -> None:
    ours, weight, add = make_product((256, 512), getattr(torch, dtype))
    none = torch.empty(1, 0, 512, dtype=getattr(torch, dtype))
    for product in (ours, OneDnn(weight, add)):
        answer = product(none)
        assert answer.shape == (1, 0, 256)
        assert answer.dtype == none.dtype
