from __future__ import annotations

import pytest
import torch

from decant.engine.model.sampler import TopToken
from tests.engine.sampler.harness import EOS, SAMPLER, both_samplers, row, sample

pytestmark = pytest.mark.slow


def top_tokens(logits: torch.Tensor) -> TopToken:
    return SAMPLER["sampler"].top_tokens(logits)


@both_samplers
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocabulary", [1, 1023, 1024, 1025, 5000])
def test_the_likeliest_token_is_the_first_with_the_highest_score(vocabulary: int, dtype: torch.dtype) -> None:
    logits = torch.randn(200, vocabulary, generator=torch.Generator().manual_seed(vocabulary)).to(dtype)
    logits[:50] = logits[:50].round()  # many are the highest
    logits[50] = float("-inf")
    rows = [row({"temperature": 0.0}) for _ in range(200)]
    places = [(one == one.max()).nonzero()[0].item() for one in logits]
    assert sample(rows, logits, EOS) == places
    found = top_tokens(logits)
    assert torch.equal(found.scores.to(dtype), logits.amax(-1))
    assert found.tokens.tolist() == places
    assert top_tokens(logits.t().contiguous().t()).tokens.tolist() == places, "with other strides"
    assert top_tokens(logits[:0]).tokens.tolist() == []


@both_samplers
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("none", [float("nan"), float("-nan")])
def test_a_nan_score_is_detected_at_any_index(none: float, dtype: torch.dtype) -> None:
    logits = torch.randn(2100, 2100, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits.fill_diagonal_(none)
    logits[:, 7] = float("inf")
    logits[7, 7] = none
    assert top_tokens(logits).scores.isnan().all()
    assert not top_tokens(logits).finite
    sound = torch.zeros(3, 2100, dtype=dtype)
    sound[1, 2099], sound[2] = float("inf"), float("-inf")
    assert top_tokens(sound).scores.tolist() == [0.0, float("inf"), float("-inf")]
    assert [top_tokens(sound[:count]).finite for count in range(4)] == [True, True, False, False]
