from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from decant.engine.block_hashes import hash_blocks, root_hash
from decant.engine.engine import Engine
from decant.protos import worker_pb2 as wire
from decant.runtime.packed import unpack
from tests.worker.decode_harness import Node, make_run, make_work, owned, run_alone
from tests.worker.session_client import Router
from tests.worker.waiting import advance, eventually

LONG = 600_000
"""Longer than any test: only a message can free blocks."""
STATES = ["waiting for blocks", "arriving", "waiting its turn", "in its prompt", "running", "running after a handoff"]


@dataclass
class Harness:
    sender: Node
    node: Node
    router: Router
    run: wire.Run
    engine_request: wire.EngineRequest


@asynccontextmanager
async def run_in_state(state: str, **more: Any) -> AsyncIterator[Harness]:
    run, work = make_run(), make_work(40, 80, **more)
    blocks, running = (40, 8) if state == "waiting for blocks" else (128, 1 if state == "waiting its turn" else 8)
    decode = Node("d", blocks=blocks, running=running, lease_ms=LONG)
    async with Node("p", lease_ms=LONG) as sender, decode as node, Router(node) as router:
        harness = Harness(sender, node, router, run, work)
        await REACH[state](harness)
        yield harness
        node.device.seconds = sender.device.seconds = 0.0
        await sender.audit()
        await node.audit()


async def crowd(harness: Harness, length: int) -> None:
    other = make_run("t/crowd")
    harness.node.device.seconds = 0.05
    await harness.router.start(other, make_work(length, 30, seed=9))
    await harness.router.until_tokens(other, 1)
    harness.node.device.seconds = 0.1


async def waits_for_room(harness: Harness) -> None:
    await crowd(harness, 130)
    await harness.router.start(
        harness.run, harness.engine_request, await harness.sender.offer(harness.run, harness.engine_request)
    )
    await eventually(lambda: harness.node.host.num_waiting() == 1)


async def arrives(harness: Harness) -> None:
    harness.sender.device.seconds = 10.0  # until the end of the harness
    await harness.router.start(
        harness.run, harness.engine_request, await harness.sender.offer(harness.run, harness.engine_request)
    )
    await harness.router.until_message(harness.run, "scheduled")
    assert harness.node.decode.fetches_receiving == 1


async def waits_its_turn(harness: Harness) -> None:
    await crowd(harness, 4)
    await harness.router.start(harness.run, harness.engine_request)
    await eventually(lambda: len(list(harness.node.decode.runs())) == 2)


async def in_its_prompt(harness: Harness) -> None:
    harness.node.device.seconds = 0.8
    await harness.router.start(harness.run, harness.engine_request)
    await harness.router.until_message(harness.run, "scheduled")


async def runs(harness: Harness) -> None:
    harness.node.device.seconds = 0.05
    await harness.router.start(harness.run, harness.engine_request)
    await harness.router.until_tokens(harness.run, 2)


async def runs_after_a_handoff(harness: Harness) -> None:
    harness.node.device.seconds = 0.05
    await harness.router.start(
        harness.run, harness.engine_request, await harness.sender.offer(harness.run, harness.engine_request)
    )
    await harness.router.until_tokens(harness.run, 3)


REACH = dict(
    zip(STATES, (waits_for_room, arrives, waits_its_turn, in_its_prompt, runs, runs_after_a_handoff), strict=True)
)


@pytest.mark.slow
@pytest.mark.parametrize("state", STATES)
async def test_a_cancel_ends_a_run_in_every_state_and_frees_all(state: str) -> None:
    async with run_in_state(state) as harness:
        await harness.router.cancel(harness.run)
        ended = await harness.router.until_message(harness.run, "ended")
        assert ended.end.reason == wire.OutputEnd.REASON_CANCELLED
        assert ended.end.end_position >= 40
        text = harness.router.record_of(harness.run).text(40)
        assert text == run_alone(harness.engine_request)[: len(text)]
        await harness.router.cancel(make_run("t/crowd"))


