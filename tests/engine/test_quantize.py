from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decant.engine.checkpoint.quantize import QUANTIZATIONS, Quantization, quantized

MOST = {"int8": 0.012, "int4": 0.12}
"""Root mean square error, relative to that of the numbers."""

every_kind = pytest.mark.parametrize("to", QUANTIZATIONS)


@every_kind
@given(
    outputs=st.integers(1, 70),
    inner=st.integers(1, 200),
    size=st.sampled_from([1e-6, 0.02, 1.0, 1e6]),
    shift=st.sampled_from([0.0, 1.0, -3.0]),
)
def test_a_quantized_weight_is_near_the_numbers_it_was_made_of(
    to: Quantization, outputs: int, inner: int, size: float, shift: float
) -> None:
    weight = (torch.randn(outputs, inner, generator=torch.Generator().manual_seed(inner)) + shift) * size
    made = quantized("x.weight", weight, to)
    error = (made[:] - weight).double().square().mean().sqrt()
    assert error <= MOST[to] * weight.double().square().mean().sqrt()
    assert made.codes().shape == weight.shape


@every_kind
@pytest.mark.parametrize("value", [0.0, 0.3, -0.3])
def test_equal_numbers_stay_what_they_are(to: Quantization, value: float) -> None:
    made = quantized("x.weight", torch.full((65, 100), value), to)
    assert torch.allclose(made[:], torch.full((65, 100), value), rtol=1e-3)


@every_kind
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused_by_name(to: Quantization, value: float) -> None:
    weight = torch.ones(64, 64)
    weight[3, 4] = value
    with pytest.raises(ValueError, match=r"x\.weight has numbers that are not finite"):
        quantized("x.weight", weight, to)
