"""Routers, workers and connections are real; their demands are fixed."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import pytest

from decant.protos import worker_pb2 as wire
from decant.router.placement.pool_demand import PoolDemand, Report
from decant.router.placement.pool_rules import DEFAULT_RULES
from decant.router.placement.worker_rates import WorkerRates
from decant.router.workers.pool_balancer import PoolBalancer
from decant.state.ids import Incarnation
from decant.state.store import Store, StoreSettings
from tests.router.harness import until, until_written
from tests.router.migration_harness import Harness, moving
from tests.router.test_migration import checked
from tests.worker.harness import MODEL

PREFILL, DECODE = wire.ROLE_PREFILL, wire.ROLE_DECODE
HOT, IDLE = 9.0, 0.0


class FixedDemand:
    def __init__(self, prefill: float, decode: float) -> None:
        self.by_role = {PREFILL: prefill, DECODE: decode}
        self.seen: list[Report] = []

    def observe(self, reports: Collection[Report]) -> Mapping[wire.Role, PoolDemand]:
        self.seen = list(reports)
        sizes = {role: sum(one.load.role == role for one in reports) for role in self.by_role}
        return {role: PoolDemand(sizes[role], demand) for role, demand in self.by_role.items()}


def balancer(harness: Harness, store: Store, name: str, demand: FixedDemand) -> PoolBalancer:
    made = PoolBalancer(harness.core.router.pool, store.pool_moves, Incarnation(name, 1))
    made._meters = {MODEL: demand}  # type: ignore[dict-item]
    return made


def roles(harness: Harness) -> dict[str, wire.Role]:
    return {name: one.host.role for name, one in harness.workers.items()}


async def reported(harness: Harness) -> None:
    """Wait until the router has the roles of the workers from heartbeats."""
    pool = harness.core.router.pool
    await until(
        lambda: (
            all(one.reported_at for one in pool.of(MODEL))
            and {one.incarnation.id: one.load.role for one in pool.of(MODEL)} == roles(harness)
        )
    )


@pytest.mark.slow
async def test_of_two_routers_one_moves_one_worker_while_its_requests_go_on(store: Store) -> None:
    async with moving(store, decode="de", prefill="pq") as harness:
        begun = [await harness.begin(number) for number in range(3)]
        await until_written(begun[0][0], 3)
        await reported(harness)
        balancers = [balancer(harness, store, name, FixedDemand(IDLE, HOT)) for name in ("r1", "r2")]
        for now in (0.0, DEFAULT_RULES.hold_s, DEFAULT_RULES.hold_s + 1):
            for one in balancers:
                await one.look(MODEL, now)
        await until(lambda: sum(role == DECODE for role in roles(harness).values()) == 3)
        await reported(harness)
        for one in balancers:
            await one.look(MODEL, 2 * DEFAULT_RULES.hold_s)
        for stream, expected in begun:
            await checked(stream, expected)
        assert sorted(roles(harness).values()) == [PREFILL, DECODE, DECODE, DECODE]


@pytest.mark.slow
async def test_the_worker_with_the_fewest_sequences_moves(store: Store) -> None:
    async with moving(store, decode="de") as harness:
        stream, expected = await harness.begin(1)
        await until_written(stream, 3)
        await reported(harness)
        demand = FixedDemand(HOT, IDLE)
        one = balancer(harness, store, "r1", demand)
        for now in (0.0, DEFAULT_RULES.hold_s):
            await one.look(MODEL, now)
        assert {each.incarnation.id for each in demand.seen} == {"d", "e"}
        (idle,) = {"d", "e"} - {harness.at(stream)}
        await until(lambda: harness.workers[idle].host.role == PREFILL)
        await checked(stream, expected)


@pytest.mark.slow
async def test_sequences_of_a_crowded_worker_move_to_an_idle_one_in_one_attempt(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WorkerRates, "step_s_per_sequence", 1.0)
    async with moving(store, decode="de", blocks=1024) as harness:
        harness.drain("e")
        await until(lambda: any(one.load.is_draining for one in harness.core.router.pool.of(MODEL)))
        begun = [await harness.begin(number, wanted=300) for number in range(4)]
        for stream, _ in begun:
            await until_written(stream, 3)
        assert harness.runs("d") == 4
        harness.workers["e"].host.draining = False
        await until(lambda: not any(one.load.is_draining for one in harness.core.router.pool.of(MODEL)))
        for name in ("r1", "r2"):
            await balancer(harness, store, name, FixedDemand(IDLE, IDLE)).spread(MODEL)
        await until(lambda: sorted(harness.at(stream) for stream, _ in begun) == ["d"] * 2 + ["e"] * 2)
        for one in harness.workers.values():
            one.device.step_s = 0.0
        for stream, expected in begun:
            await checked(stream, expected)


async def test_without_redis_no_worker_moves(store: Store) -> None:
    async with moving(store, decode="de") as harness:
        await reported(harness)
        async with Store(StoreSettings("redis://127.0.0.1:1")) as away:
            one = balancer(harness, away, "r1", FixedDemand(HOT, IDLE))
            for now in (0.0, DEFAULT_RULES.hold_s):
                await one.look(MODEL, now)
        assert set(roles(harness).values()) == {DECODE}
