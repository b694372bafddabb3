"""Intervals and timeouts of a router, in seconds unless a name has another unit."""

from __future__ import annotations

from dataclasses import dataclass, field

from decant.runtime.backoff import Backoff
from decant.runtime.connections.heartbeat import HEARTBEAT_SECONDS

STORE_RETRY_SECONDS = 0.5
"""Pause between reads of Redis while it is unavailable."""


@dataclass(frozen=True)
class WorkerTimings:
    heartbeat_s: float = HEARTBEAT_SECONDS
    welcome_s: float = 5.0
    reconnect_s: float = 1.0
    """Time to reopen a broken session before its runs move to other workers."""
    session_backoff: Backoff = Backoff(0.1, 1.0)
    """Between tries to open a session."""
    stuck_ms: int = 2_000
    lost_ms: int = 10_000
    """A step older than ``stuck_ms`` and than STUCK_STEPS of the longest steps of its size is stuck; its runs move when
    it is also older than ``lost_ms``.
    """
    forget_batch: int = 256
    """Number of finished runs that are reported at once; fewer wait for the next heartbeat."""
    watch_s: float = 30.0
    """Longest wait of one read for a change of the directory."""
    retry_s: float = STORE_RETRY_SECONDS
    close_s: float = 1.0
    """Time for workers to end their sessions at the router's end."""
    avoidance: Backoff = Backoff(0.5, 8.0)
    """Time for which a worker that lost a request comes last in placement."""
    no_worker_timeout_s: float = 5.0
    """Time that a request waits for a worker with the model, or one that can fetch its KV cache."""
    no_capacity_timeout_s: float = 60.0
    """Time that a request waits for a worker with capacity."""
    late_report_s: float = 0.5
    """Time to wait, after a decode worker ended a request, for the prefill worker's first token and durations."""


@dataclass(frozen=True)
class JournalTimings:
    """Pauses of the journal writer."""

    probe_s: float = 0.25
    """Between writes of one request while Redis is unavailable; shortened by up to half, at random."""
    fault: Backoff = Backoff(1.0, 30.0)
    """Between writes of a request that Redis refuses with an error."""


@dataclass(frozen=True)
class TakeoverTimings:
    retry_s: float = STORE_RETRY_SECONDS
    late_s: float = 0.5
    """A reply counts as a break if late by this and by a quarter of a registration."""
    reclaim_every_s: float = 30.0
    """Interval of searches for requests that this router owns and does not run."""
    max_pause_s: float = 30.0
    """Longest pause between tries to take over requests that can't run here."""


@dataclass(frozen=True)
class RouterTimings:
    workers: WorkerTimings = field(default_factory=WorkerTimings)
    journal: JournalTimings = field(default_factory=JournalTimings)
    takeover: TakeoverTimings = field(default_factory=TakeoverTimings)
    silent_s: float = 1.0
    """Time for a request to be refused or accepted; then it waits for admission, and its client gets headers."""
    unread_s: float = 60.0
    """Longest time that a message waits for its client after the request's end."""
    persist_s: float = 2.0
    """Time that a call waits for the end of its request to be written to Redis."""
    last_write_s: float = 5.0
    """Time, in a drain, for Redis to take the last writes."""
    store_retry_s: float = STORE_RETRY_SECONDS
    settle_s: float = 10.0
    """Time for sessions with known workers to open before the router is ready."""
    memory_check_s: float = 15.0
    """Interval of looks at the memory of Redis and of the results in it."""
    sweep_every_s: float = 30.0
    """Interval of sweeps for entries of the open set without an open request."""
