from __future__ import annotations

from dataclasses import dataclass

from decant.plan.quantities import Lengths
from decant.plan.recorded_workload import Trace


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests to plan for, `rate` per second, of which `quantile` have to keep the TTFT objective.

    `trace` is given if the lengths are recorded ones; its arrivals are scaled to `rate`.
    """

    prompt: Lengths
    output: Lengths
    rate: float = 1.0
    quantile: float = 0.99
    trace: Trace | None = None

    @property
    def longest(self) -> int:
        return self.trace.longest if self.trace else self.prompt.high + self.output.high

    @property
    def context(self) -> float:
        """Mean context of a running sequence over time: a long output runs for longer."""
        return self.prompt.mean + self.output.mean_square / self.output.mean / 2
