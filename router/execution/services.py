from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from decant.protos import worker_pb2 as wire
from decant.router.admission.control import AdmissionControl
from decant.router.admission.quota import QuotaLeases
from decant.router.execution.journal_writer import JournalWriter
from decant.router.kv_events.publisher import KvEvents, NoKvEvents
from decant.router.request.stored import RestoreRequest
from decant.router.settings import RouterSettings
from decant.router.timings import RouterTimings
from decant.router.workers.pool import WorkerPool
from decant.runtime.telemetry.metrics import RequestMetrics
from decant.state.requests import Requests

if TYPE_CHECKING:
    from decant.router.execution.execution import Execution


@dataclass(frozen=True, slots=True)
class RouterServices:
    """The parts of a router that all its executions use; made once, by the router's process."""

    peer: wire.Peer
    settings: RouterSettings
    admission: AdmissionControl
    pool: WorkerPool
    requests: Requests
    journal_writer: JournalWriter
    quota_leases: QuotaLeases
    restore: RestoreRequest
    metrics: RequestMetrics
    ended_s: float
    """How long the store keeps an ended request."""
    timings: RouterTimings = field(default_factory=RouterTimings)
    kv_events: KvEvents = field(default_factory=NoKvEvents)


class ExecutionOwner(Protocol):
    def on_ended(self, execution: Execution) -> None: ...

    def on_persisted(self, execution: Execution) -> None:
        """Called once nothing more will be written."""
