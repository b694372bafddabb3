from __future__ import annotations

import asyncio

import pytest

from decant.protos import worker_pb2 as wire
from decant.runtime.packed import pack
from decant.runtime.protocol import PROTOCOL
from tests.worker.harness import BLOCK, MODEL, ROUTER, WorkerHarness, make_work, run_alone, ticket_of, tokens, worker
from tests.worker.requests import to_request


async def test_a_request_for_another_worker_is_refused(harness: WorkerHarness) -> None:
    other = wire.Peer(id=harness.host.peer.id, incarnation=harness.host.peer.incarnation + 1, protocol=PROTOCOL)
    old, new = (wire.Peer(id="router", incarnation=7, protocol=PROTOCOL + change) for change in (-2, 2))
    for router, meant, cause in (
        (ROUTER, other, wire.CAUSE_WRONG_PEER),
        (old, harness.host.peer, wire.CAUSE_WRONG_PROTOCOL),
        (new, harness.host.peer, wire.CAUSE_WRONG_PROTOCOL),
    ):
        run = wire.Run(request="t/a", epoch=9, attempt=1)
        call = harness.call(wire.PrefillRequest(run=run, router=router, worker=meant, engine_request=make_work()))
        assert (await call.expect("refused")).failure.cause == cause
        await call.ended()
    call = harness.ask(make_work(8, 1), handoff=False, epoch=1)
    await call.expect("first")  # what was not for this worker left no epoch behind


async def test_an_unservable_request_is_refused_with_its_cause(harness: WorkerHarness) -> None:
    unknown = make_work()
    unknown.model = "other"
    foreign = make_work()
    foreign.prompt = pack([1000])
    never = make_work(64 * BLOCK + 1)
    late = make_work()
    late.remaining_ms = 0
    for work, cause in (
        (unknown, wire.CAUSE_UNKNOWN_MODEL),
        (foreign, wire.CAUSE_INVALID),
        (never, wire.CAUSE_NEVER_FITS),
        (late, wire.CAUSE_DEADLINE),
    ):
        call = harness.ask(work)
        refused = await call.expect("refused")
        assert refused.failure.cause == cause, refused
        await call.ended()
    await harness.emptied()


async def test_a_draining_worker_refuses_new_requests_and_finishes_its_own(harness: WorkerHarness) -> None:
    harness.device.hold()
    call = harness.ask(make_work(60, 1), handoff=False)
    await harness.runs(1)
    harness.host.draining = True
    draining = asyncio.create_task(harness.prefill.drain())
    assert (await harness.ask(make_work()).expect("refused")).failure.cause == wire.CAUSE_DRAINING
    assert not harness.host.load().takes_prompts
    assert harness.host.load().draining
    assert not draining.done()
    harness.device.go_on()
    await call.expect("first")
    await call.ended()
    async with asyncio.timeout(30):
        await draining


async def test_a_request_is_refused_as_busy_when_the_queue_is_full() -> None:
    async with worker(max_waiting=2) as harness:
        harness.device.hold()
        calls = [harness.ask(make_work(20, 1, seed=n), handoff=False, request=f"t/{n}") for n in range(2)]
        await harness.runs(2)
        refused = await harness.ask(make_work(), request="t/late").expect("refused")
        assert refused.failure.cause == wire.CAUSE_BUSY
        harness.device.go_on()
        for call in calls:
            await call.expect("first")
            await call.ended()


@pytest.mark.rule(
    "prompts-wait-at-half-of-blocks",
    "worker/prefill/prefill_queue.py:PrefillQueue._is_full",
    "worker/engine_host.py:EngineHost.blocks_for",
)
async def test_prompts_wait_while_tickets_keep_more_than_half_of_the_pool() -> None:
    async with worker(blocks=32) as harness:
        holders = [harness.ask(make_work(32, seed=n), request=f"t/{n}") for n in range(2)]  # 9 of 32 blocks each
        tickets = [await ticket_of(call) for call in holders]
        for call in holders:
            await call.expect("first")
        waiting = harness.ask(make_work(30, 1, seed=8), handoff=False, request="t/late")
        urgent = make_work(30, 1, seed=9)
        urgent.priority = 10
        sooner = harness.ask(urgent, handoff=False, request="t/urgent")
        await harness.runs(4)
        await harness.host.sample_load()
        load = harness.host.load()
        assert (load.takes_prompts, load.leased_blocks, load.waiting) == (True, 16, 2)
        assert load.queued_tokens == 60
        assert not [name for name in harness.outputs if "late" in name or "urgent" in name]
        harness.device.hold()
        await harness.host.sender.release(wire.ReleaseRequest(ticket=tickets[0].id))
        harness.device.go_on()
        for call in (sooner, waiting, holders[0]):
            await (call.ended() if call is holders[0] else call.expect("first"))
        order = [name for name in harness.outputs if "late" in name or "urgent" in name]
        assert "urgent" in order[0]
        await holders[1].break_off()
        await harness.emptied()


async def test_the_load_reports_when_tickets_keep_more_than_half_of_the_pool() -> None:
    async with worker(blocks=32) as harness:
        call = harness.ask(make_work(68))  # 17 of 32 blocks
        await ticket_of(call)
        await call.expect("first")
        await harness.host.sample_load()
        load = harness.host.load()
        assert (load.leased_blocks, load.takes_prompts) == (17, False)
        audit = await harness.audit()
        assert (audit.leased_blocks, audit.owned_blocks, audit.leases[0].blocks) == (17, 0, 17)
        await call.break_off()
        await harness.emptied()
        await harness.host.sample_load()
        assert harness.host.load().takes_prompts


async def test_many_prompts_at_once_all_end_and_nothing_is_left() -> None:
    async with worker(blocks=48, max_waiting=100) as harness, worker("d", blocks=512) as receiver:

        async def one(number: int) -> None:
            work = make_work(10 + number, 4, seed=number)
            call = harness.ask(work, request=f"t/{number}")
            ticket = await ticket_of(call)
            if number % 3 == 1:
                await call.break_off()
                return
            first = await call.expect("first")
            name = f"moved-{number}"
            await receiver.receive(ticket, to_request(name, work, model=MODEL))
            await call.ended()
            assert [first.tokens[0].token, *(await receiver.written(name))] == run_alone(work)

        await asyncio.gather(*(one(number) for number in range(24)))
        await harness.emptied()


def test_seeds_give_different_prompts() -> None:
    assert tokens(30, 1) != tokens(30, 2)
