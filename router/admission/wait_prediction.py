"""Prediction of a new request's wait: the line through recent waits over the number of requests ahead.

Nothing is predicted while no request has waited for long: short waits at low load do not extrapolate.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from itertools import count

from decant.router.placement.cost_model import DecayedRegression
from decant.runtime.priority import queue_key

LONG_SECONDS = 1.0


class Wait:
    """Wait of one request; the first of ``mark_scheduled`` and ``discard`` counts."""

    def __init__(self, waits: WaitPredictor, position: tuple[float, int], ahead: int, since: float) -> None:
        self._waits: WaitPredictor | None = waits
        self.position = position
        self.ahead = ahead
        self.since = since

    def mark_scheduled(self) -> None:
        self._end(is_measured=True)

    def discard(self) -> None:
        self._end(is_measured=False)

    def _end(self, *, is_measured: bool) -> None:
        if self._waits is not None:
            waits, self._waits = self._waits, None
            waits.remove(self, is_measured=is_measured)


class WaitPredictor:
    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._measured = DecayedRegression()
        self._positions: list[tuple[float, int]] = []  # sorted, most urgent first
        self._oldest: dict[Wait, None] = {}  # by arrival
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._positions)

    def enter(self, priority: int) -> Wait:
        now = self._now()
        position = (queue_key(now, priority), next(self._numbers))
        wait = Wait(self, position, bisect_left(self._positions, position), now)
        insort(self._positions, position)
        self._oldest[wait] = None
        return wait

    def remove(self, wait: Wait, *, is_measured: bool) -> None:
        del self._positions[bisect_left(self._positions, wait.position)]
        del self._oldest[wait]
        if is_measured:
            now = self._now()
            self._measured.add(wait.ahead, now - wait.since, now)

    def predict(self, priority: int) -> float:
        """Predict the wait of a new request in seconds; 0 if unknown."""
        now = self._now()
        oldest = next(iter(self._oldest), None)
        if oldest is None or now - oldest.since < LONG_SECONDS or not self._measured.is_known(now):
            return 0.0
        fixed, per_request = self._measured.linear_fit
        ahead = bisect_left(self._positions, (queue_key(now, priority),))
        return fixed + per_request * ahead