@pytest.mark.rule("forgetting-cancels", "worker/decode/run_manager.py:DecodeRunManager.forget")
@pytest.mark.slow
@pytest.mark.parametrize("state", STATES)
async def test_forgetting_a_run_that_has_not_ended_cancels_it(state: str) -> None:
    async with run_in_state(state) as harness, Router(harness.node, "another") as another:
        await another.forget(harness.run)
        ended = await harness.router.until_message(harness.run, "ended")
        assert ended.end.reason == wire.OutputEnd.REASON_CANCELLED
        text = harness.router.record_of(harness.run).text(40)
        assert text == run_alone(harness.engine_request)[: len(text)]
        await eventually(lambda: harness.run not in [run for run, *_ in harness.node.decode.runs()])
        await harness.router.cancel(make_run("t/crowd"))


@pytest.mark.slow
@pytest.mark.parametrize("state", STATES)
async def test_time_that_is_over_ends_a_run_in_every_state(state: str) -> None:
    async with run_in_state(state, remaining_ms=LONG // 2) as harness:
        advance(LONG / 2 / 1000)
        ended = await harness.router.until_message(harness.run, "ended")
        assert ended.end.reason == wire.OutputEnd.REASON_DEADLINE
        await harness.router.cancel(make_run("t/crowd"))


@pytest.mark.rule(
    "orphan-cancelled-after-lease",
    "worker/decode/ownership.py:RunOwnership.on_session_end",
    "worker/decode/execution.py:RunExecutor.start_orphan_timer",
)
@pytest.mark.slow
@pytest.mark.parametrize("state", STATES)
async def test_runs_of_a_broken_session_are_kept_for_one_lease_in_every_state(state: str) -> None:
    async with run_in_state(state) as harness:
        await harness.router.leave()
        advance(0.9 * harness.node.host.lease_s)
        await asyncio.sleep(0.05)
        assert harness.run in [run for run, *_ in harness.node.decode.runs()]
        advance(0.1 * harness.node.host.lease_s)
        await eventually(lambda: not list(harness.node.decode.runs()))
        assert harness.node.decode.orphans == 0
        assert not await harness.node.host.loop.call(lambda engine: set(engine.sequences)), "it is not decoded"


@pytest.mark.slow
@pytest.mark.parametrize("state", STATES)
async def test_a_router_that_comes_back_has_its_run_in_every_state(state: str) -> None:
    async with run_in_state(state) as harness:
        run, router = harness.run, harness.router
        await router.leave()
        assert harness.node.decode.orphans >= 1
        position = max(router.record_of(run).tokens, default=39) + 1
        welcome = await router.open(owned(run, position), owned(make_run("t/never")))
        assert [held.run for held in welcome.runs] == [run]
        assert [lacking.request for lacking in welcome.unknown_runs] == ["t/never"]
        assert welcome.runs[0].slots[0].position == position
        assert {orphan.request for orphan in welcome.orphans} <= {"t/crowd"}
        harness.node.device.seconds = harness.sender.device.seconds = 0.0
        await router.cancel(make_run("t/crowd"))
        await router.until_message(run, "ended")
        assert router.record_of(run).text(40) == run_alone(harness.engine_request)


@pytest.mark.rule(
    "tokens-kept-until-forgotten", "worker/decode/output.py:Output", "worker/decode/execution.py:RunExecutor._finish"
)
async def test_an_ended_run_is_ended_again_and_keeps_its_tokens() -> None:
    run, work = make_run(), make_work(10, 6)
    async with Node("d") as node, Router(node) as router:
        await router.start(run, work)
        await router.until_message(run, "ended")
        await router.cancel(run)
        await router.until(lambda: router.record_of(run).kinds.count("ended") == 2)
        assert router.record_of(run).last["ended"].end.reason == wire.OutputEnd.REASON_LENGTH
        router.record_of(run).tokens.clear()
        await router.send(resend=wire.Resend(run=run, resume=wire.ResumePosition(output=0, position=12)))
        await router.until_tokens(run, 4)
        assert router.record_of(run).text(10) == run_alone(work)[2:]


@pytest.mark.rule(
    "cancel-before-start",
    "worker/decode/run_table.py:RunTable.add_tombstone",
    "worker/decode/start_validation.py:StartValidator._check_now",
)
async def test_a_cancel_before_its_start_refuses_it_for_one_lease() -> None:
    async with Node("d", lease_ms=LONG) as node, Router(node) as router:
        await router.cancel(make_run(epoch=2))
        await router.start(make_run(epoch=2), make_work())
        assert (await router.until_message(make_run(), "refused")).failure.cause == wire.CAUSE_CANCELLED
        assert node.decode.cancel_tombstones == 1
        await router.start(make_run(epoch=3), make_work())  # another owner's attempt of the same number
        await router.until_message(make_run(), "ended")
        advance(LONG / 1000)
        await eventually(lambda: node.decode.cancel_tombstones == 0)
        await router.forget(make_run(epoch=3))
        await router.start(make_run(epoch=3, attempt=2), make_work())
        await router.until_message(make_run(attempt=2), "ended")


async def test_tokens_behind_a_stop_string_are_not_kept() -> None:
    run, work = make_run(), make_work(10, 400)
    async with Node("d") as node, Router(node) as router:
        node.device.seconds = 0.01
        await router.start(run, work)
        await router.until_tokens(run, 8)
        await router.cancel(run, wire.Cancel.REASON_STOP_STRING, end_position=15)
        assert (await router.until_message(run, "ended")).end.end_position == 15
        router.record_of(run).tokens.clear()
        await router.send(resend=wire.Resend(run=run, resume=wire.ResumePosition(output=0, position=10)))
        await router.until_tokens(run, 5)
        await router.cancel(run)  # answered after all that was sent again
        await router.until(lambda: router.record_of(run).kinds.count("ended") == 2)
        assert router.record_of(run).text(10) == run_alone(work)[:5]


@pytest.mark.rule(
    "nothing-after-a-stop-string",
    "worker/decode/run_manager.py:DecodeRunManager.cancel",
    "worker/decode/output.py:Output.truncate",
    "worker/decode/execution.py:RunExecutor._finish",
)
@pytest.mark.parametrize("ends_by_itself", [False, True])
async def test_tokens_behind_a_stop_string_are_not_cached_as_output(ends_by_itself: bool) -> None:
    run, work = make_run(), make_work(10, 60 if ends_by_itself else 400)
    async with Node("d") as node, Router(node) as router:
        node.device.seconds = 0.002
        await router.start(run, work)
        await router.until_tokens(run, 60 if ends_by_itself else 30)
        if ends_by_itself:
            await router.until_message(run, "ended")
        node.device.seconds = 0.05
        await router.cancel(run, wire.Cancel.REASON_STOP_STRING, end_position=10 + 9)
        ends = 2 if ends_by_itself else 1  # a cancel is answered, also of what has ended
        await router.until(lambda: router.record_of(run).kinds.count("ended") == ends)
        tokens = [*unpack(work.prompt), *run_alone(work)]
        size = node.host.block_size

        def cached(engine: Engine) -> int:
            return sum(
                bool(engine.pool.index.find(block_hash))
                for block_hash in hash_blocks(root_hash(work.salt), tokens, size)
            )

        assert await node.host.loop.call(cached) == 19 // size


async def test_a_cancel_of_another_output_ends_nothing() -> None:
    run, work = make_run(), make_work(10, 30)
    async with Node("d") as node, Router(node) as router:
        node.device.seconds = 0.005
        await router.start(run, work)
        await router.cancel(run, output=3)
        assert (await router.until_message(run, "ended")).end.reason == wire.OutputEnd.REASON_LENGTH


# -- blocks -------------------------------------------------------------------------------------------------------


@pytest.mark.rule(
    "reservations-by-priority-and-age",
    "worker/decode/admission.py:DecodeAdmission.enter",
    "worker/wire_codec.py:queue_key",
)
@pytest.mark.slow
async def test_blocks_go_by_priority_then_age_and_no_run_overtakes() -> None:
    priorities = {"t/late": 0, "t/urgent": 5, "t/old": 0, "t/tokens": 0}
    works = {name: make_work(60, 3, seed=n, priority=level) for n, (name, level) in enumerate(priorities.items())}
    works["t/old"].age_ms = 9000
    async with Node("p", blocks=256) as sender, Node("d", blocks=40) as node, Router(node) as router:
        node.device.seconds = 0.2
        await router.start(make_run("t/crowd"), make_work(120, 30, seed=9))
        await router.until_tokens(make_run("t/crowd"), 1)
        for name, work in works.items():
            run = make_run(name)
            await router.start(run, work, None if name == "t/tokens" else await sender.offer(run, work))
        await eventually(lambda: node.host.num_waiting() == 4)
        node.device.seconds = 0.0
        await router.until_ended(*map(make_run, works))
        order = [request for request, _ in router.scheduled]
        assert [name for name in order if name != "t/tokens"] == ["t/crowd", "t/urgent", "t/old", "t/late"]
        assert order.index("t/tokens") > order.index("t/old")
        for name, work in works.items():
            assert router.record_of(make_run(name)).text(60) == run_alone(work)
        assert node.host.num_waiting() == 0
        await sender.audit()


async def test_blocks_that_become_free_while_nothing_decodes_are_noticed() -> None:
    held, run = make_run("t/held"), make_run()
    work, big = make_work(60, 4), make_work(100, 4, seed=1)
    async with Node("p") as sender, Node("d", blocks=40) as node, Router(node) as router:
        ticket = await node.offer(held, big)
        await eventually(lambda: len(node.engine.parked) == 1)
        await router.start(run, work, await sender.offer(run, work))
        await eventually(lambda: node.host.num_waiting() == 1)
        await node.host.sender.release(wire.ReleaseRequest(ticket=ticket.id))
        await router.until_message(run, "ended")
        assert router.record_of(run).text(60) == run_alone(work)
        await sender.audit()


@pytest.mark.rule(
    "ticket-renewed-until-opened",
    "worker/decode/ownership.py:RunOwnership.unopened_tickets_of",
    "worker/decode/service.py:DecodeService._make_heartbeat",
)
@pytest.mark.slow
async def test_tickets_that_wait_are_renewed_until_they_are_opened() -> None:
    async with run_in_state("waiting for blocks") as harness:
        lease = harness.sender.host.sender.leases.all()[0]
        heartbeats = harness.router.heartbeats
        await harness.router.until(lambda: any(lease.ticket.id in heartbeat.renew for heartbeat in heartbeats))
        await harness.router.cancel(make_run("t/crowd"))
        await harness.router.until_message(harness.run, "scheduled")
        harness.router.heartbeats.clear()
        await harness.router.until(lambda: len(harness.router.heartbeats) >= 2)
        assert not any(heartbeat.renew for heartbeat in harness.router.heartbeats)
        await harness.router.cancel(harness.run)
        await harness.router.until_ended(harness.run)


async def test_cancels_at_any_moment_of_an_arrival_leave_nothing() -> None:
    async with Node("p", lease_ms=LONG) as sender, Node("d", lease_ms=LONG) as node, Router(node) as router:
        node.device.seconds = sender.device.seconds = 0.001
        runs = [make_run(f"t/{n}") for n in range(24)]
        for n, run in enumerate(runs):
            work = make_work(60, 8, seed=n)
            await router.start(run, work, await sender.offer(run, work))
            await asyncio.sleep(0.002 * (n % 12))
            await router.cancel(run)
        assert {record.outcome for record in await router.until_ended(*runs)} == {"ended"}
        await node.audit()
        await sender.audit()
