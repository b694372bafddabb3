from __future__ import annotations

import numpy as np


def unigram_loss(train: np.ndarray, held: np.ndarray, scored: np.ndarray, vocab_size: int) -> float:
    """Nats per token of add-one frequencies; ``scored`` are the positions of ``held`` that count."""
    counts = np.bincount(train, minlength=vocab_size) + 1.0
    return float(-np.log(counts / counts.sum())[held[scored]].mean())


def ngram_loss(train: np.ndarray, held: np.ndarray, scored: np.ndarray, vocab_size: int, order: int = 5) -> float:
    probability = ngram_probabilities(train, held, vocab_size, order)
    return float(-np.log(probability[scored]).mean())


def ngram_probabilities(train: np.ndarray, held: np.ndarray, vocab_size: int, order: int = 5) -> np.ndarray:
    """Probability of each token of ``held`` after up to ``order - 1`` before it: ``float64[tokens]``.

    Interpolated Kneser-Ney with one absolute discount per order (Ney, Essen and Kneser, 1994; Chen and Goodman, 1998,
    section 2.7); the shortest order mixes with the uniform distribution. Only training positions are counted.
    """
    stream = np.concatenate([train, held]).astype(np.int64)
    split = len(train)
    grams = _number_grams(stream, order)
    probability = np.full(len(held), 1.0 / vocab_size)
    for n in range(1, order + 1):
        trained = grams[n][:split]
        if n < order:
            # One entry per different (n+1)-gram: the n-gram without its first token.
            _, first = np.unique(grams[n + 1][:split], return_index=True)
            first = first[first >= n]
            trained_at = first
        else:
            trained_at = np.arange(n - 1, split)
        counts = np.bincount(trained[trained_at], minlength=int(grams[n].max()) + 1).astype(np.float64)
        probability = _interpolate(grams, n, counts, trained_at, split, probability)
    return probability


def _number_grams(stream: np.ndarray, order: int) -> list[np.ndarray]:
    """``grams[n][i]``: dense number of the n-gram that ends at position i; undefined for i < n - 1."""
    grams = [np.zeros(len(stream), dtype=np.int64), np.unique(stream, return_inverse=True)[1]]
    unit = int(stream.max()) + 1
    for _ in range(2, order + 1):
        shorter = grams[-1]
        n = len(grams)
        key = np.zeros(len(stream), dtype=np.int64)
        key[n - 1 :] = shorter[n - 1 :] * unit + stream[: len(stream) - n + 1]
        grams.append(np.unique(key, return_inverse=True)[1])
    return grams


def _interpolate(
    grams: list[np.ndarray], n: int, counts: np.ndarray, at: np.ndarray, split: int, lower: np.ndarray
) -> np.ndarray:
    """Mix order n with ``lower``, of order n - 1, at the held positions. ``counts``: by number of an n-gram. ``at``: a
    training position per counted occurrence.
    """
    context = np.concatenate([[0], grams[n - 1][:-1]])
    size = int(context.max()) + 1
    total = np.bincount(context[at], minlength=size).astype(np.float64)
    _, kinds_at = np.unique(grams[n][at], return_index=True)
    kinds = np.bincount(context[at[kinds_at]], minlength=size).astype(np.float64)
    ones, twos = float((counts == 1).sum()), float((counts == 2).sum())
    discount = ones / (ones + 2 * twos) if ones else 0.5
    here = context[split:]
    seen = total[here] > 0
    safe_total = np.where(seen, total[here], 1.0)
    kept = np.maximum(counts[grams[n][split:]] - discount, 0.0) / safe_total
    mixed = kept + discount * kinds[here] / safe_total * lower
    return np.where(seen, mixed, lower)
