from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decant.protos import worker_pb2 as wire
from decant.router.placement.policy import WorkerSnapshot
from decant.router.workers.waiting_line import CapacityKind, Waiter, WaitingLine, WaitsFor
from decant.state.ids import Incarnation
from decant.state.store import Store
from tests.router.fake_script import answer
from tests.router.fake_worker import FakeWorker, fleet
from tests.router.harness import Core, core, make_request, tokens_of, until, until_ended, until_written

P, P2 = ("p", wire.ROLE_PREFILL), ("p2", wire.ROLE_PREFILL)
D, D2 = ("d", wire.ROLE_DECODE), ("d2", wire.ROLE_DECODE)
PREFILL, TOKENS = CapacityKind(WaitsFor.PREFILL), CapacityKind(WaitsFor.FROM_TOKENS)
PROMPT = [1, 2, 3]


class CountedTurns:
    """Turns of the requests that join a line from now on."""

    def __init__(self, line: WaitingLine) -> None:
        self.count = 0
        self._line, self._add = line, line.add
        line.add = self.add  # type: ignore[method-assign]

    def add(self, waiter: Waiter) -> None:
        wake = waiter.wake

        def counted() -> None:
            self.count += self._line.is_turn_of(waiter)
            wake()

        waiter.wake = counted
        self._add(waiter)


@dataclass
class Harness:
    places: dict[CapacityKind, int]
    line: WaitingLine = field(default_factory=WaitingLine)
    placed: list[str] = field(default_factory=list)
    tries: int = 0

    def __post_init__(self) -> None:
        self.turns = CountedTurns(self.line)

    def join(self, name: str, order: float = 0.0, kind: CapacityKind = PREFILL) -> Waiter:
        turns: list[None] = []
        waiter = Waiter(order, kind, lambda: turns.append(None))
        waiter.name, waiter.turns = name, turns  # type: ignore[attr-defined]
        self.line.add(waiter)
        return waiter

    def open(self, kind: CapacityKind, places: int, *waiters: Waiter) -> None:
        self.places[kind] = self.places.get(kind, 0) + places
        self.line.open([kind])
        while awake := [waiter for waiter in waiters if waiter.turns]:  # type: ignore[attr-defined]
            (waiter,) = awake
            waiter.turns.clear()  # type: ignore[attr-defined]
            self.tries += 1
            if self.places.get(waiter.kind):
                self.places[waiter.kind] -= 1
                self.placed.append(waiter.name)  # type: ignore[attr-defined]
                self.line.remove(waiter)
            else:
                self.line.pass_turn(waiter)


@pytest.mark.slow
@given(st.integers(0, 12), st.integers(0, 12), st.randoms(use_true_random=False))
def test_n_free_slots_wake_n_requests_and_one_that_finds_none(waiting: int, places: int, draw: random.Random) -> None:
    harness = Harness({})
    orders = [float(draw.randrange(5)) for _ in range(waiting)]
    waiters = [harness.join(f"{place}", order) for place, order in enumerate(orders)]
    harness.open(PREFILL, places, *waiters)
    first = sorted(range(waiting), key=lambda place: (orders[place], place))
    assert harness.placed == [str(place) for place in first[:places]]
    assert harness.turns.count == harness.tries == min(waiting, places + 1)
    assert len(harness.line) == max(0, waiting - places)


def test_a_request_that_waits_for_another_capacity_blocks_no_other() -> None:
    harness = Harness({})
    first, second = harness.join("first", 1.0, TOKENS), harness.join("second", 2.0)
    harness.open(PREFILL, 1, first, second)
    assert harness.placed == ["second"]
    assert harness.line.kinds == (TOKENS,)


def test_of_several_available_kinds_the_first_in_order_goes_first() -> None:
    harness = Harness({})
    late, early = harness.join("late", 2.0), harness.join("early", 1.0, TOKENS)
    harness.places = {PREFILL: 1, TOKENS: 1}
    harness.line.open([PREFILL, TOKENS])
    harness.open(PREFILL, 0, late, early)
    assert harness.placed == ["early", "late"]


def test_a_request_that_leaves_at_its_turn_passes_it_on() -> None:
    harness = Harness({PREFILL: 1})
    leaving, next = harness.join("leaving"), harness.join("next")
    harness.line.open([PREFILL])
    assert harness.line.is_turn_of(leaving)
    harness.line.remove(leaving)
    harness.line.remove(leaving)
    assert harness.line.is_turn_of(next)
    harness.open(PREFILL, 0, next)
    assert harness.placed == ["next"]
    assert not harness.line


