"""A decode worker between two routers, a prefill worker and a migration target, and what must be left at the end.

routers a, b ── sessions ──> worker d ── fetches ──> worker p (prompts)
                                '─────── migrates ──> worker e (targets)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from decant.engine.engine import Engine
from decant.protos import worker_pb2 as wire
from tests.router.virtual_time import settle
from tests.worker.scheduled_router import Expected, RouterClient
from tests.worker.stepped_worker import LEASE_S, Network, Node

ROUNDS = 400
"""Rounds of engine steps in which every request must end once no fault is left."""


class Trial:
    """Three workers, two routers, and the invariants of all that happens between them."""

    def __init__(self) -> None:
        self.network = Network()
        self.network.flows.set()
        self.nodes: dict[str, Node] = {}
        self.node = Node("d", self.nodes, self.network, 14)
        self.prefill = Node("p", self.nodes, self.network, 64)
        self.target = Node("e", self.nodes, self.network, 64)
        self.runs: dict[str, Expected] = {}
        self.routers = {name: RouterClient(name, self.node, self.runs) for name in "ab"}
        self.moves: set[asyncio.Task[None]] = set()
        self.drain: asyncio.Task[None] | None = None
        self.complaints: list[dict[str, Any]] = []

    async def begin(self) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: self.complaints.append(context))
        for node in self.nodes.values():
            await node.host.__aenter__()
        for router in self.routers.values():
            await router.open([])

    def router_of(self, run: Expected) -> RouterClient:
        return self.routers[run.owner]

    def pick(self, value: int) -> Expected | None:
        runs = list(self.runs.values())
        return runs[value % len(runs)] if runs else None

    def forget(self, run: Expected) -> None:
        if run.offer is not None and run.end is None:
            run.end = "dropped"  # it may have migrated: then no end is sent
        run.is_forgotten = True
        self.router_of(run).send(forget=wire.ForgetRuns(runs=[run.ref]))

    def round(self) -> None:
        for node in self.nodes.values():
            node.loop.turn()
            node.loop.deliver_all()

    # -- the end ------------------------------------------------------------------------------------------------

    async def finish(self) -> None:
        """No more faults: each run ends for its owner, and then nothing of it is left."""
        self.network.breaks = self.network.loses_releases = False
        self.network.flows.set()
        for router in self.routers.values():
            await router.open([run for run in self.runs.values() if run.owner == router.name and run.end is None])
        await self._until(lambda: all(run.end for run in self.runs.values()) and all(m.done() for m in self.moves))
        for run in list(self.runs.values())[::2]:  # the others are left to their timers
            self.router_of(run).send(forget=wire.ForgetRuns(runs=[run.ref]))
        await settle()
        for router in self.routers.values():
            await router.leave()
        for name in [*self.target.engine.sequences, *self.target.engine.transfers.arrivals]:
            self.target.host.loop.post(partial(Engine.cancel, id=name))
        await asyncio.sleep(2 * LEASE_S)
        await self._until(lambda: not (self.node.decode.orphans or self.node.decode.unretired))
        await asyncio.sleep(2 * LEASE_S)
        for _ in range(12):
            self.round()
            await settle()
        for node in self.nodes.values():
            node.assert_empty()
        await self.close()

    async def close(self) -> None:
        if self.drain is not None:
            async with asyncio.timeout(10):
                await self.drain
        closing = [asyncio.create_task(node.decode.close()) for node in self.nodes.values()]
        await settle()
        self.round()
        await asyncio.gather(*closing)
        for move in self.moves:
            move.result()
        for node in self.nodes.values():
            await node.host.__aexit__(None, None, None)
        await settle()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert not self.complaints

    async def _until(self, reached: Callable[[], bool]) -> None:
        for _ in range(ROUNDS):
            if reached():
                return
            self.round()
            await asyncio.sleep(0.05)
        unfinished = [name for name, run in self.runs.items() if not run.end]
        raise AssertionError(f"{unfinished} have no end; the worker has {list(self.node.decode.runs())}")
