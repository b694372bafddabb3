"""p-values of statistical tests."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

Numbers = Sequence[float] | npt.NDArray[np.float64]


def of_counts(observed: Numbers, expected: Numbers) -> float:
    """Pearson's chi-square test of at least two bins."""
    statistic = float(np.sum((np.asarray(observed) - expected) ** 2 / np.asarray(expected)))
    degrees = len(observed) - 1
    assert degrees > 0
    halves = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(*halves))


def of_uniform(values: Numbers) -> float:
    """Kolmogorov and Smirnov's test of many values against (0, 1), with Stephens' correction (1970) of their series."""
    ordered, count = np.sort(values), len(values)
    steps = np.arange(count + 1) / count
    distance = max(float((steps[1:] - ordered).max()), float((ordered - steps[:-1]).max()))
    scaled = distance * (math.sqrt(count) + 0.12 + 0.11 / math.sqrt(count))
    series: float = sum((-1.0) ** (term - 1) * math.exp(-2 * (term * scaled) ** 2) for term in range(1, 100))
    return min(1.0, max(0.0, 2 * series))


def of_correlation(one: Numbers, other: Numbers) -> float:
    """Two-sided test of Pearson's correlation of many values, by the normal distribution."""
    return math.erfc(abs(float(np.corrcoef(one, other)[0, 1])) * math.sqrt(len(one) / 2))
