"""Requests that wait for capacity at a worker: one line for each model, woken in order, at most one at a time.

A worker with capacity of a kind wakes the first of that kind; if it is placed, the next; if not, the kind is
closed. Among the open kinds the first by order goes first: arrival, moved forward by priority.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from enum import Enum
from itertools import count
from typing import NamedTuple

from decant.router.workers.needs import NO_NEEDS, Needs
from decant.state.ids import Incarnation


class WaitsFor(Enum):
    PREFILL = "a worker that computes the prompt"
    SHORT_PREFILL = "the same, or a decode worker, because the prompt is short"
    FROM_TOKENS = "a worker that computes the prompt and decodes"
    CACHE = "a worker that fetches the KV cache"


class CapacityKind(NamedTuple):
    waits_for: WaitsFor
    layout_hash: int = 0
    sender: Incarnation | None = None
    needs: Needs = NO_NEEDS


class Waiter:
    """A waiting request; after ``wake`` it calls ``WaitingLine.remove`` once placed, else ``WaitingLine.pass_turn``."""

    def __init__(self, order: float, kind: CapacityKind, wake: Callable[[], None]) -> None:
        self.order = order
        self.kind = kind
        self.wake = wake
        self.number = 0


class WaitingLine:
    def __init__(self) -> None:
        self._queues: dict[CapacityKind, list[tuple[float, int, Waiter]]] = {}  # sorted, none empty
        self._open: set[CapacityKind] = set()
        self._awake: Waiter | None = None
        self._numbers = count()

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    @property
    def kinds(self) -> Iterable[CapacityKind]:
        return tuple(self._queues)

    def has_waiter(self, kind: CapacityKind) -> bool:
        return kind in self._queues

    def add(self, waiter: Waiter) -> None:
        waiter.number = next(self._numbers)
        insort(self._queues.setdefault(waiter.kind, []), (waiter.order, waiter.number, waiter))

    def notify_all(self) -> None:
        """Wake all waiters to check their timeouts; no waiter gets a turn."""
        for queue in self._queues.values():
            for _, _, waiter in queue:
                waiter.wake()

    def open(self, kinds: Iterable[CapacityKind]) -> None:
        self._open.update(kinds)
        self._next()

    def is_turn_of(self, waiter: Waiter) -> bool:
        return waiter is self._awake

    def remove(self, waiter: Waiter) -> None:
        """Remove a waiter, placed or not; idempotent."""
        queue = self._queues.get(waiter.kind, [])
        index = bisect_left(queue, (waiter.order, waiter.number, waiter))
        if index < len(queue) and queue[index][2] is waiter:
            del queue[index]
            if not queue:
                del self._queues[waiter.kind]
        if waiter is self._awake:
            self._awake = None
            self._next()

    def pass_turn(self, waiter: Waiter) -> None:
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
            self._awake.wake()
