from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from decant.engine.kv_layout import FULL, Window, WindowKind
from decant.protos import worker_pb2 as wire
from tests.worker.decode_harness import Node, make_run, make_work, run_alone
from tests.worker.session_client import Router
from tests.worker.waiting import advance, eventually

RUN = make_run()


@asynccontextmanager
async def pair(**limits: Any) -> AsyncIterator[tuple[Router, Router]]:
    async with (
        Node("d", **limits) as sender,
        Node("e", **limits) as receiver,
        Router(sender) as old,
        Router(receiver) as new,
    ):
        sender.device.seconds = 0.02  # a run lasts for seconds, until `hurry`
        yield old, new


def speed_up(router: Router) -> None:
    router.node.device.seconds = 0.0


async def take_ticket(old: Router, run: wire.Run = RUN) -> wire.Ticket:
    record = old.record_of(run)
    before = record.kinds.count("ticket")
    await old.send(migrate=wire.Migrate(run=run, output=0))
    await old.until(lambda: record.kinds.count("ticket") > before)
    ticket: wire.Ticket = record.last["ticket"]
    return ticket


def with_written(work: wire.EngineRequest, old: Router, prompt: int) -> wire.EngineRequest:
    text = old.record_of(RUN).text(prompt)
    return make_work(prompt, work.stopping.max_tokens, seed=work.sampling.seed, written=text)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
async def test_source_and_target_generate_one_text_wherever_the_run_migrates(seed: int) -> None:
    rng, windows = random.Random(seed), (FULL, Window(WindowKind.SLIDING, 9)) if seed % 3 == 2 else (FULL,)
    prompt, wanted = rng.randint(1, 60), 200
    work = make_work(prompt, wanted, seed=seed)
    async with pair(budget=rng.choice((8, 16)), windows=windows) as (old, new):
        device = old.node.device
        device.seconds = 0.005
        await old.start(RUN, work)
        await old.until_tokens(RUN, rng.randint(0, 30))
        device.seconds = 0.02  # a busy machine must not finish the sequence before it is given
        if "scheduled" not in old.record_of(RUN).kinds:
            await old.until_message(RUN, "scheduled")
        ticket = await take_ticket(old)
        await new.start(RUN, with_written(work, old, prompt), ticket)
        [record] = await new.until_ended(RUN)
        assert "decode_started" in record.kinds
        tokens = old.record_of(RUN).tokens | record.tokens
        assert [tokens[place] for place in sorted(tokens)] == run_alone(work, windows=windows)
        assert "ended" not in old.record_of(RUN).last
        await old.forget(RUN)
        await eventually(lambda: not list(old.node.decode.runs()))
        await old.node.audit()
        await new.node.audit()


async def test_a_run_migrates_with_its_logprobs() -> None:
    work = make_work(10, 200, logprobs=2)
    async with pair() as (old, new):
        await old.start(RUN, work)
        await old.until_tokens(RUN, 5)
        ticket = await take_ticket(old)
        await new.start(RUN, work, ticket)  # of a router that lacks all of it
        [record] = await new.until_ended(RUN)
        assert record.text(10) == run_alone(work)
        assert sorted(record.logprobs) == sorted(record.tokens)
        assert all(
            old.record_of(RUN).logprobs[place] == record.logprobs[place] for place in old.record_of(RUN).logprobs
        )


@pytest.mark.rule(
    "uncommitted-source-continues", "engine/exports.py:KvTransfers.cancel", "handoff/sender.py:KvSender._free"
)
async def test_a_run_whose_ticket_is_not_used_continues() -> None:
    work = make_work(10, 200)
    async with pair(lease_ms=600_000) as (old, _):
        await old.start(RUN, work)
        await old.until_tokens(RUN, 2)
        await take_ticket(old)
        assert old.node.host.sender.leases.all()
        advance(old.node.host.lease_s)
        await eventually(lambda: not old.node.host.sender.leases.all())
        speed_up(old)
        [record] = await old.until_ended(RUN)
        assert record.text(10) == run_alone(work)
        await old.node.audit()


async def test_the_ticket_is_the_same_until_it_is_withdrawn() -> None:
    work = make_work(10, 200)
    async with pair() as (old, new):
        await old.start(RUN, work)
        await old.until_tokens(RUN, 2)
        first = await take_ticket(old)
        assert await take_ticket(old) == first
        await old.send(migrate=wire.Migrate(run=RUN, output=0, withdrawn=True))
        second = await take_ticket(old)
        assert second.id != first.id
        await new.start(RUN, work, first)
        assert (await new.until_message(RUN, "failed")).failure.cause == wire.CAUSE_LEASE_EXPIRED
        speed_up(old)
        [record] = await old.until_ended(RUN)
        assert record.text(10) == run_alone(work)


