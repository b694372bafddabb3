"""The Prefill service over real connections: what it tells, what it holds, and that it lets go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from decant.handoff.errors import HandoffFailed, SequenceAlreadyFinished
from decant.protos import worker_pb2 as wire
from decant.runtime.packed import pack
from decant.worker.wire_codec import to_request
from tests.worker.harness import BLOCK, MODEL, ROUTER, Call, Place, alone, make_work, tokens, worker


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    async with worker() as place:
        yield place


async def ticket_of(call: Call) -> wire.Ticket:
    ticket = await call.expect("ticket")
    assert isinstance(ticket, wire.Ticket)
    return ticket


# -- what is told -----------------------------------------------------------------------------------------------


async def test_ticket_first_token_and_cache_come_in_this_order(place: Place) -> None:
    work = make_work(30)
    async with worker("d") as receiver:
        call = place.ask(work)
        ticket = await ticket_of(call)
        first = await call.expect("first")
        taken = await receiver.receive(ticket, to_request("moved", work, model=MODEL))
        await call.ended()
        assert [first.tokens[0].token, *(await receiver.written("moved"))] == alone(work)
        assert taken.received == 8 * place.host.shape.block_bytes
    assert (ticket.run.request, ticket.sender, ticket.address) == ("t/a", place.host.peer, place.address)
    assert (ticket.layout, ticket.salt, ticket.tokens) == (place.host.layout, b"tenant", 30)
    assert (list(ticket.outputs), ticket.lease_ms, len(ticket.id)) == ([0], 30_000, 16)
    assert (first.cached_tokens, first.tokens[0].HasField("finished")) == (0, False)
    assert first.prefill_us > 0
    await place.emptied()


async def test_the_ticket_comes_with_the_first_chunk_not_with_the_last(place: Place) -> None:
    place.device.hold()
    call = place.ask(make_work(50))  # four steps of 16 tokens
    place.device.let(1)
    await ticket_of(call)
    assert not place.outputs, "no token yet"
    assert place.host.sender.leases.all()
    place.device.go_on()
    await call.expect("first")
    await call.break_off()


async def test_a_first_token_doesnt_wait_for_a_ticket_of_the_same_step(place: Place) -> None:
    work = make_work(15, 5)
    async with worker("d") as receiver:
        call = place.ask(work)
        event = await call.next()
        assert event is not None
        await receiver.receive(await ticket_of(call), to_request("moved", work, model=MODEL))
        await call.ended()
        assert [event.first.tokens[0].token, *(await receiver.written("moved"))] == alone(work)
    await place.emptied()


async def test_cached_tokens_are_reported(place: Place) -> None:
    for expected in (0, 28):
        call = place.ask(make_work(30, 1), handoff=False)
        first = await call.expect("first")
        await call.ended()
        assert first.cached_tokens == expected


async def test_prefill_continues_the_output_of_earlier_attempts(place: Place) -> None:
    whole = alone(make_work(20, 10))
    work = make_work(20, 10, written=whole[:4])
    async with worker("d") as receiver:
        call = place.ask(work)
        ticket = await ticket_of(call)
        assert ticket.tokens == 24
        first = await call.expect("first")
        assert first.tokens[0].token == whole[4]
        await receiver.receive(ticket, to_request("moved", work, model=MODEL))
        await call.ended()
        assert await receiver.written("moved") == whole[5:]


async def test_logprobs_of_prompt_and_first_token(place: Place) -> None:
    work = make_work(40, 1)
    work.logprobs, work.prompt_logprobs = 2, 1
    call, told, position = place.ask(work, handoff=False), 0, 1
    while (event := await call.next()) is not None and event.HasField("prompt_logprobs"):
        part = event.prompt_logprobs
        assert part.first_position == position
        assert [entry.entry for entry in part.logprobs] == list(range(len(part.logprobs)))
        assert all(len(entry.top_ids) == 1 for entry in part.logprobs)
        position += len(part.logprobs)
        told += 1
    assert position == 40
    assert told > 1, "as chunks are computed"
    assert event is not None
    logprobs = event.first.tokens[0].logprobs
    assert (logprobs.entry, len(logprobs.top_ids)) == (0, 2)
    await call.ended()


@pytest.mark.parametrize("wanted", [1, 10])
async def test_one_token_without_a_ticket_keeps_no_blocks(place: Place, wanted: int) -> None:
    work = make_work(30, wanted)
    call = place.ask(work, handoff=False)
    first = await call.expect("first")
    await call.ended()
    assert first.tokens[0].token == alone(work)[0]
    assert first.tokens[0].HasField("finished") is (wanted == 1)
    audit = await place.audit()
    assert (audit.owned_blocks, audit.leased_blocks, len(audit.leases)) == (0, 0, 0)


@pytest.mark.parametrize(
    ("cut", "reason"), [(False, wire.OutputEnd.REASON_LENGTH), (True, wire.OutputEnd.REASON_CONTEXT_LENGTH)]
)
async def test_a_first_token_that_is_the_last_is_marked(place: Place, cut: bool, reason: wire.OutputEnd.Reason) -> None:
    work = make_work(30, 1)
    work.stopping.cut_to_window = cut
    call = place.ask(work, handoff=False)
    end = (await call.expect("first")).tokens[0].finished
    assert (end.reason, end.end_position, end.output) == (reason, 31, 0)
    await call.ended()


@pytest.mark.parametrize("opened", ["before", "after"])
async def test_a_first_token_that_ends_the_sequence_closes_the_fetch_without_failure(opened: str) -> None:
    work = make_work(40)
    eos = alone(work)[0]
    async with worker(eos=eos) as place, worker("d", eos=eos) as receiver:
        place.device.hold()
        call = place.ask(work)
        place.device.let(1)
        ticket = await ticket_of(call)
        taking = asyncio.create_task(receiver.receive(ticket, to_request("moved", work, model=MODEL)))
        if opened == "before":
            place.device.let(1)
            await place.opened()
        else:
            taking.cancel()
        place.device.go_on()
        end = (await call.expect("first")).tokens[0].finished
        await call.ended()
        assert end.reason == wire.OutputEnd.REASON_STOP
        if opened == "after":
            assert not (await place.audit()).leased_blocks
            taking = asyncio.create_task(receiver.receive(ticket, to_request("late", work, model=MODEL)))
        with pytest.raises(SequenceAlreadyFinished if opened == "before" else (SequenceAlreadyFinished, HandoffFailed)):
            await taking
        await receiver.emptied()


# -- letting go -------------------------------------------------------------------------------------------------


async def test_a_call_that_breaks_before_its_turn_ends_the_run(place: Place) -> None:
    place.device.hold()
    busy = place.ask(make_work(100, 1, seed=1), handoff=False, request="t/busy")
    call = place.ask(make_work(100, seed=2))
    place.device.let(1)
    await place.runs(2)
    await call.break_off()
    await place.runs(1)
    place.device.go_on()
    await busy.expect("first")
    await busy.ended()
    await place.emptied()


@pytest.mark.parametrize("moment", ["ticket", "first"])
async def test_a_call_that_breaks_with_no_fetch_ends_the_work(place: Place, moment: str) -> None:
    call = place.ask(make_work(60))
    await ticket_of(call)
    if moment == "first":
        await call.expect("first")
    await call.break_off()
    audit = await place.emptied()
    assert not audit.leases


@pytest.mark.parametrize("moment", ["filling", "sealed"])
async def test_a_call_that_breaks_during_a_fetch_leaves_it_alone(place: Place, moment: str) -> None:
    work = make_work(60)
    async with worker("d") as receiver:
        if moment == "filling":
            place.device.hold()
            place.device.let(1)
        call = place.ask(work)
        ticket = await ticket_of(call)
        if moment == "sealed":
            await call.expect("first")
        taking = asyncio.create_task(receiver.receive(ticket, to_request("moved", work, model=MODEL)))
        place.device.let(1)
        await place.opened()
        await call.break_off()
        place.device.go_on()
        taken = await taking
        assert [*taken.output, *(await receiver.written("moved"))] == alone(work)
    await place.emptied()
    assert not list(place.prefill.runs())


async def test_a_ticket_that_is_not_renewed_expires(place: Place) -> None:
    async with worker("short", lease_ms=150) as short:
        call = short.ask(make_work(30))
        await ticket_of(call)
        await call.expect("first")
        failed = await call.expect("failed")
        await call.ended()
        assert failed.failure.cause == wire.CAUSE_LEASE_OVER
        await short.emptied()


async def test_a_ticket_that_is_renewed_is_not() -> None:
    async with worker(lease_ms=400) as place:
        call = place.ask(make_work(30))
        ticket = await ticket_of(call)
        await call.expect("first")
        for _ in range(10):
            await asyncio.sleep(0.1)
            assert place.host.sender.leases.renew(ticket.id)
        assert (await place.audit()).leases[0].ticket == ticket.id
        assert (await call.expect("failed")).failure.cause == wire.CAUSE_LEASE_OVER
        await place.emptied()


async def test_a_receiver_that_releases_before_the_first_token_ends_the_run(place: Place) -> None:
    place.device.hold()
    call = place.ask(make_work(60))
    place.device.let(1)
    ticket = await ticket_of(call)
    release = wire.ReleaseRequest(ticket=ticket.id, run=ticket.run, outcome=wire.ReleaseRequest.OUTCOME_ABANDONED)
    place.device.let(1)
    await place.host.sender.release(release)
    place.device.go_on()
    assert (await call.expect("failed")).failure.cause == wire.CAUSE_PEER_LOST
    await call.ended()
    await place.emptied()


@pytest.mark.parametrize("moment", ["waiting", "computing", "parked"])
async def test_a_deadline_is_enforced(place: Place, moment: str) -> None:
    work = make_work(60)
    work.remaining_ms = 400
    if moment != "parked":
        place.device.hold()
    if moment == "computing":
        place.device.let(1)
    call = place.ask(work)
    if moment != "waiting":
        await ticket_of(call)
    if moment == "parked":
        await call.expect("first")
    failed = await call.expect("failed")
    await call.ended()
    assert failed.failure.cause == wire.CAUSE_DEADLINE
    place.device.go_on()
    await place.emptied()


async def test_a_deadline_ends_a_fetch_with_its_cause(place: Place) -> None:
    work = make_work(60)
    place.device.hold()
    place.device.let(1)
    work.remaining_ms = 1500
    async with worker("d") as receiver:
        call = place.ask(work)
        ticket = await ticket_of(call)
        taking = asyncio.create_task(receiver.receive(ticket, to_request("moved", make_work(60), model=MODEL)))
        place.device.let(1)
        assert (await call.expect("failed")).failure.cause == wire.CAUSE_DEADLINE
        place.device.go_on()
        with pytest.raises(HandoffFailed) as failed:
            await taking
        assert failed.value.cause == wire.CAUSE_DEADLINE
    await place.emptied()


async def test_a_new_owner_ends_the_call_of_the_old_one(place: Place) -> None:
    old = place.ask(make_work(30), epoch=1)
    await ticket_of(old)
    await old.expect("first")
    new = place.ask(make_work(30), epoch=2, handoff=False)
    superseded = await old.expect("superseded")
    await old.ended()
    assert (superseded.run.epoch, superseded.epoch) == (1, 2)
    await new.expect("first")
    await new.ended()
    late = place.ask(make_work(30), epoch=1)
    assert (await late.expect("superseded")).epoch == 2
    await late.ended()
    await place.emptied()


async def test_a_crash_of_the_engine_fails_its_prompts(place: Place) -> None:
    place.device.hold()
    call = place.ask(make_work(60))
    waiting = place.ask(make_work(60, seed=1), request="t/b")
    await place.runs(2)
    place.device.broken = True
    place.device.go_on()
    for each in (call, waiting):
        failed = await each.expect("failed")
        assert failed.failure.cause == wire.CAUSE_ENGINE
        await each.ended()
    refused = await place.ask(make_work(30)).expect("refused")
    assert refused.failure.cause == wire.CAUSE_ENGINE


# -- taking up --------------------------------------------------------------------------------------------------


async def test_a_request_for_another_worker_is_refused(place: Place) -> None:
    other = wire.Peer(id=place.host.peer.id, incarnation=place.host.peer.incarnation + 1, protocol=1)
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


async def test_an_unservable_request_is_refused_with_its_cause(place: Place) -> None:
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


async def test_a_draining_worker_refuses_new_requests_and_finishes_its_own(place: Place) -> None:
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


def test_the_scene_draws_different_prompts() -> None:
    assert tokens(30, 1) != tokens(30, 2)
