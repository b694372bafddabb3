from __future__ import annotations

import asyncio

import pytest

from decant.handoff.errors import HandoffFailed
from decant.protos import worker_pb2 as wire
from tests.worker.harness import MODEL, WorkerHarness, make_work, run_alone, ticket_of, worker
from tests.worker.requests import to_request, tokens_of
from tests.worker.waiting import advance


async def test_a_call_that_breaks_before_its_turn_ends_the_run(harness: WorkerHarness) -> None:
    harness.device.hold()
    busy = harness.ask(make_work(100, 1, seed=1), handoff=False, request="t/busy")
    call = harness.ask(make_work(100, seed=2))
    harness.device.let(1)
    await harness.runs(2)
    await call.break_off()
    await harness.runs(1)
    harness.device.go_on()
    await busy.expect("first")
    await busy.ended()
    await harness.emptied()


@pytest.mark.parametrize("moment", ["ticket", "first"])
async def test_a_call_that_breaks_with_no_fetch_ends_the_work(harness: WorkerHarness, moment: str) -> None:
    call = harness.ask(make_work(60))
    await ticket_of(call)
    if moment == "first":
        await call.expect("first")
    await call.break_off()
    audit = await harness.emptied()
    assert not audit.leases


@pytest.mark.rule("broken-prefill-call-ends-run", "worker/prefill/service.py:PrefillService._on_call_end")
@pytest.mark.parametrize("moment", ["filling", "committed"])
async def test_a_call_that_breaks_during_a_fetch_leaves_it_alone(harness: WorkerHarness, moment: str) -> None:
    work = make_work(60)
    async with worker("d") as receiver:
        if moment == "filling":
            harness.device.hold()
            harness.device.let(1)
        call = harness.ask(work)
        ticket = await ticket_of(call)
        if moment == "committed":
            await call.expect("first")
        taking = asyncio.create_task(receiver.receive(ticket, to_request("moved", work, model=MODEL)))
        harness.device.let(1)
        await harness.opened()
        await call.break_off()
        harness.device.go_on()
        taken = await taking
        assert [*tokens_of(taken), *(await receiver.written("moved"))] == run_alone(work)
    await harness.emptied()
    assert not list(harness.prefill.runs())


async def test_a_ticket_that_is_not_renewed_expires(harness: WorkerHarness) -> None:
    call = harness.ask(make_work(30))
    await ticket_of(call)
    await call.expect("first")
    advance(harness.host.lease_s)
    failed = await call.expect("failed")
    await call.ended()
    assert failed.failure.cause == wire.CAUSE_LEASE_EXPIRED
    await harness.emptied()


async def test_a_ticket_that_is_renewed_does_not_expire() -> None:
    async with worker(lease_ms=600_000) as harness:
        call = harness.ask(make_work(30))
        ticket = await ticket_of(call)
        await call.expect("first")
        for _ in range(10):
            advance(0.7 * harness.host.lease_s)
            await asyncio.sleep(0.01)
            assert harness.host.sender.leases.renew(ticket.id)
        assert (await harness.audit()).leases[0].ticket == ticket.id
        advance(harness.host.lease_s)
        assert (await call.expect("failed")).failure.cause == wire.CAUSE_LEASE_EXPIRED
        await harness.emptied()


async def test_a_receiver_that_releases_before_the_first_token_ends_the_run(harness: WorkerHarness) -> None:
    harness.device.hold()
    call = harness.ask(make_work(60))
    harness.device.let(1)
    ticket = await ticket_of(call)
    release = wire.ReleaseRequest(ticket=ticket.id, run=ticket.run, outcome=wire.ReleaseRequest.OUTCOME_ABANDONED)
    harness.device.let(1)
    await harness.host.sender.release(release)
    harness.device.go_on()
    assert (await call.expect("failed")).failure.cause == wire.CAUSE_PEER_LOST
    await call.ended()
    await harness.emptied()


@pytest.mark.parametrize("moment", ["waiting", "computing", "parked"])
async def test_a_deadline_is_enforced(harness: WorkerHarness, moment: str) -> None:
    work = make_work(60)
    work.remaining_ms = 10_000
    if moment != "parked":
        harness.device.hold()
    if moment == "computing":
        harness.device.let(1)
    call = harness.ask(work)
    if moment != "waiting":
        await ticket_of(call)
    if moment == "parked":
        await call.expect("first")
    else:
        await harness.runs(1)
        await asyncio.sleep(0)  # the run's coroutine has begun
    advance(10)
    failed = await call.expect("failed")
    await call.ended()
    assert failed.failure.cause == wire.CAUSE_DEADLINE
    harness.device.go_on()
    await harness.emptied()


async def test_a_deadline_ends_a_fetch_with_its_cause(harness: WorkerHarness) -> None:
    work = make_work(60)
    harness.device.hold()
    harness.device.let(1)
    work.remaining_ms = 10_000
    async with worker("d") as receiver:
        call = harness.ask(work)
        ticket = await ticket_of(call)
        taking = asyncio.create_task(receiver.receive(ticket, to_request("moved", make_work(60), model=MODEL)))
        harness.device.let(1)
        await harness.opened()
        advance(10)
        assert (await call.expect("failed")).failure.cause == wire.CAUSE_DEADLINE
        harness.device.go_on()
        with pytest.raises(HandoffFailed) as failed:
            await taking
        assert failed.value.cause == wire.CAUSE_DEADLINE
    await harness.emptied()


async def test_a_new_owner_ends_the_call_of_the_old_one(harness: WorkerHarness) -> None:
    old = harness.ask(make_work(30), epoch=1)
    await ticket_of(old)
    await old.expect("first")
    new = harness.ask(make_work(30), epoch=2, handoff=False)
    superseded = await old.expect("superseded")
    await old.ended()
    assert (superseded.run.epoch, superseded.epoch) == (1, 2)
    await new.expect("first")
    await new.ended()
    late = harness.ask(make_work(30), epoch=1)
    assert (await late.expect("superseded")).epoch == 2
    await late.ended()
    await harness.emptied()


async def test_a_crash_of_the_engine_fails_its_prompts(harness: WorkerHarness) -> None:
    harness.device.hold()
    call = harness.ask(make_work(60))
    waiting = harness.ask(make_work(60, seed=1), request="t/b")
    await harness.runs(2)
    harness.device.broken = True
    harness.device.go_on()
    for each in (call, waiting):
        failed = await each.expect("failed")
        assert failed.failure.cause == wire.CAUSE_ENGINE
        await each.ended()
    refused = await harness.ask(make_work(30)).expect("refused")
    assert refused.failure.cause == wire.CAUSE_ENGINE
