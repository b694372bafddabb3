"""States of a process.

starting -> loading 40 % -> warming up -> ready -> draining
                                            '-- ended: lost 3 s ago; restarted: lost 3 s ago, loading 40 %
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

STARTING, LOADING, WARMING_UP, READY, DRAINING, LOST = (
    "starting",
    "loading",
    "warming up",
    "ready",
    "draining",
    "lost",
)


@dataclass(frozen=True)
class Process:
    """Process of a deployment; `lost_at` is its unexpected end in wall clock seconds, None once it is ready again."""

    pid: int
    state: str = STARTING
    percent: int | None = None
    lost_at: float | None = None
    admin_port: int | None = None

    @property
    def is_ready(self) -> bool:
        return self.state == READY

    def describe(self, now: float | None = None) -> str:
        state = self.state if self.percent is None else f"{self.state} {self.percent} %"
        if self.lost_at is None or self.is_ready:
            return state
        ago = lost_ago((time.time() if now is None else now) - self.lost_at)
        return ago if self.state == LOST else f"{ago}, {state}"


def lost_ago(seconds: float) -> str:
    return f"lost {max(0, round(seconds))} s ago"


def describe_unready(processes: Mapping[str, Process]) -> str:
    return ", ".join(f"{name} ({one.describe()})" for name, one in processes.items() if not one.is_ready)
