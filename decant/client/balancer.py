"""Selection of the next of several routers.

    round robin  A  B  C  A  B  C
    B fails      A  B! C  A     C  A  B    skipped during its backoff, then used again
    all failed   the one whose backoff ends first, and the seconds until then

A backoff doubles with each failure in a row, and is at least the router's retry delay.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from decant.runtime.backoff import Backoff

JITTER = 0.5
"""Largest share added to a server's retry delay; it spreads refused clients."""


DEFAULT_BACKOFF = Backoff(first_s=0.1, longest_s=1.0)
"""For which a failed router is skipped; the maximum is short beside the grace period of a lost stream."""


@dataclass(frozen=True, slots=True)
class Selection:
    router: int
    pause: float


@dataclass(frozen=True, slots=True)
class _Health:
    failures: int = 0
    backoff_until: float = 0.0


_HEALTHY = _Health()


class Backoffs:
    def __init__(self, count: int, clock: Callable[[], float], chance: Callable[[], float], backoff: Backoff) -> None:
        self._clock = clock
        self._chance = chance
        self._backoff = backoff
        self._health = [_HEALTHY] * count

    def until(self, router: int) -> float:
        return self._health[router].backoff_until

    def record_failure(self, router: int, at_least: float = 0.0) -> None:
        """Begin or extend a backoff; failures during a backoff count as one."""
        now, before = self._clock(), self._health[router]
        failures = before.failures + (now >= before.backoff_until)
        seconds = self._backoff.seconds(failures) * (0.5 + self._chance() / 2)
        self._health[router] = _Health(failures, max(before.backoff_until, now + max(seconds, at_least)))

    def record_success(self, router: int) -> None:
        self._health[router] = _HEALTHY


class RouterSelector(Backoffs):
    """Round robin over routers; thread-safe, though two threads may select the same router."""

    def __init__(
        self,
        count: int,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
        backoff: Backoff = DEFAULT_BACKOFF,
    ) -> None:
        super().__init__(count, clock, chance, backoff)
        self.count = count
        self.clock = clock
        self._last = int(chance() * count)

    def select(self, of_call: Backoffs | None = None) -> Selection:
        now = self.clock()

        def free_at(router: int) -> float:
            return max(now, self.until(router), of_call.until(router) if of_call else 0.0)

        routers = [(self._last + step) % self.count for step in range(1, self.count + 1)]
        router = min(routers, key=free_at)
        self._last = router
        return Selection(router, free_at(router) - now)

    def backoffs_of_call(self) -> Backoffs:
        return Backoffs(self.count, self.clock, self._chance, self._backoff)

    def add_jitter(self, seconds: float) -> float:
        return seconds * (1 + JITTER * self._chance())