async def test_the_lease_is_renewed_by_heartbeats_while_the_target_waits_for_blocks() -> None:
    work = make_work(10, 400)
    async with pair() as (old, _):
        await old.start(RUN, work)
        await old.until_tokens(RUN, 2)
        ticket = await take_ticket(old)
        lease = old.node.host.sender.leases.find(ticket.id)
        assert lease is not None
        before = lease.timer.when()
        await old.send(heartbeat=wire.Heartbeat(renew=[ticket.id]))
        await eventually(lambda: lease.timer.when() > before)
        await old.cancel(RUN)
        await old.until_ended(RUN)


@pytest.mark.rule("uncommitted-source-continues", "worker/decode/migration.py:MigrationSource.on_lease_end")
async def test_after_the_commit_the_loss_of_the_target_fails_the_run() -> None:
    work = make_work(10, 300)
    async with pair() as (old, new):
        await old.start(RUN, work)
        await old.until_tokens(RUN, 2)
        await new.start(RUN, work, await take_ticket(old))
        await new.until_message(RUN, "decode_started")
        await old.send(migrate=wire.Migrate(run=RUN, output=0, withdrawn=True))
        assert (await old.until_message(RUN, "failed")).failure.cause == wire.CAUSE_OWNER_LOST
        await new.cancel(RUN)
        await new.until_ended(RUN)
        await old.node.audit()
        await new.node.audit()


@pytest.mark.parametrize("engine", ["has no free blocks", "is being asked for blocks"])
async def test_a_run_that_has_not_begun_is_refused_and_keeps_its_ticket(engine: str) -> None:
    async with Node("p") as prefill, pair(running=1) as (old, new):
        first, waits = make_run("t/first"), make_run("t/waits")
        old.node.device.seconds = 0.05  # the first is at work until it is cancelled
        await old.start(first, make_work(10, 400))
        await old.until_tokens(first, 1)
        work = make_work(30, 8, seed=3)
        ticket = await prefill.offer(waits, work)
        if engine == "is being asked for blocks":
            old.node.device.seconds = 10.0  # it answers with its next step
        await old.start(waits, work, ticket)
        await eventually(lambda: len(list(old.node.decode.runs())) == 2)
        if engine == "has no free blocks":
            await eventually(lambda: old.node.host.num_waiting() == 1)
        await old.send(migrate=wire.Migrate(run=waits, output=0))
        assert (await old.until_message(waits, "refused")).failure.cause == wire.CAUSE_DRAINING
        speed_up(old)
        await new.start(waits, work, ticket)
        [record] = await new.until_ended(waits)
        assert record.text(30) == run_alone(work)
        await old.cancel(first)
        await old.until_ended(first)
        await prefill.audit()


async def test_an_arriving_run_is_offered_when_it_has_joined() -> None:
    work = make_work(60, 200)
    async with Node("p") as prefill, pair() as (old, new):
        prefill.device.seconds = 0.02
        await old.start(RUN, work, await prefill.offer(RUN, work))
        await old.until_message(RUN, "scheduled")
        ticket = await take_ticket(old)
        assert "decode_started" in old.record_of(RUN).kinds
        await new.start(RUN, with_written(work, old, 60), ticket)
        [record] = await new.until_ended(RUN)
        tokens = old.record_of(RUN).tokens | record.tokens
        assert [tokens[place] for place in sorted(tokens)] == run_alone(work)
        await old.forget(RUN)
        await old.node.audit()
        await prefill.audit()


async def test_adoption_withdraws_the_offer_of_an_earlier_owner() -> None:
    work = make_work(10, 200)
    async with pair() as (old, _), Router(old.node, "another") as other:
        await old.start(RUN, work)
        await old.until_tokens(RUN, 2)
        await take_ticket(old)
        mine = make_run(epoch=2)
        await other.send(adopt=wire.Adopt(run=mine, resume=[wire.ResumePosition(output=0, position=10)]))
        await other.until_message(mine, "run_status")
        speed_up(old)
        [record] = await other.until_ended(mine)
        assert record.text(10) == run_alone(work)
        assert not old.node.host.sender.leases.all()


@pytest.mark.parametrize("end", ["by itself", "cancelled"])
async def test_a_run_that_ends_during_a_migration_leaves_nothing(end: str) -> None:
    work = make_work(10, 200)
    async with pair() as (old, _):
        await old.start(RUN, work)
        await old.until_tokens(RUN, 2)
        await take_ticket(old)
        if end == "cancelled":
            await old.cancel(RUN)
        else:
            speed_up(old)
        [record] = await old.until_ended(RUN)
        assert "ended" in record.last
        assert not old.node.host.sender.leases.all()
        await old.node.audit()
