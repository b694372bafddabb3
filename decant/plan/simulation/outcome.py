from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from decant.plan.quantities import Slo, show_seconds
from decant.plan.simulation.simulation import Simulation


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles in seconds, by nearest rank; None without values."""

    p50: float | None
    p90: float | None
    p99: float | None

    def __str__(self) -> str:
        return " / ".join("-" if one is None else show_seconds(one) for one in (self.p50, self.p90, self.p99))


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a simulation: seconds, `placement_cpu` per request; a balance is the busiest worker over the mean."""

    requests: int
    seconds: float
    wait: Percentiles
    ttft: Percentiles
    tpot: Percentiles
    within_objectives: float
    prefill_use: float
    prefill_balance: float
    decode_balance: float
    cached_share: float
    placement_cpu: float


def outcome(simulation: Simulation, slo: Slo) -> Outcome:
    requests = simulation.requests
    first_arrival = requests[0].arrival
    busy = [worker.busy_seconds for worker in simulation.prefill_workers]
    computing = max(request.first_token for request in requests) - first_arrival
    met = sum(
        (slo.ttft is None or request.first_token - request.arrival <= slo.ttft)
        and (slo.tpot is None or not request.tpot > slo.tpot)
        for request in requests
    )
    return Outcome(
        requests=len(requests),
        seconds=max(request.end for request in requests) - first_arrival,
        wait=percentiles(request.prefill_began - request.arrival for request in requests),
        ttft=percentiles(request.first_token - request.arrival for request in requests),
        tpot=percentiles(request.tpot for request in requests if request.output_tokens > 1),
        within_objectives=met / len(requests),
        prefill_use=sum(busy) / len(busy) / computing,
        prefill_balance=_imbalance(busy),
        decode_balance=_imbalance([worker.taken for worker in simulation.decode_workers]),
        cached_share=sum(request.cached_tokens for request in requests)
        / sum(request.prompt_tokens for request in requests),
        placement_cpu=sum(router.placement_seconds for router in simulation.routers) / len(requests),
    )


def percentiles(values: Iterable[float]) -> Percentiles:
    ordered = sorted(values)
    if not ordered:
        return Percentiles(None, None, None)
    ranks = (math.ceil(share * len(ordered)) - 1 for share in (0.5, 0.9, 0.99))
    return Percentiles(*(ordered[rank] for rank in ranks))


def _imbalance(loads: Sequence[float]) -> float:
    mean = sum(loads) / len(loads)
    return max(loads) / mean if mean else 1.0
