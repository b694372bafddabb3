"""A decode worker between two routers, a prefill worker and a migration target.

routers a, b ── sessions ──> worker d ── fetches ──> worker p (prompts)
                                '─────── migrates ──> worker e (targets)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from decant.protos import worker_pb2 as wire
from tests.router.virtual_time import settle
from tests.worker.scenario import Scenario
from tests.worker.scheduled_router import Expected, RouterClient
from tests.worker.stepped_worker import LEASE_S, Node


class DecodeScenario(Scenario):
    def __init__(self) -> None:
        super().__init__()
        self.node = Node("d", self.nodes, self.network, 14)
        self.prefill = Node("p", self.nodes, self.network, 64)
        self.target = Node("e", self.nodes, self.network, 64)
        self.runs: dict[str, Expected] = {}
        self.routers = {name: RouterClient(name, self.node, self.runs) for name in "ab"}
        self.moves: set[asyncio.Task[None]] = set()

    async def begin(self) -> None:
        await super().begin()
        for router in self.routers.values():
            await router.open([])

    def router_of(self, run: Expected) -> RouterClient:
        return self.routers[run.owner]

    def pick(self, value: int, is_candidate: Callable[[Expected], object] = lambda _: True) -> Expected | None:
        runs = [run for run in self.runs.values() if is_candidate(run)]
        return runs[value % len(runs)] if runs else None

    def forget(self, run: Expected) -> None:
        if run.offer is not None and run.end is None:
            run.end = "dropped"  # it may have migrated: then no end is sent
        run.is_forgotten = True
        self.router_of(run).send(forget=wire.ForgetRuns(runs=[run.ref]))

    async def finish(self) -> None:
        self.end_faults()
        for router in self.routers.values():
            await router.open([run for run in self.runs.values() if run.owner == router.name and run.end is None])
        await self._until_ended(
            lambda: all(run.end for run in self.runs.values()) and all(move.done() for move in self.moves)
        )
        for run in list(self.runs.values())[::2]:  # the others are left to their timers
            self.router_of(run).send(forget=wire.ForgetRuns(runs=[run.ref]))
        await settle()
        for router in self.routers.values():
            await router.leave()
        await asyncio.sleep(2 * LEASE_S)
        await self._until_ended(lambda: not (self.node.decode.orphans or self.node.decode.ended_runs))
        await self.assert_empty(self.target, rounds=12)
        await self.close()

    async def close(self) -> None:
        await self.await_drain()
        closing = [asyncio.create_task(node.decode.close()) for node in self.nodes.values()]
        await settle()
        self.round()
        await asyncio.gather(*closing)
        for move in self.moves:
            move.result()
        await self.assert_closed()

    async def _until_ended(self, reached: Callable[[], bool]) -> None:
        await self.until(
            reached,
            lambda: (
                f"{[name for name, run in self.runs.items() if not run.end]} have no end; "
                f"the worker has {list(self.node.decode.runs())}"
            ),
        )
