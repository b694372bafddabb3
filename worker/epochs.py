"""Ownership of requests: a worker keeps the highest epoch that it saw and answers a lower one with Superseded.

A request with a run or prompt here is live: its id stands for one payload, and its epoch is kept without limit.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from decant.protos import worker_pb2 as wire
from decant.runtime.event_source import EventSource

KEEP_S = 900.0
"""Time for which the epoch of a request that is not live is kept, since it was last named: far beyond any lease."""

MAX_KEPT = 100_000
"""Requests that are not live; those named longest ago go first."""


@dataclass(slots=True)
class _LiveRequest:
    epoch: int
    digest: bytes = b""
    runs: int = 0


class Epochs:
    def __init__(
        self,
        *,
        keep_s: float = KEEP_S,
        max_kept: int = MAX_KEPT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.new_owners = EventSource[wire.Run]()
        """An attempt that a new owner has named, under a higher epoch."""
        self._keep_s = keep_s
        self._max_kept = max_kept
        self._clock = clock
        self._live: dict[str, _LiveRequest] = {}
        self._past: OrderedDict[str, tuple[int, float]] = OrderedDict()  # epoch and when, longest ago first

    def __len__(self) -> int:
        return len(self._live) + len(self._past)

    def check(self, run: wire.Run) -> wire.Superseded | None:
        """Record the epoch of a message; return Superseded unless its sender owns the request.

        Check `is_other_request` first: epochs of two requests with one id are not comparable.
        """
        self._remove()
        live = self._live.get(run.request)
        highest = live.epoch if live is not None else self._past.get(run.request, (0, 0.0))[0]
        if live is not None:
            live.epoch = max(highest, run.epoch)
        else:
            self._keep(run.request, max(highest, run.epoch))
        if run.epoch < highest:
            return wire.Superseded(run=run, epoch=highest)
        if 0 < highest < run.epoch:
            self.new_owners.publish(run)
        return None

    def is_other_request(self, run: wire.Run) -> bool:
        """Whether another payload with this id is live."""
        live = self._live.get(run.request)
        return live is not None and bool(live.digest and run.digest) and live.digest != run.digest

    def hold(self, run: wire.Run) -> None:
        """Keep the run's request live until each `hold` has its `release`."""
        live = self._live.get(run.request)
        if live is None:
            epoch, _ = self._past.pop(run.request, (run.epoch, 0.0))
            live = self._live[run.request] = _LiveRequest(epoch)
        live.digest = live.digest or run.digest
        live.runs += 1

    def release(self, run: wire.Run) -> None:
        live = self._live[run.request]
        live.runs -= 1
        if not live.runs:
            del self._live[run.request]
            self._keep(run.request, live.epoch)

    def _keep(self, request: str, epoch: int) -> None:
        self._past[request] = (epoch, self._clock())
        self._past.move_to_end(request)
        if len(self._past) > self._max_kept:
            self._past.popitem(last=False)

    def _remove(self) -> None:
        now = self._clock()
        while self._past:
            oldest, (_, when) = next(iter(self._past.items()))
            if when + self._keep_s > now:
                return
            del self._past[oldest]
