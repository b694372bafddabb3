"""Whose turn it is among several routers. No I/O.

    asked      A  B  C  A  B  C          in turn
    B fails    A  B! C  A     C  A  B    passed over while it rests, it comes back by itself
    all rest   the one that has rested first, and how long that is from now

A router rests longer each time that it fails again, and never shorter than it asked for.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

FIRST_REST_S = 0.1
LONGEST_REST_S = 1.0
"""Short beside the grace that a router gives a lost stream."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Who is asked next, in how many seconds."""

    router: int
    pause: float


@dataclass(frozen=True, slots=True)
class _Health:
    """How often a router has failed in a row, and until when it rests."""

    failures: int = 0
    rests_until: float = 0.0


_WELL = _Health()


class Turns:
    """Of the routers 0 to ``count`` - 1. Threads may share one: each step replaces one value, and two that come
    together are at worst sent to the same router."""

    def __init__(
        self,
        count: int,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """`chance` draws from 0 to 1: whom to begin with, and how much of a rest is kept, so that clients that lost a
        router together do not come back together."""
        self.count = count
        self.clock = clock
        self._chance = chance
        self._last = int(chance() * count)
        self._health = [_WELL] * count

    def take(self) -> Turn:
        now = self.clock()
        circle = [(self._last + step) % self.count for step in range(1, self.count + 1)]
        # The first of those that have rested, else the one that has rested first.
        router = min(circle, key=lambda router: max(now, self._health[router].rests_until))
        self._last = router
        return Turn(router, max(0.0, self._health[router].rests_until - now))

    def failed(self, router: int, asked_for: float = 0.0) -> None:
        """It did not answer, or asked to be left alone for so many seconds. What fails while it rests failed together
        with the first, and counts once."""
        now, before = self.clock(), self._health[router]
        failures = before.failures + (now >= before.rests_until)
        rest = min(LONGEST_REST_S, FIRST_REST_S * 2 ** min(failures - 1, 16)) * (0.5 + self._chance() / 2)
        self._health[router] = _Health(failures, max(before.rests_until, now + max(rest, asked_for)))

    def answered(self, router: int) -> None:
        self._health[router] = _WELL
