"""Waits at several servers with one queue, for Poisson arrivals and any distribution of service times.

Erlang's C formula gives the probability of a wait. Such waits have the first two moments of one server that is
`servers` times as fast (Takács; exact for one server), and are taken as a gamma distribution, which is exponential for
exponential service times.
"""

from __future__ import annotations

import math
from typing import NamedTuple

_STEPS = 80  # halvings
_SMALLEST_TERM = 1e-15


class ServiceTime(NamedTuple):
    """Raw moments of a service time in seconds."""

    mean: float
    square: float
    cube: float


def wait_probability(servers: int, load: float) -> float:
    """Return the probability of a wait (Erlang C); `load` is in servers, below `servers`."""
    blocking = 1.0
    for count in range(1, servers + 1):  # Erlang B by its recursion, which cannot overflow
        blocking = load * blocking / (count + load * blocking)
    return blocking / (1 - (load / servers) * (1 - blocking))


class Wait:
    def __init__(self, servers: int, rate: float, service: ServiceTime) -> None:
        load = rate * service.mean
        self.is_bounded = load < servers
        if not self.is_bounded:
            return
        self._waits = wait_probability(servers, load)
        idle = 1 - load / servers
        mean = service.square / (2 * service.mean * servers * idle)  # of those that wait
        square = 2 * (1 - idle) * mean**2 + service.cube / (3 * service.mean * servers**2 * idle)
        self._scale = (square - mean**2) / mean
        self._shape = mean / self._scale

    def quantile(self, quantile: float) -> float:
        if not self.is_bounded:
            return math.inf
        if self._waits <= 1 - quantile:
            return 0.0
        return self._scale * _gamma_quantile(self._shape, 1 - (1 - quantile) / self._waits)

    def share(self, seconds: float) -> float:
        """Return the share of arrivals that wait at most `seconds`."""
        if not self.is_bounded or seconds < 0:
            return 0.0
        return 1 - self._waits * (1 - _gamma_share(self._shape, seconds / self._scale))


def _gamma_quantile(shape: float, share: float) -> float:
    low, high = 0.0, 1.0
    while _gamma_share(shape, high) < share:
        low, high = high, 2 * high
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if _gamma_share(shape, middle) < share else (low, middle)
    return high


def _gamma_share(shape: float, x: float) -> float:
    """Regularized lower incomplete gamma function, by its series, whose terms are all positive."""
    term = total = math.exp(shape * math.log(x) - x - math.lgamma(shape + 1)) if x else 0.0
    count = 0
    while term > _SMALLEST_TERM * total:
        count += 1
        term *= x / (shape + count)
        total += term
    return total
