"""Waiting times of a pool: Poisson arrivals, several workers, any distribution of service times.

Erlang's C gives the probability that an arrival waits. The wait of those that do is exponential, scaled for the spread
of service times (Allen and Cunneen): p90 and above are within 15 % of a simulated queue, a median is too low.
Placement by load comes close to the one shared queue that this assumes.
"""

from __future__ import annotations

import math


def wait_probability(servers: int, load: float) -> float:
    """Erlang C: `load` in servers, below `servers`."""
    blocking = 1.0
    for count in range(1, servers + 1):  # Erlang B by its recursion, which cannot overflow
        blocking = load * blocking / (count + load * blocking)
    return blocking / (1 - (load / servers) * (1 - blocking))


def wait_quantile(servers: int, rate: float, service: tuple[float, float], quantile: float) -> float:
    """Seconds that all but 1 - `quantile` of the arrivals wait at most; infinite where the load exceeds the servers.

    `service`: first and second moment of the service time.
    """
    mean, square = service
    load = rate * mean
    if load >= servers:
        return math.inf
    waits = wait_probability(servers, load)
    if waits <= 1 - quantile:
        return 0.0
    spread = square / mean**2 / 2  # (1 + squared coefficient of variation) / 2
    return spread * mean / (servers - load) * math.log(waits / (1 - quantile))
