from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from decant.engine.cuda import sampler as cuda_sampler
from decant.engine.cuda.sampler import TritonSampler
from decant.engine.model.sampler import Sampler, highest, random_number
from tests import gpu
from tests.engine.sampler.harness import EOS, MIXES, VOCAB, exact, logits_of, row

pytestmark = pytest.mark.slow

DEVICE = torch.device(gpu.device_type())
SEEDS = 3
NAMES = ["plain", "top-k beyond the vocabulary", "top-p", "everything", "greedy, biased"]
BORDER = 1e-5
"""Random numbers this close to the border of two tokens may draw either."""


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_sampler, "TILE", 32)


@pytest.mark.parametrize("name", NAMES)
def test_tokens_agree_with_float64(name: str) -> None:
    logits = logits_of(3, SEEDS)
    rows = [row(MIXES[name], seed=seed, min_tokens=9 * (seed % 2)) for seed in range(SEEDS)]
    tokens = TritonSampler().sample(rows, logits.to(DEVICE), EOS)
    for drawn, of_row, token in zip(rows, logits, tokens, strict=True):
        shares = exact(drawn, of_row)
        assert shares[token] > 0
        if drawn.request.sampling.is_greedy:
            continue
        ends, number = shares.cumsum(), random_number(drawn)
        assert ends[token] - shares[token] - BORDER <= number <= ends[token] + BORDER


def test_the_same_seed_gives_the_token_of_the_plain_sampler_in_any_batch() -> None:
    rows = [row(MIXES[name], seed=seed) for seed, name in enumerate(["all three, hot", "min-p", "cool", "penalties"])]
    logits = logits_of(5, len(rows)).to(DEVICE)
    together = TritonSampler().sample(rows, logits, EOS)
    assert together == Sampler().sample(rows, logits, EOS)
    for index in (0, 2):
        assert TritonSampler().sample([rows[index]], logits[index : index + 1], EOS) == [together[index]]


def test_ties_at_the_border_of_top_k_are_all_kept() -> None:
    logits = torch.zeros(1, VOCAB, device=DEVICE)
    logits[0, 40] = 1.0
    tokens = {TritonSampler().sample([row({"top_k": 2}, seed=seed)], logits, EOS)[0] for seed in range(4)}
    assert len(tokens) > 2


def test_the_last_token_is_drawn_by_the_highest_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_sampler, "random_number", lambda row: float(np.nextafter(1.0, 0.0)))
    logits = torch.linspace(0.0, 1.0, VOCAB, device=DEVICE)[None].flip(-1)
    assert TritonSampler().sample([row({})], logits, EOS) == [VOCAB - 1]
    assert TritonSampler().sample([row({"top_k": 3})], logits, EOS) == [2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocabulary", [1, 31, 32, 77])
def test_the_likeliest_token_is_the_first_with_the_highest_score(vocabulary: int, dtype: torch.dtype) -> None:
    logits = torch.randn(9, vocabulary, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    logits[:4] = logits[:4].round()  # many are the highest
    tokens, finite = TritonSampler().top(logits)
    assert tokens.tolist() == highest(logits)[1].tolist()
    assert finite.all()
    assert TritonSampler().top(logits[::2])[0].tolist() == tokens[::2].tolist()
    assert TritonSampler().top(logits[:0])[0].tolist() == []


@pytest.mark.parametrize("at", [0, 40, 76])
def test_a_row_with_a_logit_that_is_not_a_number_or_infinite_is_not_finite(at: int) -> None:
    logits = torch.randn(5, 77, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    logits[0, at] = float("nan")
    logits[1, at], logits[1, 7] = float("nan"), float("inf")
    logits[2, at] = float("inf")
    logits[3] = float("-inf")
    logits[4, at] = float("-inf")
    _, finite = TritonSampler().top(logits)
    assert finite.tolist() == highest(logits)[0].isfinite().tolist() == [0, 0, 0, 0, 1]
