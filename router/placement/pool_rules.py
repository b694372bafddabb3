"""How many workers each pool should have: the rules of `decant scale-advice` and of a router with --balance-pools.

usage of a pool        0 ------------- low ------ target ------- high ------ 1 ------>
                         one worker may       no change            workers are missing
                         leave, if the
                         others stay below low

The distance from low to high is the hysteresis: a worker that came because of `high` may leave again only after the
work has fallen by as much. A worker that has just moved counts as if it had always been there, but nothing else moves
for `settle_s`: its effect has yet to show.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from decant.protos import worker_pb2 as wire
from decant.router.placement.pool_demand import ROLES, PoolDemand

Demands = Mapping[wire.Role, PoolDemand]


@dataclass(frozen=True, slots=True)
class PoolRules:
    low: float = 0.55
    target: float = 0.7
    high: float = 0.85
    hold_s: float = 5.0
    """How long a reason for a move lasts before it is one."""
    settle_s: float = 30.0
    """Shortest time between two moves."""
    min_workers: int = 1
    """Workers that each pool keeps."""
    max_growth: float = 2.0
    """Times by which an advice makes a pool larger, at most."""


DEFAULT_RULES = PoolRules()


def wanted_workers(pool: PoolDemand, rules: PoolRules) -> int:
    """Number of workers that the demand of a pool needs; its present one while that is well enough."""
    needed = math.ceil(pool.demand / rules.target)
    if pool.usage > rules.high:
        return min(needed, max(1, math.floor(pool.workers * rules.max_growth)))
    if pool.workers > rules.min_workers and pool.usage_of(pool.workers - 1) < rules.low:
        return max(needed, rules.min_workers)
    return pool.workers


def growing_role(demands: Demands, rules: PoolRules) -> wire.Role | None:
    """Role to which a worker should move: that of a pool without reserve, while the other pool can spare one."""
    for role, other in (ROLES, ROLES[::-1]):
        giving = demands[other]
        is_spare = giving.workers > rules.min_workers and giving.usage_of(giving.workers - 1) < rules.low
        if demands[role].usage > rules.high and is_spare:
            return role
    return None


class MoveDecision:
    """Turns of `growing_role` into moves, one at a time."""

    def __init__(self, rules: PoolRules = DEFAULT_RULES) -> None:
        self._rules = rules
        self._role: wire.Role | None = None
        self._since = 0.0
        self._moved_at = -math.inf

    def decide(self, demands: Demands, now: float) -> wire.Role | None:
        """Return the role to which a worker should move now; then `mark_moved`, or nothing has happened."""
        role = growing_role(demands, self._rules)
        if role != self._role:
            self._role, self._since = role, now
        is_due = now - self._since >= self._rules.hold_s and now - self._moved_at >= self._rules.settle_s
        return role if is_due else None

    def mark_moved(self, now: float) -> None:
        self._moved_at = now
        self._role = None