def test_a_request_that_leaves_the_queue_changes_no_order() -> None:
    harness = Harness({PREFILL: 1})
    first, leaving = harness.join("first"), harness.join("leaving")
    harness.line.open([PREFILL])
    harness.line.remove(leaving)
    assert harness.line.is_turn_of(first)
    harness.line.pass_turn(leaving)
    assert harness.line.is_turn_of(first)


# ------------------------------------------------------------------------------------ over scripted workers


async def waiting(harness: Core, workers: list[FakeWorker], count: int) -> tuple[WaitingLine, CountedTurns]:
    for worker in workers:
        worker.load.takes_prompts = False
    views = [worker.load for worker in harness.router.pool.of("m") if worker.load.role == wire.ROLE_PREFILL]
    await until(lambda: not any(view.takes_prompts for view in views))
    line = harness.router.pool.waiting_lines["m"]
    turns = CountedTurns(line)
    for place in range(count):
        await harness.requests.begin(make_request(f"r{place}"))
    await until(lambda: len(line) == count)
    return line, turns


async def heartbeats(harness: Core, count: int) -> None:
    received = dict.fromkeys((worker.incarnation for worker in harness.router.pool.of("m")), 0)
    for worker in harness.router.pool.of("m"):
        apply = worker.load.apply_heartbeat

        def counted(
            heartbeat: wire.Heartbeat,
            incarnation: Incarnation = worker.incarnation,
            apply: Callable[[wire.Heartbeat], None] = apply,
        ) -> None:
            received[incarnation] += 1
            apply(heartbeat)

        worker.load.apply_heartbeat = counted  # type: ignore[method-assign]
    await until(lambda: min(received.values()) >= count)


@pytest.mark.slow
async def test_a_heartbeat_of_a_worker_that_takes_nothing_wakes_no_request(store: Store) -> None:
    async with fleet(P, P2, D, D2) as workers, core(store, workers) as harness:
        line, turns = await waiting(harness, workers[:2], 20)
        before = turns.count
        await heartbeats(harness, 4)
        assert turns.count == before
        workers[0].load.takes_prompts = True
        await until(lambda: not line)
        assert turns.count - before == 20


@pytest.mark.slow
async def test_a_refusal_ends_the_turns_and_the_refused_is_first_again(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers) as harness:
        line, turns = await waiting(harness, workers[:1], 5)
        before = turns.count
        workers[0].script.refuse = [wire.CAUSE_BUSY]
        workers[0].load.takes_prompts = True
        await until(lambda: not line)
        streams = [await harness.requests.begin(make_request(f"r{place}")) for place in range(5)]
        for stream in streams:
            assert tokens_of(await until_ended(stream)) == answer(PROMPT, 5)
        assert turns.count - before <= 2 * 5 + 2


async def test_the_urgent_are_placed_first_whenever_they_came(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers) as harness:
        line, _ = await waiting(harness, workers[:1], 3)
        urgent = make_request("urgent")
        urgent.engine_request.priority = 1000
        await harness.requests.begin(urgent)
        await until(lambda: len(line) == 4)
        workers[0].load.takes_prompts = True
        await until(lambda: len(workers[0].prefills) == 4)
        ids = [request.run.request.rpartition("/")[2] for request in workers[0].prefills]
        assert ids == ["urgent", "r0", "r1", "r2"]


@pytest.mark.slow
async def test_a_draining_worker_that_no_other_can_relieve_costs_no_placement(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(D) as workers, core(store, workers) as harness:
        workers[0].script.pause_at = 2
        streams = [await harness.requests.begin(make_request(f"r{place}")) for place in range(5)]
        for stream in streams:
            await until_written(stream, 2)
        placements = 0

        def snapshot(*_: object) -> list[WorkerSnapshot]:
            nonlocal placements
            placements += 1
            return []

        monkeypatch.setattr(harness.router.pool, "snapshot", snapshot)
        workers[0].load.draining = True
        await heartbeats(harness, 4)
        assert not placements
        monkeypatch.undo()
        workers[0].load.draining = False
        workers[0].go.set()
        for stream in streams:
            assert tokens_of(await until_ended(stream)) == answer(PROMPT, 5)


async def test_a_request_cancelled_at_its_turn_blocks_no_other(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers) as harness:
        line, _ = await waiting(harness, workers[:1], 4)
        line.open(line.kinds)
        await asyncio.gather(*(harness.requests.cancel(make_request(f"r{place}").key) for place in (0, 2)))
        workers[0].load.takes_prompts = True
        await until(lambda: not line)
        for place in (1, 3):
            assert tokens_of(await until_ended(await harness.requests.begin(make_request(f"r{place}")))) == answer(
                PROMPT, 5
            )
