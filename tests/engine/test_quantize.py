from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from decant.engine.checkpoint import quantize as module
from decant.engine.checkpoint.quantize import QUANTIZATIONS, Quantization, quantize, quantized
from tests.engine import tiny

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


def test_numbers_that_are_too_large_for_int4_are_refused_by_name_and_others_fitted() -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    for largest in (1.0, 9e17):
        large = weight / weight.abs().amax() * largest
        assert float((quantized("x.weight", large, "int4")[:] - large).norm() / large.norm()) < 0.15
    with pytest.raises(ValueError, match=r"x\.weight has numbers above 1e\+18, which int4 does not take"):
        quantized("x.weight", weight * 1e20, "int4")


@every_kind
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused_by_name(to: Quantization, value: float) -> None:
    weight = torch.ones(64, 64)
    weight[3, 4] = value
    with pytest.raises(ValueError, match=r"x\.weight has numbers that are not finite"):
        quantized("x.weight", weight, to)


@every_kind
def test_a_weight_has_the_same_codes_in_pieces_of_several_threads(to: Quantization) -> None:
    weight = torch.randn(96, 80, generator=torch.Generator().manual_seed(0))
    whole = quantized("x.weight", weight, to).codes()
    with module._pieces_in_threads() as each:
        pieces = quantized("x.weight", weight, to, each, 7 * 80).codes()
    assert torch.equal(pieces.codes, whole.codes)
    assert torch.equal(pieces.scales, whole.scales)
    assert whole.zeros is None or torch.equal(whole.zeros, pieces.zeros)  # type: ignore[arg-type]


def test_a_model_is_quantized_in_loops_of_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that divide a loop wait for the slowest at its end, which other processes may delay."""
    seen, before = set[int](), torch.get_num_threads()

    def watched(*args: Any) -> Any:
        seen.add(torch.get_num_threads())
        return quantized(*args)

    monkeypatch.setattr(module, "quantized", watched)
    model: Any = LlamaForCausalLM(tiny.config("llama"))  # type: ignore[arg-type]
    torch.set_num_threads(2)
    try:
        quantize(model, "int8")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert seen == {1}
