from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from decant.handoff.errors import HandoffFailed, SequenceAlreadyFinished
from decant.protos import worker_pb2 as wire
from tests.worker.harness import MODEL, WorkerHarness, make_work, run_alone, ticket_of, worker
from tests.worker.requests import to_request


async def test_ticket_first_token_and_cache_come_in_this_order(harness: WorkerHarness) -> None:
    work = make_work(30)
    async with worker("d") as receiver:
        call = harness.ask(work)
        ticket = await ticket_of(call)
        first = await call.expect("first")
        taken = await receiver.receive(ticket, to_request("moved", work, model=MODEL))
        await call.ended()
        assert [first.tokens[0].token, *(await receiver.written("moved"))] == run_alone(work)
        assert taken.received_bytes == 8 * harness.host.transfer_layout.block_bytes
    assert (ticket.run.request, ticket.sender, ticket.address) == ("t/a", harness.host.peer, harness.address)
    assert (ticket.layout_hash, ticket.salt, ticket.tokens) == (harness.host.layout_hash, b"tenant", 30)
    assert (list(ticket.outputs), ticket.lease_ms, len(ticket.id)) == ([0], 30_000, 16)
    assert (first.cached_tokens, first.tokens[0].HasField("finished")) == (0, False)
    assert first.prefill_us > 0
    await harness.emptied()


@pytest.mark.rule("ticket-with-first-chunk", "worker/prefill/execution.py:PrefillExecutor.execute")
async def test_the_ticket_comes_with_the_first_chunk_not_with_the_last(harness: WorkerHarness) -> None:
    harness.device.hold()
    call = harness.ask(make_work(50))  # four steps of 16 tokens
    harness.device.let(1)
    await ticket_of(call)
    assert not harness.outputs, "no token yet"
    assert harness.host.sender.leases.all()
    harness.device.go_on()
    await call.expect("first")
    await call.break_off()


async def test_a_first_token_doesnt_wait_for_a_ticket_of_the_same_step(harness: WorkerHarness) -> None:
    work = make_work(15, 5)
    async with worker("d") as receiver:
        call = harness.ask(work)
        event = await call.next()
        assert event is not None
        await receiver.receive(await ticket_of(call), to_request("moved", work, model=MODEL))
        await call.ended()
        assert [event.first.tokens[0].token, *(await receiver.written("moved"))] == run_alone(work)
    await harness.emptied()


async def test_cached_tokens_are_reported(harness: WorkerHarness) -> None:
    for expected in (0, 28):
        call = harness.ask(make_work(30, 1), handoff=False)
        first = await call.expect("first")
        await call.ended()
        assert first.cached_tokens == expected


async def test_prefill_continues_the_output_of_earlier_attempts(harness: WorkerHarness) -> None:
    whole = run_alone(make_work(20, 10))
    work = make_work(20, 10, written=whole[:4])
    async with worker("d") as receiver:
        call = harness.ask(work)
        ticket = await ticket_of(call)
        assert ticket.tokens == 24
        first = await call.expect("first")
        assert first.tokens[0].token == whole[4]
        await receiver.receive(ticket, to_request("moved", work, model=MODEL))
        await call.ended()
        assert await receiver.written("moved") == whole[5:]


async def test_logprobs_of_prompt_and_first_token(harness: WorkerHarness) -> None:
    work = make_work(40, 1)
    work.logprobs, work.prompt_logprobs = 2, 1
    call, chunks, position = harness.ask(work, handoff=False), 0, 1
    while (event := await call.next()) is not None and event.HasField("prompt_logprobs"):
        part = event.prompt_logprobs
        assert part.first_position == position
        assert [entry.entry for entry in part.logprobs] == list(range(len(part.logprobs)))
        assert all(len(entry.top_ids) == 1 for entry in part.logprobs)
        position += len(part.logprobs)
        chunks += 1
    assert position == 40
    assert chunks > 1, "as chunks are computed"
    assert event is not None
    logprobs = event.first.tokens[0].logprobs
    assert (logprobs.entry, len(logprobs.top_ids)) == (0, 2)
    await call.ended()


