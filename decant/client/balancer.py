"""Selects the next of several routers: round robin, with backoff after failures. No I/O.

    round robin  A  B  C  A  B  C
    B fails      A  B! C  A     C  A  B    skipped during its backoff, then used again
    all failed   the one whose backoff ends first, and the seconds until then

All calls share a `RouterSelector`: a router backs off there after a lost connection or a drain, which concern every
call. What concerns one call only, such as a full queue, is in the `Backoffs` of that call.

The backoff of a router doubles with each failure in a row. It is never shorter than the router asks for.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

JITTER = 0.5
"""Largest part that is added to a wait that a server asks for, so that clients that it refused do not return at once
together."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Seconds for which a router is skipped after its first failure, and at most. The longest is short beside the grace
    that a router gives a lost stream."""

    first_s: float = 0.1
    longest_s: float = 1.0

    def seconds(self, failures: int) -> float:
        """After that many failures in a row, at least 1."""
        return min(self.longest_s, self.first_s * float(2 ** min(failures - 1, 16)))


DEFAULT_BACKOFF = Backoff()


@dataclass(frozen=True, slots=True)
class Selection:
    """The router to call next, and the seconds to wait before."""

    router: int
    pause: float


@dataclass(frozen=True, slots=True)
class _Health:
    """Failures of a router in a row, and the end of its backoff."""

    failures: int = 0
    backoff_until: float = 0.0


_HEALTHY = _Health()


class Backoffs:
    """Backoffs of the routers 0 to `count` - 1, for all calls or for one."""

    def __init__(self, count: int, clock: Callable[[], float], chance: Callable[[], float], backoff: Backoff) -> None:
        self._clock = clock
        self._chance = chance
        self._backoff = backoff
        self._health = [_HEALTHY] * count

    def until(self, router: int) -> float:
        return self._health[router].backoff_until

    def failed(self, router: int, at_least: float = 0.0) -> None:
        """Skip it for `at_least` seconds or more. Failures during a backoff count as one with the failure before it."""
        now, before = self._clock(), self._health[router]
        failures = before.failures + (now >= before.backoff_until)
        seconds = self._backoff.seconds(failures) * (0.5 + self._chance() / 2)
        self._health[router] = _Health(failures, max(before.backoff_until, now + max(seconds, at_least)))

    def answered(self, router: int) -> None:
        self._health[router] = _HEALTHY


class RouterSelector(Backoffs):
    """Selects among the routers 0 to `count` - 1. Threads may share one: each step replaces one value, and two threads
    at the same time may select the same router."""

    def __init__(
        self,
        count: int,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
        backoff: Backoff = DEFAULT_BACKOFF,
    ) -> None:
        """`chance` draws from 0 to 1, for the first router and the jitter of each backoff: clients that lose a router
        together do not return together."""
        super().__init__(count, clock, chance, backoff)
        self.count = count
        self.clock = clock
        self._last = int(chance() * count)

    def select(self, of_call: Backoffs | None = None) -> Selection:
        """The next router without a backoff for all calls or for this one, else the one whose backoff ends first."""
        now = self.clock()

        def free_at(router: int) -> float:
            return max(now, self.until(router), of_call.until(router) if of_call else 0.0)

        circle = [(self._last + step) % self.count for step in range(1, self.count + 1)]
        router = min(circle, key=free_at)
        self._last = router
        return Selection(router, free_at(router) - now)

    def backoffs_of_call(self) -> Backoffs:
        """New backoffs for one call."""
        return Backoffs(self.count, self.clock, self._chance, self._backoff)

    def add_jitter(self, seconds: float) -> float:
        """A wait that a server asks for, and up to `JITTER` of it more."""
        return seconds * (1 + JITTER * self._chance())
