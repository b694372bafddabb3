"""Intervals and patience of a router, in seconds unless a name says otherwise: constructors take them.

Heartbeats and the detection of silence are common to all processes: see `runtime.heartbeat`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from decant.runtime.heartbeat import HEARTBEAT_SECONDS

STORE_RETRY_SECONDS = 0.5
"""Between two tries to read the store while it is unavailable."""


@dataclass(frozen=True)
class WorkerTimings:
    heartbeat_s: float = HEARTBEAT_SECONDS
    welcome_s: float = 5.0
    """From the hello to the worker's welcome."""
    reconnect_s: float = 1.0
    """After a break, before the runs there go to other workers."""
    first_backoff_s: float = 0.1
    max_backoff_s: float = 1.0
    """Between two tries to open a session; the pause doubles."""
    stuck_ms: int = 2_000
    given_up_ms: int = 10_000
    """A step is stuck when it is older than ``stuck_ms`` and than STUCK_STEPS of the longest steps of its size; its
    runs move elsewhere when it is also older than ``given_up_ms``."""
    forget_batch: int = 256
    """So many finished runs are reported to the worker at once; fewer wait for the next heartbeat."""
    watch_s: float = 30.0
    """One wait for a change of the directory."""
    retry_s: float = STORE_RETRY_SECONDS
    close_s: float = 1.0
    """For workers to end their sessions when the router ends."""
    avoided_s: float = 0.5
    max_avoided_s: float = 8.0
    """How long a worker that lost a request comes last in placement; the time doubles with each failure in a row."""
    no_worker_patience_s: float = 5.0
    """A request waits so long while no worker of its model answers..."""
    no_capacity_patience_s: float = 60.0
    """...and so long while those that answer are full."""


@dataclass(frozen=True)
class JournalTimings:
    """First and longest pause of the journal writer; a pause doubles with each failure."""

    unavailable_s: float = 0.5
    max_unavailable_s: float = 4.0
    """Between two tries while Redis is unavailable; each is shortened by up to half, at random."""
    fault_s: float = 1.0
    max_fault_s: float = 30.0
    """Between two writes of a request that Redis refuses with an error."""


@dataclass(frozen=True)
class TakeoverTimings:
    retry_s: float = STORE_RETRY_SECONDS
    late_s: float = 0.5
    """A reply that is late by this, and by a quarter of a registration, counts as a break."""
    reclaim_every_s: float = 30.0
    """Between two searches for requests that this router owns and does not run."""
    max_pause_s: float = 30.0
    """Between two tries to take over requests that this router can't run."""


@dataclass(frozen=True)
class RouterTimings:
    workers: WorkerTimings = field(default_factory=WorkerTimings)
    journal: JournalTimings = field(default_factory=JournalTimings)
    takeover: TakeoverTimings = field(default_factory=TakeoverTimings)
    unread_s: float = 60.0
    """A message may wait so long for its client once the request has ended."""
    persist_s: float = 2.0
    """For the store to learn an end that a call waits for."""
    last_write_s: float = 5.0
    """For the last writes of a drain while Redis is unavailable."""
    store_retry_s: float = STORE_RETRY_SECONDS
    settle_s: float = 10.0
    """For the sessions with known workers to open before the router is ready. A router without workers becomes ready
    too."""
    sweep_every_s: float = 30.0
    """Between two looks for entries of the open set without an open request."""
