from __future__ import annotations

from collections.abc import Sequence

import pytest

from decant.protos import worker_pb2 as wire
from tests.worker.decode_harness import Node, make_run, make_work, routed, run_alone
from tests.worker.session_client import Router
from tests.worker.waiting import eventually


async def test_a_run_from_tokens_generates_the_text_of_one_engine() -> None:
    run, work = make_run(), make_work(30, 12)
    async with routed() as (node, router):
        await router.start(run, work)
        [record] = await router.until_ended(run)
        assert record.text(30) == run_alone(work)
        assert record.kinds == ["scheduled", "decode_started", "ended"]
        end = record.last["ended"].end
        assert (end.reason, end.end_position, end.output) == (wire.OutputEnd.REASON_LENGTH, 42, 0)
        assert record.last["decode_started"].WhichOneof("path") == "from_tokens"
        assert record.last["decode_started"].slots[0].position == 30
        await node.audit()
        assert node.decode.ended_runs == 1
        await router.forget(run)


async def test_a_run_from_a_ticket_generates_the_text_of_one_engine_and_repeats_committed_tokens() -> None:
    run, work = make_run(), make_work(30, 12)
    async with Node("p") as sender, routed() as (node, router):
        await router.start(run, work, await sender.offer(run, work))
        [record] = await router.until_ended(run)
        assert record.text(30) == run_alone(work)
        assert min(record.tokens) == 30  # the first of them was written by the sender
        assert record.kinds == ["scheduled", "decode_started", "ended"]
        handoff = record.last["decode_started"].handoff
        assert handoff.bytes == 8 * sender.device.block_bytes
        assert handoff.handoff_us > 0
        await node.audit()
        await sender.audit()


async def test_output_of_earlier_attempts_is_continued() -> None:
    work = make_work(20, 12)
    text = run_alone(work)
    for attempt, from_ticket in enumerate((False, True), start=1):
        run, rest = make_run(attempt=attempt), make_work(20, 12, written=text[:5])
        async with Node("p") as sender, routed() as (node, router):
            await router.start(run, rest, await sender.offer(run, rest) if from_ticket else None)
            [record] = await router.until_ended(run)
            assert record.text(20) == text[5:]
            assert min(record.tokens) == 25
            await node.audit()
            await sender.audit()


async def test_concurrent_requests_get_their_own_tokens() -> None:
    works = {f"t/{n}": make_work(6 + 3 * n, 10, seed=n) for n in range(12)}
    async with Node("p", blocks=256) as sender, routed(blocks=256) as (node, router):
        for n, (name, work) in enumerate(works.items()):
            run = make_run(name)
            await router.start(run, work, await sender.offer(run, work) if n % 2 else None)
        for name, record in zip(works, await router.until_ended(*map(make_run, works)), strict=True):
            assert record.text(0) == run_alone(works[name])
        await node.audit()
        await sender.audit()


async def test_a_step_is_one_frame_for_all() -> None:
    runs = [make_run(f"t/{n}") for n in range(4)]
    async with routed() as (node, router):
        node.device.seconds = 10.0  # of the first step: the others join in the second
        for n, run in enumerate(runs):
            await router.start(run, make_work(4, 30, seed=n))
        await until_all_are_admitted(node, runs)
        node.device.seconds = 0.0
        await router.until_ended(*runs)
        steps = [frame.step for frame in router.frames]
        assert steps == sorted(set(steps))
        assert any(len(frame.tokens) == 4 * 4 for frame in router.frames)


async def until_all_are_admitted(node: Node, runs: Sequence[wire.Run]) -> None:
    await eventually(lambda: len(node.decode.run_manager.executor.admission._answers) == len(runs))


async def test_log_probabilities_stand_beside_their_tokens() -> None:
    run, work = make_run(), make_work(9, 6, logprobs=2, prompt_logprobs=1)
    async with routed() as (_, router):
        await router.start(run, work)
        [record] = await router.until_ended(run)
        assert sorted(record.logprobs) == sorted(record.tokens)
        assert all(len(entry.top_ids) == 2 for entry in record.logprobs.values())
        message = record.last["prompt_logprobs"]
        assert message.first_position + len(message.logprobs) == 9
        before = dict(record.logprobs)
        record.logprobs.clear()
        await router.send(resend=wire.Resend(run=run, resume=wire.ResumePosition(output=0, position=9)))
        await router.until(lambda: len(record.logprobs) == 6)
        assert record.logprobs == before


async def test_a_start_that_comes_twice_begins_nothing() -> None:
    run, work = make_run(), make_work(30, 12)
    async with routed() as (node, router):
        node.device.seconds = 10.0
        await router.start(run, work)
        await router.start(run, work)
        held = await router.until_message(run, "run_status")
        assert held.phase in (wire.RunStatus.PHASE_WAITING, wire.RunStatus.PHASE_RUNNING)
        node.device.seconds = 0.0
        [record] = await router.until_ended(run)
        await router.start(run, work)
        await router.until(lambda: record.last["run_status"].phase == wire.RunStatus.PHASE_ENDED)
        assert record.last["run_status"].ended[0].end_position == 42
        assert record.kinds.count("ended") == 1
        assert record.text(30) == run_alone(work)


