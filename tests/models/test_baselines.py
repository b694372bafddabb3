from __future__ import annotations

import math

import numpy as np
import pytest

from decant.models.baselines import ngram_loss, ngram_probabilities, unigram_loss

VOCAB = 6


def make_stream(length: int = 400) -> np.ndarray:
    random = np.random.default_rng(1)
    stream = [0, 1]
    for _ in range(length):
        expected = (2 * stream[-1] + stream[-2]) % (VOCAB - 1)
        stream.append(expected if random.random() < 0.7 else int(random.integers(VOCAB - 1)))
    return np.array(stream)


@pytest.mark.slow
@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_probabilities_after_any_context_sum_to_one(order):
    random = np.random.default_rng(2)
    for _ in range(20):
        context = random.integers(0, VOCAB, 8)  # token 5 never occurs in training
        total = sum(
            ngram_probabilities(make_stream(), np.append(context, token), VOCAB, order)[-1] for token in range(VOCAB)
        )
        assert total == pytest.approx(1.0)


def test_longer_contexts_predict_better_where_they_matter():
    train, held = make_stream(), make_stream(600)[402:]
    scored = np.ones(len(held), dtype=bool)
    losses = [ngram_loss(train, held, scored, VOCAB, order) for order in (1, 2, 3)]
    assert losses[0] > losses[2] + 0.3
    assert losses[0] < math.log(VOCAB)


def test_held_out_tokens_add_nothing_to_the_counts():
    train, held = make_stream(), np.array([1, 3, 3])
    alone = ngram_probabilities(train, held, VOCAB)
    followed = ngram_probabilities(train, np.concatenate([held, np.tile([3, 3, 3, 3], 50)]), VOCAB)
    assert followed[:3] == pytest.approx(alone)


def test_bigram_probabilities_are_those_worked_out_by_hand():
    # Training 0 1 0 1 0 2: bigrams 01 (2), 10 (2), 02 (1); discount 1/(1 + 2 * 2) = 0.2.
    # Continuations: 0 after {1}, 1 after {0}, 2 after {0}: each 1 of 3, and with three ones and no twos the
    # discount there is 1, so the unigram part is uniform over 3 tokens: 1/3.
    # After 0, seen 3 times with 2 followers: P(1) = (2 - 0.2)/3 + 0.2 * 2/3 * 1/3.
    train, held = np.array([0, 1, 0, 1, 0, 2]), np.array([0, 1])
    assert ngram_probabilities(train, held, 3, order=2)[1] == pytest.approx(1.8 / 3 + 0.4 / 9)


def test_unigram_loss_is_that_of_add_one_frequencies():
    train, held = np.array([0, 0, 1]), np.array([2, 0, 0])
    scored = np.array([False, True, True])
    assert unigram_loss(train, held, scored, 3) == pytest.approx(-math.log(3 / 6))