@pytest.mark.parametrize("wanted", [1, 10])
async def test_one_token_without_a_ticket_keeps_no_blocks(harness: WorkerHarness, wanted: int) -> None:
    work = make_work(30, wanted)
    call = harness.ask(work, handoff=False)
    first = await call.expect("first")
    await call.ended()
    assert first.tokens[0].token == run_alone(work)[0]
    assert first.tokens[0].HasField("finished") is (wanted == 1)
    audit = await harness.audit()
    assert (audit.owned_blocks, audit.leased_blocks, len(audit.leases)) == (0, 0, 0)


@pytest.mark.parametrize(
    ("cut", "reason"), [(False, wire.OutputEnd.REASON_LENGTH), (True, wire.OutputEnd.REASON_CONTEXT_LENGTH)]
)
async def test_a_first_token_that_is_the_last_is_marked(
    harness: WorkerHarness, cut: bool, reason: wire.OutputEnd.Reason
) -> None:
    work = make_work(30, 1)
    work.stopping.capped_by_context_length = cut
    call = harness.ask(work, handoff=False)
    end = (await call.expect("first")).tokens[0].finished
    assert (end.reason, end.end_position, end.output) == (reason, 31, 0)
    await call.ended()


@pytest.mark.rule(
    "nothing-fetched-after-a-last-token",
    "worker/prefill/execution.py:PrefillExecutor._release",
    "handoff/sender.py:KvSender._messages",
)
@pytest.mark.parametrize("opened", ["before", "after"])
async def test_a_first_token_that_ends_the_sequence_closes_the_fetch_without_failure(opened: str) -> None:
    work = make_work(40)
    eos = run_alone(work)[0]
    async with worker(eos=eos) as harness, worker("d", eos=eos) as receiver:
        harness.device.hold()
        call = harness.ask(work)
        harness.device.let(1)
        ticket = await ticket_of(call)
        taking = asyncio.create_task(receiver.receive(ticket, to_request("moved", work, model=MODEL)))
        if opened == "before":
            harness.device.let(1)
            await harness.opened()
        else:
            taking.cancel()
        harness.device.go_on()
        end = (await call.expect("first")).tokens[0].finished
        await call.ended()
        assert end.reason == wire.OutputEnd.REASON_STOP
        if opened == "after":
            assert not (await harness.audit()).leased_blocks
            taking = asyncio.create_task(receiver.receive(ticket, to_request("late", work, model=MODEL)))
        with pytest.raises(SequenceAlreadyFinished if opened == "before" else (SequenceAlreadyFinished, HandoffFailed)):
            await taking
        await receiver.emptied()


@pytest.mark.parametrize("pooling", [wire.Embedding.POOLING_LAST, wire.Embedding.POOLING_MEAN])
async def test_an_embedding_comes_before_the_first_token_and_keeps_no_blocks(
    harness: WorkerHarness, pooling: wire.Embedding.Pooling
) -> None:
    work = make_work(30, 1)
    work.embedding.CopyFrom(wire.Embedding(pooling=pooling, dimensions=3, normalize=True))
    call = harness.ask(work, handoff=False)
    values = (await call.expect("embedding")).values
    assert len(values) == 3 * 4
    await call.expect("first")
    await call.ended()
    audit = await harness.audit()
    assert (audit.owned_blocks, audit.leased_blocks) == (0, 0)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"embedding": wire.Embedding()}, "pooling"),
        ({"embedding": wire.Embedding(pooling=wire.Embedding.POOLING_LAST, dimensions=99)}, "dimensions"),
        ({"outputs": [wire.OutputPrefix(output=0), wire.OutputPrefix(output=1)]}, "outputs"),
        ({"stopping": wire.Stopping(max_tokens=2)}, "stopping.max_tokens"),
    ],
)
async def test_an_embedding_that_the_worker_does_not_return_is_refused(
    harness: WorkerHarness, change: dict[str, Any], field: str
) -> None:
    work = make_work(30, 1)
    work.embedding.pooling = wire.Embedding.POOLING_LAST
    for name in change:
        work.ClearField(cast(Any, name))
    work.MergeFrom(wire.EngineRequest(**change))
    refused = await harness.ask(work, handoff=False).expect("refused")
    assert refused.failure.violation.field == field
