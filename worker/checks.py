"""Reasons, for prompts and runs alike, to refuse what this worker could serve at another time."""

from __future__ import annotations

from decant.protos import worker_pb2 as wire
from decant.worker.engine_host import EngineHost
from decant.worker.wire_codec import RequestRejected


def check_accepts(host: EngineHost, request: wire.EngineRequest, num_waiting: int) -> None:
    """Raise RequestRejected unless a new run may start now, behind ``num_waiting`` others."""
    if host.draining:
        raise rejected(wire.CAUSE_DRAINING, "this worker is draining")
    if not host.loop.is_healthy:
        raise rejected(wire.CAUSE_ENGINE, "the engine of this worker has stopped")
    if num_waiting >= host.max_waiting:
        raise rejected(wire.CAUSE_BUSY, f"at most {host.max_waiting} runs may wait")
    if request.HasField("remaining_ms") and not request.remaining_ms:
        raise rejected(wire.CAUSE_DEADLINE, "the deadline has passed")


def rejected(cause: wire.Cause, detail: str) -> RequestRejected:
    return RequestRejected(wire.Failure(cause=cause, detail=detail))
