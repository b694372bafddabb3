from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

import decant.engine.model.sampler as sampler_module
from decant.engine.model.sampler import PIECE
from decant.engine.plan import Row
from tests.engine import p_values
from tests.engine.sampler.harness import (
    EOS,
    MIXES,
    OUTPUT,
    PROMPT,
    RANDOM,
    VOCAB,
    both_samplers,
    exact,
    logits_of,
    row,
    sample,
)

pytestmark = pytest.mark.slow

DRAWS = 6_000


def draws(drawn: dict[str, Any], logits: torch.Tensor, **options: Any) -> np.ndarray:
    counts = np.zeros(VOCAB, dtype=int)
    for first in range(0, DRAWS, 2000):
        rows = [row(drawn, seed=seed, **options) for seed in range(first, first + 2000)]
        counts += np.bincount(sample(rows, logits.expand(len(rows), -1), EOS), minlength=VOCAB)
    return counts


def chi_square(counts: np.ndarray, shares: np.ndarray) -> float:
    """Return the p-value, or 0 if a token with probability 0 was drawn."""
    if counts[shares == 0].any():
        return 0.0
    expected = shares * counts.sum()
    rare = expected < 5
    observed, bins = list(counts[~rare]), list(expected[~rare])
    if expected[rare].sum() > 0:
        observed.append(counts[rare].sum())
        bins.append(expected[rare].sum())
    if len(bins) == 1:
        return 1.0 if observed[0] == counts.sum() else 0.0
    return p_values.of_counts(observed, bins)


@both_samplers
def test_tokens_are_drawn_with_their_exact_probabilities():
    """With random numbers of the sampler. That each mix inverts its distribution at any number is tested below."""
    logits = logits_of(0)
    mix = RANDOM["all three, hot"]
    assert chi_square(draws(mix, logits), exact(row(mix), logits[0])) > 1e-3


def test_chi_square_detects_a_slightly_different_distribution():
    logits = logits_of(0)
    counts = draws({"temperature": 1.0}, logits)
    assert chi_square(counts, exact(row({}), logits[0])) > 1e-3
    for other in ({"temperature": 1.15}, {"min_p": 0.02}, {"top_k": 40}, {"frequency_penalty": 0.2}):
        assert chi_square(counts, exact(row(other), logits[0])) < 1e-6


@pytest.fixture
def numbers(monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """Even numbers that replace random ones: the row with seed i draws with ``numbers[i]``."""
    even = np.linspace(0.0005, 0.9995, 401)
    monkeypatch.setattr(sampler_module, "counter_uniform", lambda seed, *_: even[seed])
    return even


def inverts(numbers: np.ndarray, rows: Sequence[Row], logits: torch.Tensor) -> list[int]:
    """Check that each row draws the token at which the exact cumulative distribution passes its number."""
    cumulative = np.cumsum(exact(rows[0], logits[0]))
    tokens = sample(rows, logits.expand(len(rows), -1), EOS)
    clear = np.abs(cumulative[:, None] - numbers).min(0) > 1e-5
    assert clear.mean() > 0.9
    assert (np.array(tokens) == np.searchsorted(cumulative, numbers, side="right"))[clear].all()
    return tokens


@both_samplers
@pytest.mark.parametrize("name", MIXES)
def test_a_draw_inverts_the_exact_cumulative_distribution(name, numbers):
    rows = [row(MIXES[name], seed=at) for at in range(len(numbers))]
    some = slice(None, None, 1 if name in RANDOM else 100)  # greedy rows use no number
    for seed in range(10):
        inverts(numbers[some], rows[some], logits_of(seed))


@both_samplers
def test_stop_tokens_are_drawn_only_after_the_minimum_length(numbers):
    logits = logits_of(0)
    logits[0, [3, 4]] = 4.0
    held, free = (
        inverts(numbers, [row({}, min_tokens=least, seed=at) for at in range(len(numbers))], logits)
        for least in (len(OUTPUT) + 1, len(OUTPUT))
    )
    assert not {3, 4} & {*held}
    assert {3, 4} <= {*free}


@both_samplers
@pytest.mark.parametrize("vocabulary", [PIECE, 4 * PIECE + 300])
@pytest.mark.parametrize("name", [*RANDOM, "nearly all", "many"])
def test_a_draw_from_a_large_vocabulary_inverts_the_distribution(vocabulary, name, monkeypatch):
    """Sums are computed in pieces: one has the likeliest tokens, another none that may be drawn."""
    mix = {**RANDOM, "nearly all": {"top_p": 0.9999}, "many": {"top_k": 900, "top_p": 0.999}}[name]
    logits = logits_of(11, 1, vocabulary)
    logits[0, -200:] += 3.0
    logits[0, vocabulary // 4 : vocabulary // 2] -= 200.0
    shares = exact(row(mix), logits[0])
    cumulative = np.cumsum(shares)
    numbers = np.linspace(0.00005, 0.99995, 500)
    monkeypatch.setattr(sampler_module, "counter_uniform", lambda seed, *_: numbers[seed])
    rows = [row(mix, seed=at) for at in range(len(numbers))]
    got = np.array(sample(rows, logits.expand(len(rows), -1), EOS))
    assert shares[got].all()
    clear = np.abs(cumulative[np.clip(got, 1, None) - [[1], [0]]] - numbers).min(0) > 1e-5
    assert clear.mean() > 0.5
    assert (got == np.searchsorted(cumulative, numbers, side="right"))[clear].all()


@both_samplers
@pytest.mark.parametrize("narrow", [{}, {"top_k": 4}, {"top_p": 0.9}, {"min_p": 0.5}], ids=str)
@pytest.mark.parametrize(
    "mix", [{"repetition_penalty": 1e-42, "temperature": 0.5}, {"temperature": 1e-5, "logit_bias": {2: 100.0}}], ids=str
)
def test_tokens_with_scores_beyond_the_float_range_are_drawn(mix, narrow):
    rows = [row({**mix, **narrow}, seed=seed) for seed in range(100)]
    logits = logits_of(0).abs() * 1e4
    drawn = set(sample(rows, logits.expand(100, -1), EOS))
    assert drawn == ({*PROMPT, *OUTPUT} if "repetition_penalty" in mix else {int(logits[0].argmax())})


@both_samplers
@pytest.mark.parametrize("name", ["repetition", "presence", "frequency"])
def test_only_the_repetition_penalty_counts_the_prompt(name, numbers):
    logits = logits_of(1)
    plain, changed = (exact(row(mix, output=()), logits[0]) for mix in ({}, RANDOM[name]))
    inverts(numbers, [row(RANDOM[name], output=(), seed=at) for at in range(len(numbers))], logits)
    assert np.allclose(plain, changed) == (name != "repetition")


@both_samplers
def test_equal_logits_at_the_top_k_limit_are_all_kept(numbers):
    rows = [row({"top_k": 3}, seed=at) for at in range(len(numbers))]
    assert {*sample(rows, torch.zeros(1, VOCAB).expand(len(rows), -1), EOS)} == {*range(VOCAB)}
