from __future__ import annotations

from dataclasses import dataclass

from decant.plan.quantities import Lengths
from decant.plan.recorded_workload import Trace


@dataclass(frozen=True, slots=True)
class Workload:
    """`rate` in requests/s; `quantile` of them have to meet the TTFT objective. `trace`: recorded requests, if rate and
    lengths are theirs.
    """

    prompt: Lengths
    output: Lengths
    rate: float = 1.0
    quantile: float = 0.99
    trace: Trace | None = None

    @property
    def longest(self) -> int:
        """Tokens."""
        return self.trace.longest if self.trace else self.prompt.high + self.output.high

    @property
    def context(self) -> float:
        """Mean over time: a long output is running for longer."""
        return self.prompt.mean + self.output.mean_square / self.output.mean / 2
