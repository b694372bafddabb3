"""Routers, workers and connections are real, engines are fake with real bytes: a wrong cache would change the text."""

from __future__ import annotations

import asyncio
import random
from functools import partial

import pytest

from decant.engine.engine import Engine
from decant.engine.request import Request, StopParams
from decant.engine.transfer import IncomingSequence
from decant.handoff.leases import Lease
from decant.protos import worker_pb2 as wire
from decant.protos import worker_pb2_grpc as services
from decant.router.request.output import Finish
from decant.router.request.token_stream import TokenStream
from decant.runtime.errors import Cancelled, DeadlineExceeded
from decant.state.store import Store
from tests.e2e.proxy import FETCH, RELEASE, SESSION, TO_CALLER, TO_WORKER, Cut, Direction
from tests.router.harness import jump, until, until_ended, until_written
from tests.router.migration_harness import KINDS, LONG_KINDS, SLOW_STEP_S, WANTED, moving
from tests.worker.answer_kinds import PLAIN
from tests.worker.harness import MODEL, WorkerHarness
from tests.worker.waiting import PATIENCE


async def checked(stream: TokenStream, expected: list[int], attempts: int = 1) -> None:
    await until_ended(stream)
    assert isinstance(stream.end, Finish), stream.end
    assert stream.outputs[0].tokens == expected
    assert stream.trace.attempts == attempts


@pytest.mark.rule(
    "drain-migrates",
    "worker/decode/migration.py:MigrationSource.issue_ticket",
    "handoff/outgoing_sequence.py:OutgoingSequence.commit",
    "router/attempt/migration.py:Migration.move",
)
@pytest.mark.slow
async def test_a_drained_worker_is_empty_while_its_outputs_continue_elsewhere(store: Store) -> None:
    async with moving(store, step_s=SLOW_STEP_S) as harness:
        begun = [await harness.begin(number, wanted=200) for number in range(4)]
        for stream, _ in begun:
            await until_written(stream, 3)
        leaving = next(name for name in "de" if harness.runs(name))
        other = "ed"["de".index(leaving)]
        harness.drain(leaving)
        await harness.emptied(leaving)
        assert all(stream.end is None for stream, _ in begun)
        assert {harness.at(stream) for stream, _ in begun} == {other}
        harness.workers[other].device.step_s = 0.0
        for stream, expected in begun:
            await checked(stream, expected)
            assert len(stream.outputs[0].tokens) == 200


