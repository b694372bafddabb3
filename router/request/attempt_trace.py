from __future__ import annotations

from dataclasses import dataclass

from decant.protos.state_pb2 import WorkerRegistration
from decant.state.ids import Incarnation


@dataclass(slots=True)
class AttemptTrace:
    """Workers and times of the last attempt: seconds, ``*_at`` in event loop time; None: did not happen.

    The only place that knows which workers have the run: the record, the receipt, the log and the span derive from it.
    """

    attempts: int = 1
    prefill: WorkerRegistration | None = None
    decode: WorkerRegistration | None = None
    scheduled_at: float | None = None
    queue_s: float | None = None
    prefill_s: float | None = None
    handoff_s: float | None = None
    decode_wait_s: float | None = None
    decode_began_at: float | None = None
    handoff_bytes: int = 0

    @property
    def prefill_worker(self) -> str:
        return "" if self.prefill is None else self.prefill.peer.id

    @property
    def decode_worker(self) -> str:
        return "" if self.decode is None else self.decode.peer.id

    @property
    def workers(self) -> list[Incarnation]:
        return [Incarnation.of(worker.peer) for worker in (self.prefill, self.decode) if worker is not None]
