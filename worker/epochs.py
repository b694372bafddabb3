"""Which router owns a request: a worker keeps the highest epoch that it saw and answers a lower one.

epoch 1   ────────┬───────────────── x  Superseded(2)
epoch 2           └──(adopted)────────────────────>
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from protos import worker_pb2 as wire

KEEP_S = 900.0
"""How long a request's epoch is remembered after it was last heard of: far beyond any lease."""


class Epochs:
    """The highest epoch of each request, for ``keep_s`` since it was last named.

    ``listeners`` are called with the run by which a request's epoch rose.
    """

    def __init__(self, keep_s: float = KEEP_S, clock: Callable[[], float] = time.monotonic) -> None:
        self.listeners: list[Callable[[wire.Run], None]] = []
        self._keep_s = keep_s
        self._clock = clock
        self._seen: OrderedDict[str, tuple[int, float]] = OrderedDict()  # epoch and when, longest ago first

    def __len__(self) -> int:
        return len(self._seen)

    def check(self, run: wire.Run) -> wire.Superseded | None:
        """None when the sender owns the request as far as is known here; else what to tell him."""
        now = self._clock()
        self._forget(now)
        highest, _ = self._seen.get(run.request, (0, now))
        self._seen[run.request] = (max(highest, run.epoch), now)
        self._seen.move_to_end(run.request)
        if run.epoch < highest:
            return wire.Superseded(run=run, epoch=highest)
        if 0 < highest < run.epoch:
            for listener in self.listeners:
                listener(run)
        return None

    def _forget(self, now: float) -> None:
        while self._seen:
            request, (_, when) = next(iter(self._seen.items()))
            if when + self._keep_s > now:
                return
            del self._seen[request]
