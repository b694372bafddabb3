"""What the load says about the sizes of the pools, from two readings of the workers' registrations."""

from __future__ import annotations

import json
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any

from decant.command import status
from decant.command.errors import CommandFailed
from decant.protos import worker_pb2 as wire
from decant.protos.state_pb2 import WorkerRegistration
from decant.router.placement.pool_demand import ROLES, DemandMeter, PoolDemand, Report
from decant.router.placement.pool_rules import DEFAULT_RULES, Demands, growing_role, wanted_workers
from decant.runtime.enum_names import enum_label
from decant.state.directory import DirectoryEntry


@dataclass(frozen=True)
class Advice:
    model: str
    demands: Demands

    @property
    def move_to(self) -> str | None:
        """Pool to which a worker of the other one could move."""
        role = growing_role(self.demands, DEFAULT_RULES)
        return None if role is None else enum_label(wire.Role, role)

    @property
    def line(self) -> str:
        parts = [_part(enum_label(wire.Role, role), self.demands[role]) for role in ROLES]
        if self.move_to is not None:
            parts.append(f"or move a worker to {self.move_to}")
        return f"{self.model}: {'; '.join(parts)}"

    def document(self) -> dict[str, Any]:
        pools = {enum_label(wire.Role, role): _pool_document(self.demands[role]) for role in ROLES}
        return {"model": self.model, **pools, "move_to": self.move_to, "advice": self.line}


def run(redis_url: str, seconds: float, *, as_json: bool) -> None:
    """Print the advice for each model, by the load of ``seconds``."""
    meters: dict[str, DemandMeter] = {}
    _observe(redis_url, meters)
    sleep(seconds)
    advices = _observe(redis_url, meters)
    if as_json:
        print(json.dumps({"models": [advice.document() for advice in advices]}))
        return
    for advice in advices:
        print(advice.line)


def _observe(redis_url: str, meters: dict[str, DemandMeter]) -> list[Advice]:
    workers, _ = status.directory(redis_url)
    if not workers.present:
        raise CommandFailed("no worker is registered: there is nothing to compare", status=2)
    now, by_model = monotonic(), dict[str, list[Report]]()
    for one in workers.present:
        by_model.setdefault(one.registration.model, []).append(_report(one, now))
    return [
        Advice(model, meters.setdefault(model, DemandMeter()).observe(reports))
        for model, reports in sorted(by_model.items())
    ]


def _report(one: DirectoryEntry[WorkerRegistration], now: float) -> Report:
    return Report(one.incarnation, one.load, one.registration.capacity.max_running, now - one.renewed_ago_s)


def _part(name: str, pool: PoolDemand) -> str:
    wanted = wanted_workers(pool, DEFAULT_RULES)
    change = wanted - pool.workers
    verdict = f"add {change}" if change > 0 else f"{-change} can go" if change else "enough"
    usage = f", {pool.usage:.0%} used" if pool.workers else ""
    return f"{name} {pool.workers} worker{'' if pool.workers == 1 else 's'}{usage}: {verdict}"


def _pool_document(pool: PoolDemand) -> dict[str, Any]:
    return {
        "workers": pool.workers,
        "demand": round(pool.demand, 3),
        "usage": round(pool.usage, 3) if pool.workers else None,
        "wanted": wanted_workers(pool, DEFAULT_RULES),
    }
