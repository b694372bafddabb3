from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from decant.handoff.codec import Received
from decant.handoff.transport import KvSource, Transport
from decant.protos import worker_pb2 as wire
from decant.worker.decode import notifications
from tests.worker.decode_harness import Node, make_run, make_work, routed, run_alone
from tests.worker.waiting import advance, eventually, expire

LONG = 600_000
"""Lease in milliseconds that never runs out by itself in a test."""


async def test_an_unreachable_sender_is_named() -> None:
    run, work = make_run(), make_work()
    async with Node("p", lease_ms=LONG) as sender, routed() as (node, router):
        ticket = await sender.offer(run, work)
        ticket.address = "127.0.0.1:1"
        await router.start(run, work, ticket)
        failure = (await router.until_message(run, "failed")).failure
        assert (failure.cause, failure.peer) == (wire.CAUSE_PEER_LOST, sender.peer)
        assert not list(node.decode.runs())
        await node.audit()
        expire(sender.host.sender.leases)
        await sender.audit()


async def test_an_expired_ticket_is_reported_and_the_next_attempt_succeeds() -> None:
    work = make_work(30, 8)
    async with Node("p", lease_ms=LONG) as sender, routed() as (node, router):
        run = make_run()
        ticket = await sender.offer(run, work)
        advance(sender.host.lease_s)
        await eventually(lambda: not sender.host.sender.leases.all())
        await router.start(run, work, ticket)
        failure = (await router.until_message(run, "failed")).failure
        assert (failure.cause, failure.peer) == (wire.CAUSE_LEASE_EXPIRED, sender.peer)
        again = make_run(attempt=2)
        await router.start(again, work)
        [record] = await router.until_ended(again)
        assert record.text(30) == run_alone(work)
        await node.audit()


async def test_a_sender_killed_during_a_fetch_is_lost_soon() -> None:
    run, work = make_run(), make_work(60, 8)
    async with Node("p", lease_ms=LONG) as sender, routed() as (node, router):
        sender.device.seconds = 0.5
        await router.start(run, work, await sender.offer(run, work))
        await router.until_message(run, "scheduled")
        await sender._server.stop(None)
        failure = (await router.until_message(run, "failed")).failure
        assert (failure.cause, failure.peer) == (wire.CAUSE_PEER_LOST, sender.peer)
        await node.audit()
        expire(sender.host.sender.leases)


async def test_an_output_that_ended_with_its_first_token_leaves_nothing_to_fetch() -> None:
    run, work = make_run(), make_work(10, 1)
    async with Node("p") as sender, routed() as (node, router):
        await router.start(run, work, await sender.offer(run, work))
        failure = (await router.until_message(run, "failed")).failure
        assert failure.cause == wire.CAUSE_CANCELLED
        assert "nothing is left" in failure.detail
        await node.audit()
        await sender.audit()


class Tampered:
    memory = None

    def __init__(self, transport: Transport, tamper: Callable[[Received], Received]) -> None:
        self._transport = transport
        self._tamper = tamper

    def source(self, address: str) -> KvSource:
        source = self._transport.source(address)
        fetch = source.fetch

        async def tampered(requests: AsyncIterator[wire.FetchRequest]) -> AsyncIterator[Received]:
            async for received in fetch(requests):
                yield self._tamper(received)

        source.fetch = tampered  # type: ignore[method-assign, assignment]
        return source


async def test_bytes_that_do_not_match_their_checksum_are_never_decoded() -> None:
    run, work = make_run(), make_work(30, 8)

    def flip(received: Received) -> Received:
        if not received.data:
            return received
        changed = bytearray(received.data)
        changed[3] ^= 1
        return Received(received.response, memoryview(changed))

    async with Node("p") as sender, routed() as (node, router):
        node.host.transport = Tampered(node.host.transport, flip)
        await router.start(run, work, await sender.offer(run, work))
        assert (await router.until_message(run, "failed")).failure.cause == wire.CAUSE_CORRUPT
        assert not router.record_of(run).tokens
        await node.audit()
        await sender.audit()


async def test_a_bug_of_a_transport_ends_the_run_all_the_same() -> None:
    run, work = make_run(), make_work(30, 8)

    def break_down(received: Received) -> Received:
        raise ZeroDivisionError("a bug")

    async with Node("p") as sender, routed() as (node, router):
        node.host.transport = Tampered(node.host.transport, break_down)
        await router.start(run, work, await sender.offer(run, work))
        failure = (await router.until_message(run, "failed")).failure
        assert (failure.cause, failure.detail) == (wire.CAUSE_ENGINE, "ZeroDivisionError: a bug")
        await node.audit()
        await sender.audit()


async def test_a_bug_after_a_fetch_ends_the_sequence_in_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def break_down(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(notifications.RunNotifier, "tokens_from", break_down)
    run, work = make_run(), make_work(30, 60)
    async with Node("p") as sender, routed() as (node, router):
        node.device.seconds = 0.02
        await router.start(run, work, await sender.offer(run, work))
        failure = (await router.until_message(run, "failed")).failure
        assert (failure.cause, failure.detail) == (wire.CAUSE_ENGINE, "ZeroDivisionError: a bug")
        await node.audit()
        await sender.audit()
        assert node.engine.steps < 50, "the sequence was cancelled, not completed"


async def test_a_worker_can_fetch_from_itself() -> None:
    run, work = make_run(), make_work(30, 8)
    async with routed() as (node, router):
        await router.start(run, work, await node.offer(run, work))
        [record] = await router.until_ended(run)
        assert record.text(30) == run_alone(work)
        await node.audit()


async def test_committed_tokens_precede_the_first_step_when_many_runs_join_at_once() -> None:
    runs = [make_run(f"t/{n}") for n in range(8)]
    works = [make_work(20, 1 + n, seed=n) for n in range(1, 9)]
    async with Node("p", blocks=256) as sender, routed(blocks=256) as (node, router):
        tickets = await asyncio.gather(*(sender.offer(run, work) for run, work in zip(runs, works, strict=True)))
        for run, work, ticket in zip(runs, works, tickets, strict=True):
            await router.start(run, work, ticket)
        for record, work in zip(await router.until_ended(*runs), works, strict=True):
            assert record.kinds == ["scheduled", "decode_started", "ended"]
            assert record.text(20) == run_alone(work)
            assert record.last["ended"].end.end_position == 20 + len(record.tokens)
        await node.audit()
        await sender.audit()
