from __future__ import annotations

import asyncio

from decant.engine.engine import Engine
from decant.protos import worker_pb2 as wire
from tests.worker.harness import MODEL, make_work, worker
from tests.worker.requests import to_request


async def test_rows_and_counts_match_a_busy_worker() -> None:
    async with worker(blocks=64) as harness:
        call = harness.ask(make_work(30))
        ticket = await call.expect("ticket")
        await call.expect("first")
        audit = await harness.audit()
        assert (audit.worker, audit.role) == (harness.host.peer, wire.ROLE_PREFILL)
        assert (audit.total_blocks, audit.block_bytes) == (64, harness.host.transfer_layout.block_bytes)
        assert (audit.free_blocks, audit.cached_blocks, audit.owned_blocks, audit.leased_blocks) == (56, 0, 0, 8)
        (owner,), (lease,) = audit.owners, audit.leases
        assert (owner.run, owner.output, owner.phase, owner.blocks) == (ticket.run, 0, wire.RunStatus.PHASE_RUNNING, 8)
        assert (lease.ticket, lease.run, lease.blocks) == (ticket.id, ticket.run, 8)
        assert 0 < lease.remaining_ms <= 30_000
        assert not lease.HasField("receiver")
        await call.break_off()
        audit = await harness.emptied()
        assert (audit.free_blocks, audit.cached_blocks) == (57, 7), "whole blocks can be hit"


async def test_shared_blocks_are_counted_once() -> None:
    async with worker(blocks=64) as harness:
        calls = [harness.ask(make_work(30), request="t/a")]
        await calls[0].expect("ticket")
        await calls[0].expect("first")
        calls.append(harness.ask(make_work(30), request="t/b"))
        await calls[1].expect("ticket")
        await calls[1].expect("first")
        audit = await harness.audit()
        assert [lease.blocks for lease in audit.leases] == [8, 8]
        assert audit.leased_blocks == 9, "seven are the same"
        for call in calls:
            await call.break_off()


async def test_a_sequence_without_an_owner_is_a_violation() -> None:
    async with worker() as harness:
        harness.device.hold()
        harness.device.let(1)
        stray = to_request("stray", make_work(30, 40), model=MODEL)
        await harness.host.loop.call(lambda engine: engine.add(stray))
        auditing = asyncio.create_task(harness.auditor.audit())
        await asyncio.sleep(0)
        harness.device.let(2)  # an answer comes with a step
        (violation,) = (await auditing).violations
        assert "stray" in violation
        harness.device.go_on()
        await harness.written("stray")


async def test_violations_of_the_block_pool_are_reported_and_not_raised() -> None:
    async with worker() as harness:

        def lose(engine: Engine) -> None:
            engine.pool._free.pop()

        await harness.host.loop.call(lose)
        violations = (await harness.auditor.audit()).violations
        assert any("in no state" in violation for violation in violations)
        assert any("63 of 64" in violation for violation in violations)
        await harness.host.loop.call(lambda engine: engine.pool._free.append(0))
