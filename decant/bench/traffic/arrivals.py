from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import accumulate
from random import Random


def random_arrivals(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Return arrivals in seconds; gaps are gamma-distributed with mean 1 / rate and shape `burstiness`."""
    return list(accumulate(_gaps(count, rate, burstiness, Random(seed))))


def ramp_arrivals(count: int, rates: tuple[float, float], burstiness: float, seed: int) -> list[float]:
    """Return arrivals in seconds; the rate changes linearly from the first of `rates` to the second, then stays."""
    begin, end = rates
    seconds = 2 * count / (begin + end)
    return [
        seconds + (area - count) / end
        if area > count
        else 2 * area / (begin + math.sqrt(begin * begin + 2 * (end - begin) * area / seconds))
        for area in random_arrivals(count, 1.0, burstiness, seed)
    ]


def _gaps(count: int, rate: float, burstiness: float, rng: Random) -> Iterator[float]:
    for _ in range(count):
        yield rng.gammavariate(burstiness, 1 / (rate * burstiness))
