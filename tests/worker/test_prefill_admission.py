from __future__ import annotations

import asyncio

from decant.protos import worker_pb2 as wire
from decant.runtime.packed import pack
from decant.runtime.protocol import PROTOCOL
from decant.worker.wire_codec import to_request
from tests.worker.harness import BLOCK, MODEL, ROUTER, WorkerScene, alone, make_work, ticket_of, tokens, worker


async def test_a_request_for_another_worker_is_refused(place: WorkerScene) -> None:
    other = wire.Peer(id=place.host.peer.id, incarnation=place.host.peer.incarnation + 1, protocol=PROTOCOL)
    old = wire.Peer(id="router", incarnation=7, protocol=9)
    for router, meant, cause in (
        (ROUTER, other, wire.CAUSE_WRONG_PEER),
        (old, place.host.peer, wire.CAUSE_WRONG_PROTOCOL),
    ):
        run = wire.Run(request="t/a", epoch=9, attempt=1)
        call = place.call(wire.PrefillRequest(run=run, router=router, worker=meant, engine_request=make_work()))
        assert (await call.expect("refused")).failure.cause == cause
        await call.ended()
    call = place.ask(make_work(8, 1), handoff=False, epoch=1)
    await call.expect("first")  # what was not for this worker left no epoch behind


async def test_an_unservable_request_is_refused_with_its_cause(place: WorkerScene) -> None:
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
        call = place.ask(work)
        refused = await call.expect("refused")
        assert refused.failure.cause == cause, refused
        await call.ended()
    await place.emptied()


async def test_a_draining_worker_refuses_new_requests_and_finishes_its_own(place: WorkerScene) -> None:
    place.device.hold()
    call = place.ask(make_work(60, 1), handoff=False)
    await place.runs(1)
    place.host.draining = True
    draining = asyncio.create_task(place.prefill.drain())
    assert (await place.ask(make_work()).expect("refused")).failure.cause == wire.CAUSE_DRAINING
    assert not place.host.load().takes_prompts
    assert place.host.load().draining
    assert not draining.done()
    place.device.go_on()
    await call.expect("first")
    await call.ended()
    async with asyncio.timeout(30):
        await draining


async def test_a_request_is_refused_as_busy_when_the_queue_is_full() -> None:
    async with worker(max_waiting=2) as place:
        place.device.hold()
        calls = [place.ask(make_work(20, 1, seed=n), handoff=False, request=f"t/{n}") for n in range(2)]
        await place.runs(2)
        refused = await place.ask(make_work(), request="t/late").expect("refused")
        assert refused.failure.cause == wire.CAUSE_BUSY
        place.device.go_on()
        for call in calls:
            await call.expect("first")
            await call.ended()


async def test_prompts_wait_while_tickets_keep_more_than_half_of_the_pool() -> None:
    async with worker(blocks=32) as place:
        holders = [place.ask(make_work(32, seed=n), request=f"t/{n}") for n in range(2)]  # 9 of 32 blocks each
        tickets = [await ticket_of(call) for call in holders]
        for call in holders:
            await call.expect("first")
        waiting = place.ask(make_work(30, 1, seed=8), handoff=False, request="t/late")
        urgent = make_work(30, 1, seed=9)
        urgent.priority = 10
        sooner = place.ask(urgent, handoff=False, request="t/urgent")
        await place.runs(4)
        await place.host.sample_load()
        load = place.host.load()
        assert (load.takes_prompts, load.leased_blocks, load.waiting) == (True, 16, 2)
        assert load.queued_tokens == 60
        assert not [name for name in place.outputs if "late" in name or "urgent" in name]
        place.device.hold()
        await place.host.sender.release(wire.ReleaseRequest(ticket=tickets[0].id))
        place.device.go_on()
        for call in (sooner, waiting, holders[0]):
            await (call.ended() if call is holders[0] else call.expect("first"))
        order = [name for name in place.outputs if "late" in name or "urgent" in name]
        assert "urgent" in order[0]
        await holders[1].break_off()
        await place.emptied()


async def test_the_load_reports_when_tickets_keep_more_than_half_of_the_pool() -> None:
    async with worker(blocks=32) as place:
        call = place.ask(make_work(68))  # 17 of 32 blocks
        await ticket_of(call)
        await call.expect("first")
        await place.host.sample_load()
        load = place.host.load()
        assert (load.leased_blocks, load.takes_prompts) == (17, False)
        audit = await place.audit()
        assert (audit.leased_blocks, audit.owned_blocks, audit.leases[0].blocks) == (17, 0, 17)
        await call.break_off()
        await place.emptied()
        await place.host.sample_load()
        assert place.host.load().takes_prompts


async def test_many_prompts_at_once_all_end_and_nothing_is_left() -> None:
    async with worker(blocks=48, max_waiting=100) as place, worker("d", blocks=512) as receiver:

        async def one(number: int) -> None:
            work = make_work(10 + number, 4, seed=number)
            call = place.ask(work, request=f"t/{number}")
            ticket = await ticket_of(call)
            if number % 3 == 1:
                await call.break_off()
                return
            first = await call.expect("first")
            name = f"moved-{number}"
            await receiver.receive(ticket, to_request(name, work, model=MODEL))
            await call.ended()
            assert [first.tokens[0].token, *(await receiver.written(name))] == alone(work)

        await asyncio.gather(*(one(number) for number in range(24)))
        await place.emptied()


def test_seeds_give_different_prompts() -> None:
    assert tokens(30, 1) != tokens(30, 2)
