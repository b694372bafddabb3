"""Moves workers between the two pools of each model, as `pool_rules` say, by changing their roles; and running
sequences between decode workers, as `batch_rules` say, by the handoff of a drain.

Every router sees the same loads. The one that claims a move in Redis first makes it; while Redis is unavailable none
does.
"""

from __future__ import annotations

import asyncio

from decant.protos import worker_pb2 as wire
from decant.router.placement.batch_rules import BatchMove
from decant.router.placement.pool_demand import DemandMeter, Report
from decant.router.placement.pool_rules import DEFAULT_RULES, Demands, MoveDecision, PoolRules
from decant.router.workers.pool import WorkerPool
from decant.router.workers.worker_handle import WorkerHandle
from decant.runtime.enum_names import enum_label
from decant.runtime.telemetry import logs
from decant.state.errors import StateError
from decant.state.ids import Incarnation
from decant.state.pool_moves import PoolMoves

LOOK_EVERY_S = 1.0
SPREAD_EVERY_S = 5.0
"""Shortest time between two moves of sequences: the first ones have arrived, and the loads show it."""

_log = logs.get(__name__)


class PoolBalancer:
    def __init__(
        self, pool: WorkerPool, moves: PoolMoves, router: Incarnation, rules: PoolRules = DEFAULT_RULES
    ) -> None:
        self._pool = pool
        self._moves = moves
        self._router = router
        self._rules = rules
        self._meters = {model: DemandMeter() for model in pool.costs}
        self._decisions = {model: MoveDecision(rules) for model in pool.costs}

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            for model in self._meters:
                await self.look(model, asyncio.get_running_loop().time())
                await self.spread(model)

    async def look(self, model: str, now: float) -> None:
        """Observe the workers of a model, and move one of them if that is due."""
        workers = [worker for worker in self._pool.of(model) if worker.is_usable]
        demands = self._meters[model].observe([_report(worker) for worker in workers if worker.reported_at])
        decision = self._decisions[model]
        role = decision.decide(demands, now)
        if role is None:
            return
        try:
            is_mine = await self._moves.claim(model, "workers", self._router, self._rules.settle_s)
        except StateError:  # the registration logs that the store is unavailable
            return
        decision.mark_moved(now)  # by this router or another one
        if is_mine:
            self._move(workers, role, demands)

    async def spread(self, model: str) -> None:
        """Let sequences of this router move from the largest batch of a model to the smallest, if that is worth it."""
        decode = [one for one in self._pool.of(model) if one.is_usable and one.load.role != wire.ROLE_PREFILL]
        if len(decode) < 2:
            return
        crowded = max(decode, key=lambda one: one.load.sequences.value)
        idle = min(decode, key=lambda one: one.load.sequences.value)
        step_s = crowded.rates.step_s_per_sequence
        move = BatchMove(crowded.load.sequences.value, idle.load.sequences.value, step_s)
        if not move.count or not crowded.load.sequences.own:
            return
        try:
            is_mine = await self._moves.claim(model, "sequences", self._router, SPREAD_EVERY_S)
        except StateError:
            return
        costs = self._pool.costs[model]
        if is_mine and (
            moved := crowded.session.move_away(
                move.count, lambda tokens, steps: move.is_worth(steps, costs.transfer_s(tokens))
            )
        ):
            _log.info("sequences leave a crowded worker", worker=crowded.incarnation.id, sequences=moved)

    def _move(self, workers: list[WorkerHandle], role: wire.Role, demands: Demands) -> None:
        candidates = [worker for worker in workers if worker.load.role != role and worker.is_usable]
        if len(candidates) <= self._rules.min_workers:
            return  # one has left since
        worker = min(candidates, key=lambda one: (one.load.sequences.value, one.load.queued_tokens.value))
        usages = {enum_label(wire.Role, each): round(demand.usage, 2) for each, demand in demands.items()}
        _log.info("worker changes pools", worker=worker.incarnation.id, role=enum_label(wire.Role, role), usage=usages)
        worker.session.set_role(role)


def _report(worker: WorkerHandle) -> Report:
    return Report(
        worker.incarnation, worker.load.reported, worker.registration.capacity.max_running, worker.reported_at
    )
