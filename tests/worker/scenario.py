from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from decant.engine.engine import Engine
from tests.router.virtual_time import settle
from tests.worker.stepped_worker import LEASE_S, Network, Node

ROUNDS = 400
"""Rounds within which everything must end without faults."""


class Scenario:
    def __init__(self) -> None:
        self.network = Network()
        self.network.flows.set()
        self.nodes: dict[str, Node] = {}
        self.drain: asyncio.Task[None] | None = None
        self.uncaught_exceptions: list[dict[str, Any]] = []
        """Uncaught exceptions of the event loop."""

    async def begin(self) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: self.uncaught_exceptions.append(context))
        for node in self.nodes.values():
            await node.host.__aenter__()

    def round(self) -> None:
        for node in self.nodes.values():
            node.loop.turn()
            node.loop.deliver_all()

    def end_faults(self) -> None:
        self.network.breaks = self.network.loses_releases = False
        self.network.flows.set()

    async def until(self, reached: Callable[[], bool], missing: Callable[[], str]) -> None:
        """Play rounds until ``reached``; fail with ``missing`` after ROUNDS."""
        for _ in range(ROUNDS):
            if reached():
                return
            self.round()
            await asyncio.sleep(0.05)
        raise AssertionError(missing())

    async def assert_empty(self, target: Node, rounds: int) -> None:
        """Cancel what ``target`` received; require that no node keeps anything once the leases are over."""
        for name in [*target.engine.sequences, *target.engine.transfers.arrivals]:
            target.host.loop.post(partial(Engine.cancel, id=name))
        await asyncio.sleep(2 * LEASE_S)
        for _ in range(rounds):
            self.round()
            await settle()
        for node in self.nodes.values():
            node.assert_empty()

    async def await_drain(self) -> None:
        if self.drain is not None:
            async with asyncio.timeout(10):
                await self.drain

    async def assert_closed(self) -> None:
        for node in self.nodes.values():
            await node.host.__aexit__(None, None, None)
        await settle()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert not self.uncaught_exceptions
