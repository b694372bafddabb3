from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import pytest

from decant.engine.plan import StepPlan, StepResult
from decant.engine.transfer import BlockAddress
from decant.handoff.codec import Received, decode
from decant.handoff.errors import HandoffFailed, SequenceAlreadyFinished
from decant.handoff.service import KvSourceService
from decant.handoff.transport import GrpcTransport
from decant.protos import worker_pb2 as wire
from decant.runtime.packed import unpack
from tests.handoff.factories import Wire, Worker, ask, run_alone
from tests.handoff.harness import TRANSPORTS, Transport, connect, hand_over
from tests.worker.waiting import PATIENCE, advance, eventually


@TRANSPORTS
@pytest.mark.parametrize("length", [1, 3, 4, 5, 30, 64])
async def test_a_handoff_generates_the_text_of_one_engine(transport: Transport, length: int) -> None:
    request = ask(length=length)
    async with Worker("p") as sender, Worker("d") as receiver, transport(sender) as source:
        ticket = await sender.offer(request)
        taken = await receiver.receiver.receive(source, ticket, await receiver.reserve(request))
        text = await receiver.finished("r")
        assert sender.tokens["r"] + text == await run_alone(request)
        assert list(unpack(taken.outputs[0].tokens)) == sender.tokens["r"]
        await sender.emptied()
        await receiver.emptied()


@TRANSPORTS
async def test_blocks_travel_while_the_prompt_is_still_being_computed(transport: Transport) -> None:
    request = ask(length=240)
    began: dict[tuple[int, int], int] = {}

    def waits(_: StepPlan) -> float:
        return 0.0 if began else 0.05

    async with Worker("p", cost=waits) as sender, Worker("d") as receiver, transport(sender) as source:
        arrival = await receiver.reserve(request)

        def wrote(address: BlockAddress, *rest: Any, write: Any = arrival.write) -> None:
            began.setdefault(address, len(sender.engine.parked))
            write(address, *rest)

        arrival.write = wrote  # type: ignore[method-assign, assignment]
        await receiver.receiver.receive(source, await sender.offer(request), arrival)
        await receiver.finished("r")
    assert began[0, 0] == 0, "the first block waited for the last"


@pytest.mark.rule("ack-renews-fetch", "handoff/sender.py:KvSender._receive_acks")
@pytest.mark.slow
@TRANSPORTS
async def test_a_fetch_lasts_longer_than_a_lease_while_its_runs_are_acknowledged(transport: Transport) -> None:
    request, steps = ask(length=64), threading.Semaphore(0)

    def waits(_: StepPlan) -> float:
        steps.acquire(timeout=PATIENCE)
        return 0.0

    async with (
        Worker("p", lease_ms=600_000, cost=waits) as sender,
        Worker("d") as receiver,
        transport(sender) as source,
    ):
        ticket, arrival = await sender.offer(request), await receiver.reserve(request)
        fetching = asyncio.create_task(receiver.receiver.receive(source, ticket, arrival))
        [lease] = sender.sender.leases.all()
        for _ in range(7):  # of eight steps
            before = lease.timer.when()
            steps.release()
            await eventually(lambda: lease.timer.when() > before)  # noqa: B023 - awaited here
            advance(400)
        steps.release()
        await fetching
        assert sender.tokens["r"] + await receiver.finished("r") == await run_alone(request)
        assert not sender.num_expired


@pytest.mark.rule(
    "joined-sequence-independent-of-sender",
    "handoff/receiver.py:KvReceiver.receive",
    "handoff/receiver.py:KvReceiver._send_release",
)
async def test_a_joined_sequence_does_not_wait_for_its_sender() -> None:
    received = asyncio.Event()

    class SlowSource(Wire):
        async def release(self, request: wire.ReleaseRequest, seconds: float) -> None:
            await received.wait()
            await super().release(request, seconds)

    request = ask()
    async with Worker("p") as sender, Worker("d") as receiver:
        source = SlowSource(sender.sender)
        async with asyncio.timeout(20):
            await receiver.receiver.receive(source, await sender.offer(request), await receiver.reserve(request))
            assert sender.tokens["r"] + await receiver.finished("r") == await run_alone(request)
        assert await sender.num_held_blocks()
        closing = asyncio.create_task(receiver.receiver.close())
        assert not (await asyncio.wait([closing], timeout=0.05))[0]
        received.set()
        async with asyncio.timeout(20):
            await closing
        assert [release.outcome for release in source.released] == [wire.ReleaseRequest.OUTCOME_OWNED]
        await sender.emptied()


@pytest.mark.rule(
    "cached-blocks-not-sent", "handoff/receiver.py:KvReceiver._open", "engine/exports.py:KvTransfers.export"
)
async def test_blocks_that_the_receiver_has_cached_are_not_sent() -> None:
    request, moved = ask(length=32), []

    def count(message: wire.FetchResponse) -> list[wire.FetchResponse]:
        moved.append(len(message.kv_chunk.data))
        return [message]

    async with Worker("p") as sender, Worker("d") as receiver:
        await receiver.loop.call(lambda engine: engine.add(ask("before", length=32, wanted=1)))
        await receiver.finished("before")
        await hand_over(sender, receiver, request, count)
        assert sender.tokens["r"] + await receiver.finished("r") == await run_alone(request)
    assert sum(moved) == sender.engine.device.block_bytes  # seven of eight blocks were there


