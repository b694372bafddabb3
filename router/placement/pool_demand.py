"""Work of a model's two pools, in workers.

prefill    share of the time in which a worker computes, and the time for the prompts that wait there, spread over
           RECOVERY_S
decode     the larger share in use, of a worker's KV blocks or of its batch, with what waits there; and the caches that
           prefill workers keep until a decode worker has room

A pool whose demand equals its number of workers has no reserve left.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from decant.protos import worker_pb2 as wire
from decant.state.ids import Incarnation

RECOVERY_S = 10.0
"""Seconds in which a pool should compute the prompts that wait."""
SMOOTHING_S = 10.0
"""Time after which a change of a worker's busy share counts by two thirds."""

ROLES = (wire.ROLE_PREFILL, wire.ROLE_DECODE)


@dataclass(frozen=True, slots=True)
class PoolDemand:
    workers: int
    demand: float

    @property
    def usage(self) -> float:
        return self.usage_of(self.workers)

    def usage_of(self, workers: int) -> float:
        """Usage of another number of workers by the same demand."""
        if workers:
            return self.demand / workers
        return math.inf if self.demand else 0.0


@dataclass(frozen=True, slots=True)
class Report:
    """Load of one worker, as it was at ``at`` (seconds of any one clock)."""

    incarnation: Incarnation
    load: wire.Load
    max_running: int
    at: float


class DemandMeter:
    """Meter of one model's workers: ``observe`` all of them, again and again."""

    def __init__(self) -> None:
        self._workers: dict[Incarnation, _Meter] = {}

    def observe(self, reports: Iterable[Report]) -> Mapping[wire.Role, PoolDemand]:
        """Demand of each pool by the workers in service. A worker's busy share is known from its second report on."""
        present = [report for report in reports if not report.load.draining]
        known = {report.incarnation: self._workers.get(report.incarnation) or _Meter() for report in present}
        self._workers = known
        for report in present:
            known[report.incarnation].add(report)
        prefill = [report for report in present if report.load.role == wire.ROLE_PREFILL]
        decode = [report for report in present if report.load.role != wire.ROLE_PREFILL]
        prompts = sum(known[report.incarnation].prompt_demand for report in prefill)
        leased = sum(report.load.leased_blocks for report in prefill)
        blocks = sum(report.load.total_blocks for report in decode)
        sequences = sum(_sequence_demand(report) for report in decode)
        return {
            wire.ROLE_PREFILL: PoolDemand(len(prefill), prompts),
            wire.ROLE_DECODE: PoolDemand(len(decode), sequences + (leased * len(decode) / blocks if blocks else 0.0)),
        }


class _Meter:
    def __init__(self) -> None:
        self._last: Report | None = None
        self._busy: float | None = None
        self._tokens_per_s = 0.0  # while it computes; 0: unknown

    @property
    def prompt_demand(self) -> float:
        assert self._last is not None
        queued = self._last.load.queued_tokens
        return (self._busy or 0.0) + (queued / self._tokens_per_s / RECOVERY_S if self._tokens_per_s else 0.0)

    def add(self, report: Report) -> None:
        last, self._last = self._last, report
        if last is None or report.at <= last.at:
            return
        seconds, busy_s = report.at - last.at, (report.load.busy_us - last.load.busy_us) / 1e6
        gain = 1 - math.exp(-seconds / SMOOTHING_S)
        share = min(1.0, max(0.0, busy_s / seconds))
        self._busy = share if self._busy is None else self._busy + gain * (share - self._busy)
        if busy_s > 0 and (tokens := report.load.busy_tokens - last.load.busy_tokens) > 0:
            rate = tokens / busy_s
            self._tokens_per_s += (gain if self._tokens_per_s else 1.0) * (rate - self._tokens_per_s)


def _sequence_demand(report: Report) -> float:
    load = report.load
    used = load.total_blocks - load.free_blocks - load.cached_blocks
    sequences = load.running + load.waiting
    blocks = used * (sequences / load.running if load.running else 1.0)
    return max(blocks / (load.total_blocks or 1), sequences / (report.max_running or sequences or 1))
