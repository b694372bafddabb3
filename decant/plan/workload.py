"""What a deployment is planned for."""

from __future__ import annotations

from dataclasses import dataclass

from decant.plan.quantities import Lengths
from decant.plan.recorded_workload import Trace


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests per second, their lengths, and the share of them that has to meet the TTFT objective. `trace`: the
    requests that rate and lengths are of, if they are recorded ones."""

    prompt: Lengths
    output: Lengths
    rate: float = 1.0
    quantile: float = 0.99
    trace: Trace | None = None

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.trace.longest if self.trace else self.prompt.high + self.output.high

    @property
    def context(self) -> float:
        """Mean context of a running sequence; a long output is running for longer."""
        return self.prompt.mean + self.output.mean_square / self.output.mean / 2
