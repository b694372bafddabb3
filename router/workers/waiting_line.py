"""Requests that wait for a place at a worker: one line for each model, the first by order is woken first.

    a worker may take a kind of place --open--> first of that kind is woken --placed--> the next one is woken
                                                        '--not placed--> that kind is closed, the rest sleeps on

So what frees n places wakes n requests and one more, which finds none left. The kinds of places have lines of their
own, since one that waits for another kind must not keep the others waiting; among all kinds that are open the first by
order goes first. Orders are those of ``Admission``: the time of arrival, moved forward by a request's priority.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from enum import Enum
from itertools import count
from typing import NamedTuple

from decant.state.ids import Incarnation


class WaitsFor(Enum):
    """What a request waits for."""

    PREFILL = "a worker that computes its prompt"
    SHORT_PREFILL = "the same, or a decode worker that computes it beside its sequences: it is short"
    FROM_TOKENS = "a worker that computes it and goes on with it"
    CACHE = "a worker that takes its cache over"


class Kind(NamedTuple):
    """Requests of one kind can take each other's places. ``layout`` and ``sender`` are those of a cache."""

    place: WaitsFor
    layout: int = 0
    sender: Incarnation | None = None


class Waiter:
    """One request in the line. After ``wake``, call ``WaitingLine.placed`` or ``WaitingLine.stays``."""

    def __init__(self, order: float, kind: Kind, wake: Callable[[], None]) -> None:
        self.order = order
        self.kind = kind
        self.wake = wake
        self.number = 0


class WaitingLine:
    """Those that wait for workers of one model. At most one is awake."""

    def __init__(self) -> None:
        self.wake_ups = 0
        """How many there were, for tests and metrics."""
        self._queues: dict[Kind, list[tuple[float, int, Waiter]]] = {}  # sorted, none empty
        self._open: set[Kind] = set()
        self._awake: Waiter | None = None
        self._numbers = count()

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    @property
    def kinds(self) -> Iterable[Kind]:
        """For which anything waits."""
        return tuple(self._queues)

    def has(self, kind: Kind) -> bool:
        """Whether anything waits for such a place: then what comes later has to wait too."""
        return kind in self._queues

    def join(self, waiter: Waiter) -> None:
        """It waits from now on."""
        waiter.number = next(self._numbers)
        insort(self._queues.setdefault(waiter.kind, []), (waiter.order, waiter.number, waiter))

    def notify_all(self) -> None:
        """How long it is worth waiting has changed; that gives no turn."""
        for queue in self._queues.values():
            for _, _, waiter in queue:
                waiter.wake()

    def open(self, kinds: Iterable[Kind]) -> None:
        """There may be places of these kinds."""
        self._open.update(kinds)
        self._next()

    def is_turn_of(self, waiter: Waiter) -> bool:
        return waiter is self._awake

    def placed(self, waiter: Waiter) -> None:
        """It waits no more: it was placed, or is over. May be said again."""
        queue = self._queues.get(waiter.kind, [])
        index = bisect_left(queue, (waiter.order, waiter.number, waiter))
        if index < len(queue) and queue[index][2] is waiter:
            del queue[index]
            if not queue:
                del self._queues[waiter.kind]
        if waiter is self._awake:
            self._awake = None
            self._next()

    def stays(self, waiter: Waiter) -> None:
        """Its turn came, and there was no place for it."""
        if waiter is self._awake:
            self._awake = None
            self._open.discard(waiter.kind)
            self._next()

    def _next(self) -> None:
        if self._awake is not None:
            return
        self._open.intersection_update(self._queues)
        if self._open:
            self._awake = min(self._queues[kind][0] for kind in self._open)[2]
            self.wake_ups += 1
            self._awake.wake()