async def test_a_cached_prefix_is_reported_and_not_computed_again() -> None:
    work = make_work(32, 2)
    async with Node("p") as sender, routed() as (_, router):
        for attempt in (1, 2, 3):
            run = make_run(attempt=attempt)
            await router.start(run, work, await sender.offer(run, work) if attempt == 3 else None)
            [record] = await router.until_ended(run)
            assert record.last["scheduled"].cached_tokens == (0 if attempt == 1 else 28)
            assert record.text(32) == run_alone(work)


async def test_max_tokens_capped_by_the_context_length_end_with_the_context_length() -> None:
    run, work = make_run(), make_work(9, 5)
    work.stopping.capped_by_context_length = True
    async with routed() as (_, router):
        await router.start(run, work)
        [record] = await router.until_ended(run)
        assert record.last["ended"].end.reason == wire.OutputEnd.REASON_CONTEXT_LENGTH


async def test_preemptions_are_counted_and_change_no_text() -> None:
    runs = [make_run(f"t/{n}") for n in range(4)]
    works = [make_work(12, 24, seed=n) for n in range(4)]
    async with routed(blocks=24) as (node, router):
        node.device.seconds = 10.0  # of the first step: the others join in the second
        for run, work in zip(runs, works, strict=True):
            await router.start(run, work)
        await until_all_are_admitted(node, runs)
        node.device.seconds = 0.0
        records = await router.until_ended(*runs)
        assert [record.text(12) for record in records] == [run_alone(work) for work in works]
        assert sum(record.last["ended"].preemptions for record in records) == node.engine.load().preemptions > 0


# -- refusals ---------------------------------------------------------------------------------------------------


async def test_an_unacceptable_start_is_refused_with_its_cause() -> None:
    async with Node("p") as sender, routed(blocks=16, max_waiting=3) as (node, router):
        other = make_work()
        other.model = "another"
        two = make_work()
        two.outputs.add(output=0)
        odd = make_work()
        odd.sampling.top_p = 3
        tickets = [await sender.offer(make_run("t/good", attempt=attempt), make_work()) for attempt in (8, 9, 11)]
        layout, salt, foreign = tickets
        layout.layout_hash += 1
        salt.salt = b"another"
        cases: list[tuple[wire.EngineRequest, wire.Ticket | None, wire.Cause, str]] = [
            (other, None, wire.CAUSE_UNKNOWN_MODEL, "model"),
            (two, None, wire.CAUSE_INVALID, "outputs"),
            (odd, None, wire.CAUSE_INVALID, "sampling.top_p"),
            (make_work(4, 4, written=[1, 2, 3, 4]), None, wire.CAUSE_INVALID, "stopping.max_tokens"),
            (make_work(60, 5), None, wire.CAUSE_NEVER_FITS, ""),
            (make_work(65, 1), None, wire.CAUSE_NEVER_FITS, ""),
            (make_work(remaining_ms=0), None, wire.CAUSE_DEADLINE, ""),
            (make_work(), layout, wire.CAUSE_LAYOUT_DIFFERS, ""),
            (make_work(), salt, wire.CAUSE_SALT_DIFFERS, ""),
            (make_work(), foreign, wire.CAUSE_INVALID, "ticket.run"),
        ]
        for attempt, (work, ticket, cause, field) in enumerate(cases, start=1):
            run = make_run("t/good", attempt=attempt)
            await router.start(run, work, ticket)
            refused = await router.until_message(run, "refused")
            assert (refused.failure.cause, refused.failure.violation.field) == (cause, field)
        assert not list(node.decode.runs())
        for ticket in tickets:
            await sender.host.sender.release(wire.ReleaseRequest(ticket=ticket.id))


async def test_more_than_may_wait_is_refused() -> None:
    runs = [make_run(f"t/{n}") for n in range(5)]
    async with routed(running=1, max_waiting=2) as (node, router):
        node.device.seconds = 0.02
        await router.start(runs[0], make_work(4, 400))
        await router.until_tokens(runs[0], 1)
        for run in runs[1:]:
            await router.start(run, make_work(4, 3))
        await router.until_ended(*runs[3:])
        node.device.seconds = 0.0
        records = await router.until_ended(*runs)
        assert [record.outcome for record in records] == ["ended", "ended", "ended", "refused", "refused"]
        assert {record.last["refused"].failure.cause for record in records[3:]} == {wire.CAUSE_BUSY}


async def test_a_lower_epoch_is_superseded_and_a_higher_one_starts_a_new_run() -> None:
    work = make_work(8, 60)
    async with Node("d") as node, Router(node, "old") as old, Router(node, "new") as new:
        node.device.seconds = 0.005
        await old.start(make_run(epoch=1), work)
        await old.until_tokens(make_run(), 2)
        await new.start(make_run(epoch=2), work)
        assert (await old.until_message(make_run(), "superseded")).epoch == 2
        await old.start(make_run(epoch=1, attempt=2), work)
        assert (await old.until_message(make_run(attempt=2), "superseded")).epoch == 2
        [record] = await new.until_ended(make_run())
        assert record.text(8) == run_alone(work)
        assert [run.epoch for run, *_ in node.decode.runs()] == [2]


@pytest.mark.parametrize("length", [1, 3, 4, 5, 16, 17])
async def test_prompts_of_every_length_are_handed_over(length: int) -> None:
    run, work = make_run(), make_work(length, 6)
    async with Node("p") as sender, routed() as (_, router):
        await router.start(run, work, await sender.offer(run, work))
        [record] = await router.until_ended(run)
        assert record.text(length) == run_alone(work)
