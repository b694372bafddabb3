from __future__ import annotations

from decant.protos import worker_pb2 as wire
from decant.router.timings import WorkerTimings
from decant.runtime.connections.heartbeat import HeartbeatMonitor

STUCK_STEPS = 8


class StuckStepDetector:
    def __init__(self, timings: WorkerTimings) -> None:
        self._timings = timings
        self.is_stuck = False
        """New requests go elsewhere."""
        self.is_lost = False
        """Running requests go elsewhere too."""

    def update(self, heartbeat: wire.Heartbeat) -> None:
        self.is_stuck = self._is_older_than(self._timings.stuck_ms, heartbeat)
        self.is_lost = self._is_older_than(self._timings.lost_ms, heartbeat)

    def _is_older_than(self, ms: int, heartbeat: wire.Heartbeat) -> bool:
        limit_ms = max(ms, STUCK_STEPS * heartbeat.longest_step_ms)
        return heartbeat.HasField("step_age_ms") and heartbeat.step_age_ms > limit_ms


class Liveness:
    """Signs of life of a worker on one connection."""

    def __init__(self, timings: WorkerTimings) -> None:
        self.messages = HeartbeatMonitor(timings.heartbeat_s)
        self.step = StuckStepDetector(timings)

    @property
    def is_healthy(self) -> bool:
        return not (self.step.is_stuck or self.messages.is_suspect)

    def on_message(self, message: wire.WorkerMessage) -> None:
        self.messages.reset()
        if message.HasField("heartbeat"):
            self.step.update(message.heartbeat)
