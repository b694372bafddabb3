"""Whose turn it is among several routers. No I/O.

    asked      A  B  C  A  B  C          in turn
    B fails    A  B! C  A     C  A  B    passed over while it rests, it comes back by itself
    all rest   the one that has rested first, and how long that is from now

`Turns` is shared by all calls: a router rests there for what concerns every call, a lost connection or a drain. What
concerns one call alone, such as a full queue, is in `Rests` of that call.

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
SPREAD = 0.5
"""Of a wait that a server asked for, the largest part that is added to it: calls that were refused together must not
come back together."""


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


class Rests:
    """Until when each of the routers 0 to ``count`` - 1 rests: for all calls, or for one."""

    def __init__(self, count: int, clock: Callable[[], float], chance: Callable[[], float]) -> None:
        self._clock = clock
        self._chance = chance
        self._health = [_WELL] * count

    def until(self, router: int) -> float:
        return self._health[router].rests_until

    def failed(self, router: int, at_least: float = 0.0) -> None:
        """Lets it rest for `at_least` so many seconds. What fails while it rests failed together with the first, and
        counts once."""
        now, before = self._clock(), self._health[router]
        failures = before.failures + (now >= before.rests_until)
        rest = min(LONGEST_REST_S, FIRST_REST_S * 2 ** min(failures - 1, 16)) * (0.5 + self._chance() / 2)
        self._health[router] = _Health(failures, max(before.rests_until, now + max(rest, at_least)))

    def answered(self, router: int) -> None:
        self._health[router] = _WELL


class RouterSelector(Rests):
    """Of the routers 0 to ``count`` - 1. Threads may share one: each step replaces one value, and two that come
    together are at worst sent to the same router."""

    def __init__(
        self,
        count: int,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """`chance` draws from 0 to 1: the first router, and how much of a rest is kept, so that clients that lost a
        router together do not come back together."""
        super().__init__(count, clock, chance)
        self.count = count
        self.clock = clock
        self._last = int(chance() * count)

    def take(self, of_call: Rests | None = None) -> Turn:
        """The next router, which rests neither for all calls nor for this one; or the one that has rested first."""
        now = self.clock()

        def free_at(router: int) -> float:
            return max(now, self.until(router), of_call.until(router) if of_call else 0.0)

        circle = [(self._last + step) % self.count for step in range(1, self.count + 1)]
        router = min(circle, key=free_at)
        self._last = router
        return Turn(router, free_at(router) - now)

    def rests_of_call(self) -> Rests:
        """Rests for one call alone, none yet."""
        return Rests(self.count, self.clock, self._chance)

    def spread(self, seconds: float) -> float:
        """A wait that a server asked for, and up to ``SPREAD`` of it more."""
        return seconds * (1 + SPREAD * self._chance())