async def test_concurrent_requests_get_their_own_tokens() -> None:
    requests = [ask(f"r{n}", length=9 + 3 * n, seed=n) for n in range(8)]
    async with Worker("p", blocks=128) as sender, Worker("d", blocks=128) as receiver:
        await asyncio.gather(*(hand_over(sender, receiver, request) for request in requests))
        texts = [sender.tokens[r.id] + await receiver.finished(r.id) for r in requests]
        assert texts == [await run_alone(request) for request in requests]
        await sender.emptied()
        await receiver.emptied()


@pytest.mark.rule(
    "unknown-messages-ignored", "handoff/receiver.py:_Fetch.handle", "handoff/sender.py:KvSender._receive_acks"
)
async def test_messages_of_an_unknown_kind_are_ignored_by_both_ends_of_a_fetch() -> None:
    unknown = b"\x9a\x06\x00"  # field 99

    class Newer(Wire):
        async def fetch(self, requests: AsyncIterable[wire.FetchRequest]) -> AsyncGenerator[Received, None]:
            async def more() -> AsyncIterator[wire.FetchRequest]:
                async for request in requests:
                    yield request
                    yield wire.FetchRequest.FromString(unknown)

            yield decode(unknown)
            async for received in super().fetch(more()):
                yield received

    async with Worker("p") as sender, Worker("d") as receiver:
        request = ask()
        ticket, arrival = await sender.offer(request), await receiver.reserve(request)
        await receiver.receiver.receive(Newer(sender.sender), ticket, arrival)
        assert sender.tokens["r"] + await receiver.finished("r") == await run_alone(request)


async def test_channels_to_senders_are_closed_when_they_are_idle_and_never_in_a_call() -> None:
    opened: list[grpc.aio.Channel] = []

    def connects(address: str) -> grpc.aio.Channel:
        opened.append(connect(address))
        return opened[-1]

    transport = GrpcTransport(connects, idle_seconds=0.05)
    async with Worker("p") as sender, Worker("d") as receiver:
        server = grpc.aio.server()
        KvSourceService(sender.sender).add_to(server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        source = transport.source(address)
        await server.start()
        for n in range(2):
            request = ask(f"r{n}")
            ticket, arrival = await sender.offer(request), await receiver.reserve(request)
            with transport.channels.borrow(address):  # another call
                await receiver.receiver.receive(source, ticket, arrival)
                await receiver.finished(f"r{n}")
                await asyncio.sleep(0.2)
                assert len(transport.channels) == 1
            async with asyncio.timeout(60):
                while len(transport.channels):  # noqa: ASYNC110 - a channel's end has no event
                    await asyncio.sleep(0.02)
        assert len(opened) == 2
        async with asyncio.timeout(60):  # a channel that is no longer kept takes its time to close
            while not all(channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN for channel in opened):  # noqa: ASYNC110 - the same
                await asyncio.sleep(0.02)
        await server.stop(None)
        await transport.close()


async def test_a_sequence_that_ends_at_the_sender_leaves_nothing_to_fetch() -> None:
    async with Worker("p") as sender, Worker("d") as receiver:
        with pytest.raises(SequenceAlreadyFinished):
            await hand_over(sender, receiver, ask(wanted=1))
        await sender.emptied()
        await receiver.emptied()


async def test_a_sequence_that_fails_at_the_sender_ends_its_fetch_with_the_reason() -> None:
    async with Worker("p") as sender, Worker("d") as receiver:
        run = sender.engine.device.run

        def fails(plan: StepPlan) -> StepResult:
            return replace(run(plan), failed={0: "its logits are not finite"})

        sender.engine.device.run = fails  # type: ignore[method-assign]
        with pytest.raises(HandoffFailed) as failed:
            await hand_over(sender, receiver, ask())
        assert (failed.value.cause, failed.value.detail) == (wire.CAUSE_ENGINE, "its logits are not finite")
        await sender.emptied()
        await receiver.emptied()


async def test_a_ticket_opens_once_and_only_for_what_it_names() -> None:
    async with Worker("p") as sender, Worker("d") as receiver:
        ticket, arrival = await sender.offer(ask()), await receiver.reserve(ask())
        good = receiver.receiver._open(ticket, arrival)
        wrong: dict[wire.Cause, dict[str, Any]] = {
            wire.CAUSE_LEASE_EXPIRED: {"ticket": b"0123456789abcdef"},
            wire.CAUSE_WRONG_PEER: {"sender": wire.Peer(id="p", incarnation=2)},
            wire.CAUSE_UNKNOWN_RUN: {"run": wire.Run(request="r", epoch=1, attempt=2)},
            wire.CAUSE_LAYOUT_DIFFERS: {"layout_hash": 1},
            wire.CAUSE_SALT_DIFFERS: {"salt": b"another"},
        }
        for cause, change in wrong.items():
            opening = wire.Open()
            opening.CopyFrom(good)
            opening.MergeFrom(wire.Open(**change))
            assert await first_message(sender, opening) == cause
        await receiver.receiver.receive(Wire(sender.sender), ticket, arrival)
        assert await first_message(sender, good) == wire.CAUSE_LEASE_EXPIRED
        await receiver.finished("r")


async def first_message(sender: Worker, opening: wire.Open) -> wire.Cause:
    async def says() -> AsyncIterator[wire.FetchRequest]:
        yield wire.FetchRequest(open=opening)

    async with contextlib.aclosing(sender.sender.fetch(says())) as responses:
        response = await anext(responses)
    return decode(response).response.closed.failure.cause
