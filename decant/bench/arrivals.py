"""When requests are sent, in seconds after the start."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from random import Random


def random_arrivals(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """`count` arrivals with gamma-distributed gaps of mean 1 / rate. A burstiness of 1 is a Poisson process; less comes
    in bursts, more is more regular: the coefficient of variation of the gaps is 1 / sqrt(burstiness)."""
    return list(accumulate(_gaps(count, rate, burstiness, Random(seed))))


def _gaps(count: int, rate: float, burstiness: float, rng: Random) -> Iterator[float]:
    for _ in range(count):
        yield rng.gammavariate(burstiness, 1 / (rate * burstiness))