@pytest.mark.slow
@pytest.mark.parametrize("prefill", ["", "p"], ids=["from tokens", "handed over"])
async def test_the_text_is_the_same_at_any_instant_of_a_drain(store: Store, prefill: str) -> None:
    rng = random.Random(5)
    moved = 0
    kinds = KINDS if prefill else KINDS[::-1]
    for at in range(0, WANTED, 12):
        async with moving(store, prefill=prefill) as harness:
            three = [kinds[(at // 4 + number) % len(kinds)] for number in range(3)]
            begun = [
                await harness.begin(4 * at + number, length=rng.randint(1, 90), kind=kind)
                for number, kind in enumerate((PLAIN, *three))
            ]
            await until_written(begun[0][0], at) if at else None
            leaving = rng.choice("de")
            there = [stream for stream, _ in begun if harness.at(stream) == leaving]
            harness.drain(leaving)
            harness.workers[leaving].device.step_s = SLOW_STEP_S
            for stream, expected in begun:
                await checked(stream, expected)
            moved += sum(harness.at(stream) != leaving for stream in there)
    assert moved


async def test_without_a_target_a_run_ends_on_the_draining_worker(store: Store) -> None:
    async with moving(store, decode="d") as harness:
        stream, expected = await harness.begin(1)
        await until_written(stream, 3)
        harness.drain("d")
        await checked(stream, expected)
        assert harness.at(stream) == "d"


async def test_a_worker_that_an_administrator_drained_takes_runs_again_once_it_is_put_back(store: Store) -> None:
    async with moving(store) as harness:
        stream, expected = await harness.begin(1, wanted=200)
        await until_written(stream, 3)
        first = harness.at(stream)
        peer, admin = harness.workers[first].host.peer, services.AdminStub(harness.workers[first].channel)
        async with asyncio.timeout(PATIENCE):
            while (await admin.Drain(wire.DrainRequest(worker=peer))).runs:  # noqa: ASYNC110 - as the command does
                await asyncio.sleep(0.02)
        assert (stream.end, harness.at(stream)) == (None, "ed"["de".index(first)])
        await admin.Undrain(wire.UndrainRequest(worker=peer))
        harness.drain(harness.at(stream))
        await harness.hurry_away_from(stream, harness.at(stream))
        await checked(stream, expected)
        assert harness.at(stream) == first


@pytest.mark.slow
async def test_a_change_of_roles_under_load_moves_new_requests_alone(store: Store) -> None:
    async with moving(store, decode="d", prefill="p") as harness:
        before = [await harness.begin(number, length=60) for number in range(6)]
        await until_written(before[0][0], 3)
        for name, role in (("d", wire.ROLE_PREFILL), ("p", wire.ROLE_DECODE)):
            there = harness.workers[name]
            request = wire.SetRoleRequest(worker=there.host.peer, role=role)
            await services.AdminStub(there.channel).SetRole(request)
        roles = {"d": wire.ROLE_PREFILL, "p": wire.ROLE_DECODE}
        pool = harness.core.router.pool
        await until(lambda: {worker.incarnation.id: worker.load.role for worker in pool.of(MODEL)} == roles)
        after = [await harness.begin(number, length=60) for number in range(6, 9)]
        for stream, expected in (*before, *after):
            await checked(stream, expected)
        assert {(stream.trace.prefill_worker, harness.at(stream)) for stream, _ in after} == {("d", "p")}
        assert before[0][0].trace.prefill_worker == "p", "and it was not begun again"


@pytest.mark.slow
async def test_a_run_migrates_twice_when_two_workers_drain_in_turn(store: Store) -> None:
    async with moving(store, decode="def") as harness:
        stream, expected = await harness.begin(1, wanted=200)
        await until_written(stream, 3)
        first = harness.at(stream)
        harness.drain(first)
        await until(lambda: harness.at(stream) != first)
        second = harness.at(stream)
        harness.drain(second)
        await harness.emptied(second)
        (last,) = set("def") - {first, second}
        assert stream.end is None
        await checked(stream, expected)
        assert harness.at(stream) == last


async def test_a_run_does_not_migrate_between_two_draining_workers(store: Store) -> None:
    async with moving(store) as harness:
        stream, expected = await harness.begin(1)
        await until_written(stream, 3)
        for name in "de":
            harness.drain(name)
        await checked(stream, expected)


@pytest.mark.slow
async def test_a_cancel_at_any_instant_of_a_drain_leaves_nothing(store: Store) -> None:
    for steps in range(12):
        async with moving(store) as harness:
            stream, expected = await harness.begin(steps, wanted=200)
            await until_written(stream, 3)
            harness.drain(harness.at(stream))
            await asyncio.sleep(steps * 0.004)
            await harness.core.requests.cancel(stream.request.key)
            assert isinstance(stream.end, Cancelled)
            assert stream.outputs[0].tokens == expected[: len(stream.outputs[0].tokens)]


@pytest.mark.slow
async def test_a_deadline_in_a_drain_ends_it_everywhere(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for steps in range(6):
        async with moving(store) as harness:
            stream, expected = await harness.begin(steps, wanted=400, seconds=8.0)
            await until(partial(harness.at, stream))
            harness.drain(harness.at(stream))
            await asyncio.sleep(steps * 0.02)
            jump(monkeypatch, 8.0)
            await until_ended(stream)
            assert isinstance(stream.end, DeadlineExceeded)
            assert stream.outputs[0].tokens == expected[: len(stream.outputs[0].tokens)]


@pytest.mark.slow
async def test_losing_the_source_of_a_migration_costs_at_most_one_attempt(store: Store) -> None:
    for steps in range(8):
        async with moving(store, decode="def") as harness:
            stream, expected = await harness.begin(steps, wanted=120, kind=LONG_KINDS[steps])
            await until_written(stream, 3)
            first = harness.at(stream)
            harness.drain(first)
            await asyncio.sleep(steps * 0.006)
            await harness.lose(first)
            await harness.hurry_away_from(stream, first)
            await until_ended(stream)
            assert isinstance(stream.end, Finish), stream.end
            assert stream.outputs[0].tokens == expected
            assert stream.trace.attempts <= 2
            assert harness.at(stream) != first


@pytest.mark.slow
async def test_losing_the_target_of_a_migration_costs_at_most_one_attempt(store: Store) -> None:
    for steps in range(8):
        async with moving(store, decode="def") as harness:
            stream, expected = await harness.begin(steps, wanted=300, kind=LONG_KINDS[-1 - steps])
            await until_written(stream, 3)
            first = harness.at(stream)
            others = sorted({*"def"} - {first})
            harness.drain(first)
            await asyncio.sleep(steps * 0.006)
            target = next((name for name in others if harness.runs(name)), others[0])
            await harness.lose(target)
            await harness.hurry_away_from(stream, first, target)
            await until_ended(stream)
            assert isinstance(stream.end, Finish), stream.end
            assert stream.outputs[0].tokens == expected
            assert stream.trace.attempts <= 2
            assert harness.at(stream) not in (first, target)


def _reserve(engine: Engine, number: int) -> IncomingSequence:
    return engine.transfers.reserve(Request(f"crowd-{number}", (1, 2, 3)))


def _let_go(worker_harness: WorkerHarness, crowd: list[IncomingSequence]) -> None:
    def let_go(_: Engine) -> None:
        for arrival in crowd:
            arrival.abort()

    worker_harness.host.loop.post(let_go)


@pytest.mark.slow
async def test_losing_the_target_before_the_commit_costs_no_attempt(store: Store) -> None:
    async with moving(store) as harness:
        stream, expected = await harness.begin(1, wanted=200)
        await until_written(stream, 3)
        first = harness.at(stream)
        (other,) = {*"de"} - {first}
        worker_harness = harness.workers[other]
        crowd = [await worker_harness.host.loop.call(partial(_reserve, number=number)) for number in range(8)]
        harness.drain(first)
        await until(lambda: harness.runs(other))
        await harness.lose(other)
        await checked(stream, expected)
        assert harness.at(stream) == first
        _let_go(worker_harness, crowd)


async def until_renewed(lease: Lease) -> None:
    before = lease.timer.when()
    await until(lambda: lease.timer.when() > before)


@pytest.mark.rule(
    "ticket-renewed-until-opened",
    "router/workers/ticket_renewals.py:TicketRenewals.on_renewed",
    "handoff/leases.py:LeaseTable.renew_unopened",
)
@pytest.mark.slow
async def test_a_ticket_is_renewed_while_its_receiver_waits_for_free_blocks(store: Store) -> None:
    async with moving(store, decode="d", prefill="p") as harness:
        worker_harness, prefill = harness.workers["d"], harness.workers["p"]
        crowd = [await worker_harness.host.loop.call(partial(_reserve, number=number)) for number in range(8)]
        stream, expected = await harness.begin(1)
        await until(lambda: harness.runs("d"))
        (lease,) = prefill.host.sender.leases.all()
        for _ in range(2):
            await until_renewed(lease)
        assert prefill.host.sender.leases.all() == [lease]
        _let_go(worker_harness, crowd)
        worker_harness.host.loop.post(lambda engine: engine.add(Request("nudge", (1,), stop=StopParams(1))))
        await checked(stream, expected)
        assert stream.trace.prefill_worker == "p"


LINES = [
    *(("source", FETCH, way) for way in (TO_WORKER, TO_CALLER)),
    *(("source", RELEASE, way) for way in (TO_WORKER, TO_CALLER)),
    *((name, SESSION, way) for name in ("source", "target") for way in (TO_WORKER, TO_CALLER)),
]


@pytest.mark.slow
@pytest.mark.parametrize("line", LINES, ids=lambda line: f"{line[0]} {line[1].rpartition('/')[2]} {line[2]}")
async def test_the_text_is_the_same_whatever_breaks_in_a_drain(store: Store, line: tuple[str, str, Direction]) -> None:
    who, method, direction = line
    for number in range(12):
        async with moving(store) as harness:
            stream, expected = await harness.begin(number)
            await until_written(stream, 3)
            names = {"source": harness.at(stream)}
            (names["target"],) = {"d", "e"} - {names["source"]}
            cut = Cut(method, direction, number, arrives=number % 2 == 1)
            harness.proxies[names[who]].cuts = (cut,)
            harness.drain(names["source"])
            await until_ended(stream)
            assert isinstance(stream.end, Finish), stream.end
            assert stream.outputs[0].tokens == expected
            if not cut.happened:
                break
