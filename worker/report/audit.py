"""Accounts for every block of a worker, for the Admin service.

The pool is read between two steps, the services' runs before and after it. A run that begins or ends meanwhile
is in one of the two, so a block without an owner is a violation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from decant.engine.engine import Engine
from decant.engine.exports import lease_owner
from decant.handoff.leases import Lease
from decant.protos import worker_pb2 as wire
from decant.worker.engine_host import EngineHost
from decant.worker.health_trial import TRIAL

RunRow = tuple[wire.Run, int, wire.RunStatus.Phase, str]
"""Run, output, phase, sequence id."""


class HasRuns(Protocol):
    def runs(self) -> Iterable[RunRow]: ...


class Decodes(HasRuns, Protocol):
    @property
    def sessions(self) -> int: ...
    @property
    def fetches_receiving(self) -> int: ...
    @property
    def orphans(self) -> int: ...
    @property
    def cancel_tombstones(self) -> int: ...
    @property
    def ended_runs(self) -> int: ...


@dataclass(frozen=True, slots=True)
class _PoolMap:
    blocks_by_owner: Mapping[str, list[int]]
    free: int
    cached: int
    violations: list[str]

    def blocks(self, *owners: str) -> set[int]:
        return {block for owner in owners for block in self.blocks_by_owner.get(owner, ())}


class _Tables(NamedTuple):
    runs: dict[str, RunRow]
    leases: list[Lease]


class Auditor:
    def __init__(self, host: EngineHost, prefill: HasRuns, decode: Decodes) -> None:
        self._host = host
        self._prefill = prefill
        self._decode = decode

    def num_runs(self) -> int:
        """Number of runs that have not been forgotten; one with several outputs counts once."""
        rows = (*self._prefill.runs(), *self._decode.runs())
        return len({(run.request, run.epoch, run.attempt) for run, *_ in rows})

    async def audit(self) -> wire.AuditResponse:
        before = self._tables()
        pool = await self._host.loop.call(_sample)
        after = self._tables()
        answer = self._account(before, after, pool)
        answer.violations.extend([*pool.violations, *_unaccounted(answer, pool, {**before.runs, **after.runs})])
        return answer

    def _tables(self) -> _Tables:
        rows = (*self._prefill.runs(), *self._decode.runs())
        return _Tables({row[3]: row for row in rows}, self._host.sender.leases.all())

    def _account(self, before: _Tables, after: _Tables, pool: _PoolMap) -> wire.AuditResponse:
        host, now = self._host, asyncio.get_running_loop().time()
        ticketed = {lease.sequence for lease in (*before.leases, *after.leases)}
        exported = {owner for owner in pool.blocks_by_owner if owner.startswith(lease_owner(""))}
        leased = pool.blocks(*ticketed, *exported)
        answer = wire.AuditResponse(
            worker=host.peer,
            role=host.role,
            block_bytes=host.transfer_layout.block_bytes,
            total_blocks=host.total_blocks,
            free_blocks=pool.free,
            cached_blocks=pool.cached,
            leased_blocks=len(leased),
            owned_blocks=len(pool.blocks(*pool.blocks_by_owner) - leased),
            sessions=self._decode.sessions,
            fetches=self._decode.fetches_receiving + sum(lease.is_opened for lease in after.leases),
            orphans=self._decode.orphans,
            cancel_tombstones=self._decode.cancel_tombstones,
            ended_runs=self._decode.ended_runs,
        )
        for name, (run, output, phase, _) in {**before.runs, **after.runs}.items():
            blocks = len(pool.blocks(name))
            if blocks or (name in after.runs and phase != wire.RunStatus.PHASE_ENDED):
                answer.owners.add(run=run, output=output, phase=phase, blocks=blocks)
        for lease in after.leases:
            ticket, holders = lease.ticket, (lease.sequence, lease_owner(lease.sequence))
            answer.leases.add(
                ticket=ticket.id,
                run=ticket.run,
                receiver=lease.receiver,
                blocks=len(pool.blocks(*holders)),
                remaining_ms=lease.remaining_ms(now),
            )
        return answer


def _sample(engine: Engine) -> _PoolMap:
    violations = []
    try:
        engine.check_integrity()
    except AssertionError as error:
        violations.append(str(error))
    blocks = engine.pool
    return _PoolMap(blocks.held_by(), blocks.free_blocks, blocks.cached_blocks, violations)


def _unaccounted(answer: wire.AuditResponse, pool: _PoolMap, runs: Mapping[str, RunRow]) -> Iterable[str]:
    parts = answer.free_blocks + answer.cached_blocks + answer.owned_blocks + answer.leased_blocks
    if parts != answer.total_blocks:
        yield f"{parts} of {answer.total_blocks} blocks are accounted for"
    for owner, blocks in pool.blocks_by_owner.items():
        if owner not in runs and owner != TRIAL and not owner.startswith(lease_owner("")):
            yield f"{len(blocks)} blocks are held for {owner}, which is no run's sequence"
