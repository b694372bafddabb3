from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator
from functools import partial
from typing import Any, cast

import grpc
import pytest

from decant.engine.engine import Engine
from decant.engine.plan import StepPlan
from decant.handoff.codec import Received, decode
from decant.handoff.errors import HandoffFailed
from decant.handoff.heartbeat import with_heartbeat_timeout
from decant.handoff.receiver import ReceiverTiming
from decant.handoff.sender import SenderTiming
from decant.handoff.service import KvSourceService
from decant.handoff.transport import FETCH, GrpcTransport
from decant.protos import worker_pb2 as wire
from decant.runtime.errors import InvalidArgument, ServiceError
from decant.runtime.serving.interceptor import ErrorInterceptor
from tests.handoff.factories import Wire, Worker, ask
from tests.handoff.harness import TRANSPORTS, Transport, connect, hand_over
from tests.worker.waiting import PATIENCE, advance, eventually, expire


@TRANSPORTS
async def test_a_broken_fetch_is_reported_and_costs_one_lease(transport: Transport) -> None:
    request = ask(length=64)
    async with Worker("p", cost=lambda _: 0.05) as sender, Worker("d") as receiver:
        async with transport(sender) as source:
            ticket, arrival = await sender.offer(request), await receiver.reserve(request)

            def wrote(*block: Any, write: Any = arrival.write) -> None:
                write(*block)
                task.cancel()

            arrival.write = wrote  # type: ignore[method-assign, assignment]
            task = asyncio.create_task(receiver.receiver.receive(source, ticket, arrival))
            await asyncio.wait([task], timeout=PATIENCE)
        assert task.cancelled()
        await sender.emptied()
        await receiver.emptied()


async def test_whatever_grpc_raises_is_a_lost_sender() -> None:
    transport = GrpcTransport(connect)
    source = transport.source("127.0.0.1:1")
    with transport.channels.borrow("127.0.0.1:1") as channel:
        await channel.close()

        async def requests() -> AsyncIterator[wire.FetchRequest]:
            yield wire.FetchRequest()

        with pytest.raises(ConnectionError, match="closed"):
            async for _ in source.fetch(requests()):
                pass
        with pytest.raises(ConnectionError, match="closed"):
            await source.release(wire.ReleaseRequest(), PATIENCE)
    await transport.close()


async def test_an_unreachable_sender_is_lost() -> None:
    transport = GrpcTransport(connect)
    async with Worker("p", lease_ms=600_000) as sender, Worker("d") as receiver:
        ticket, arrival = await sender.offer(ask()), await receiver.reserve(ask())
        with pytest.raises(HandoffFailed) as failed:
            await receiver.receiver.receive(transport.source("127.0.0.1:1"), ticket, arrival)
        assert failed.value.cause == wire.CAUSE_PEER_LOST
        await receiver.emptied()
        expire(sender.sender.leases)
        await sender.emptied()
    await transport.close()


async def test_a_silent_sender_is_lost_after_its_time() -> None:
    class Silent(Wire):
        async def fetch(self, requests: AsyncIterable[wire.FetchRequest]) -> AsyncGenerator[Received, None]:
            async for received in super().fetch(requests):
                if received.response.HasField("commit"):
                    await asyncio.sleep(3600)
                yield received

    timing = ReceiverTiming(silent_s=0.3)
    async with Worker("p") as sender, Worker("d", receiver_timing=timing) as receiver:
        ticket, arrival = await sender.offer(ask()), await receiver.reserve(ask())
        with pytest.raises(HandoffFailed) as failed:
            await asyncio.wait_for(receiver.receiver.receive(Silent(sender.sender), ticket, arrival), PATIENCE)
        assert (failed.value.cause, failed.value.detail) == (wire.CAUSE_PEER_LOST, "sender p was silent for 0.3 s")
        await receiver.emptied()
        await sender.emptied()


async def test_an_unopened_ticket_ends_with_its_lease_unless_it_is_renewed() -> None:
    async with Worker("p", lease_ms=600_000) as sender:
        ticket = await sender.offer(ask())
        for _ in range(4):
            advance(400)
            await asyncio.sleep(0.01)
            assert sender.sender.leases.renew(ticket.id)
        assert await sender.num_held_blocks()
        advance(600)
        await sender.emptied()
        assert sender.num_expired == 1
        assert not sender.sender.leases.renew(ticket.id)


@pytest.mark.rule(
    "broken-fetch-frees-blocks",
    "handoff/sender.py:KvSender._responses",
    "handoff/sender.py:KvSender._receive_acks",
)
@pytest.mark.parametrize("is_silent", [False, True], ids=["closed connection", "silence"])
async def test_the_blocks_of_a_lost_receiver_are_free_long_before_the_lease(
    is_silent: bool,
) -> None:
    timing = SenderTiming(silent_s=0.3 if is_silent else 600.0)
    async with Worker("p", lease_ms=600_000, timing=timing) as sender, Worker("d") as receiver:
        request = ask()
        ticket, arrival = await sender.offer(request), await receiver.reserve(request)

        async def dies() -> AsyncIterator[wire.FetchRequest]:
            yield wire.FetchRequest(open=receiver.receiver._open(ticket, arrival))
            if is_silent:
                await asyncio.sleep(3600)

        # Nothing is read after the first message, so that the commit is never sent.
        async with contextlib.aclosing(sender.sender.fetch(dies())) as responses:
            await anext(responses)
            if is_silent:
                await sender.emptied()
            else:
                await eventually(lambda: sender.sender._outgoing["r"].is_parked)
        await sender.emptied()
        assert not sender.sender.leases.all()
        assert sender.num_expired == 0
        assert [lease.failure.cause for lease in sender.ended_leases if lease.failure] == [wire.CAUSE_PEER_LOST]
        await receiver.loop.call(lambda _: arrival.abort())


@pytest.mark.rule(
    "committed-ticket-waits-for-release", "handoff/leases.py:LeaseTable.commit", "handoff/leases.py:LeaseTable._timer"
)
async def test_blocks_of_a_receiver_lost_after_the_commit_are_free_before_the_lease() -> None:
    timing = SenderTiming(committed_s=60.0)
    async with Worker("p", lease_ms=600_000, timing=timing) as sender, Worker("d") as receiver:
        request = ask()
        ticket, arrival = await sender.offer(request), await receiver.reserve(request)

        async def opens() -> AsyncIterator[wire.FetchRequest]:
            yield wire.FetchRequest(open=receiver.receiver._open(ticket, arrival))

        responses = [decode(message).response async for message in sender.sender.fetch(opens())]
        assert responses[-1].HasField("commit")
        assert await sender.num_held_blocks()
        advance(60)
        await sender.emptied()
        assert sender.num_expired == 1
        await receiver.loop.call(lambda _: arrival.abort())


async def test_a_message_of_a_receiver_that_cannot_be_decoded_ends_its_fetch_and_frees_the_blocks() -> None:
    gate = threading.Event()  # the prompt is not computed before the message was read

    def waits(_: StepPlan) -> float:
        gate.wait(60)
        return 0.0

    async with Worker("p", lease_ms=600_000, cost=waits) as sender, Worker("d") as receiver:
        request = ask()
        ticket, arrival = await sender.offer(request), await receiver.reserve(request)
        errors: list[ServiceError] = []
        server = grpc.aio.server(interceptors=[ErrorInterceptor(errors.append)])
        KvSourceService(sender.sender).add_to(server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        opening = wire.FetchRequest(open=receiver.receiver._open(ticket, arrival)).SerializeToString()
        async with connect(f"127.0.0.1:{port}") as channel:
            call: Any = channel.stream_stream(FETCH)(cast(Any, iter([opening, b"\xff\xff"])))
            with contextlib.suppress(grpc.aio.AioRpcError):
                async for _ in call:
                    pass
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert [type(error) for error in errors] == [InvalidArgument]
        gate.set()
        await sender.emptied()
        await server.stop(None)
        await receiver.loop.call(lambda _: arrival.abort())


@pytest.mark.slow
async def test_a_stall_of_the_receivers_own_loop_is_not_silence_of_the_sender() -> None:
    async def sends() -> AsyncIterator[int]:
        for number in range(3):
            await asyncio.sleep(0.01)
            yield number

    received = []
    async for number in with_heartbeat_timeout(sends(), "the sender", 0.5):
        received.append(number)
        asyncio.get_running_loop().call_soon(time.sleep, 0.8)  # longer than the limit, while it waits for a message
    assert received == [0, 1, 2]


@pytest.mark.rule("reclaimed-after-last-read", "handoff/sender.py:KvSender._free")
@pytest.mark.parametrize("message_bytes", [64, 20])
async def test_nothing_is_read_once_the_lease_is_over(message_bytes: int) -> None:
    """Blocks have 32 bytes: two in a message, or one in two messages."""
    async with Worker("p", message_bytes=message_bytes) as sender, Worker("d", message_bytes=message_bytes) as receiver:
        ticket, arrival = await sender.offer(ask(length=60)), await receiver.reserve(ask(length=60))

        async def opens() -> AsyncIterator[wire.FetchRequest]:
            yield wire.FetchRequest(open=receiver.receiver._open(ticket, arrival))

        async with contextlib.aclosing(sender.sender.fetch(opens())) as messages:
            assert decode(await anext(messages)).response.HasField("kv_chunk")
            await sender.sender.release(wire.ReleaseRequest(ticket=ticket.id))
            rest = [decode(message).response async for message in messages]
        assert [response.WhichOneof("message") for response in rest] == ["closed"]
        assert rest[0].closed.failure.cause == wire.CAUSE_RECLAIMED
        await sender.emptied()
        await receiver.loop.call(lambda _: arrival.abort())


@pytest.mark.rule("reclaimed-after-last-read", "handoff/outgoing_sequence.py:OutgoingSequence.cancel")
async def test_nothing_is_read_if_the_lease_ends_as_the_engine_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Worker("p") as sender, Worker("d") as receiver:
        ticket, arrival = await sender.offer(ask(length=60)), await receiver.reserve(ask(length=60))
        answer = sender.loop.call

        async def answers(*command: Any, **undo: Any) -> Any:
            export = await answer(*command, **undo)
            asyncio.get_running_loop().call_soon(sender.sender.leases.expire, ticket.id)
            await asyncio.sleep(0)
            return export

        async def opens() -> AsyncIterator[wire.FetchRequest]:
            yield wire.FetchRequest(open=receiver.receiver._open(ticket, arrival))

        async with contextlib.aclosing(sender.sender.fetch(opens())) as messages:
            with monkeypatch.context() as patch:
                patch.setattr(sender.loop, "call", answers)
                responses = [decode(message).response async for message in messages]
        assert [response.WhichOneof("message") for response in responses] == ["closed"]
        assert responses[0].closed.failure.cause == wire.CAUSE_LEASE_EXPIRED
        await sender.emptied()
        await receiver.loop.call(lambda _: arrival.abort())


async def test_cancelling_the_receiver_frees_both_ends() -> None:
    async with Worker("p") as sender, Worker("d") as receiver:
        for delay in (0, 0.001, 0.005, 0.02):
            request = ask(f"r{delay}", length=60)
            task = asyncio.create_task(hand_over(sender, receiver, request))
            await asyncio.sleep(delay)
            task.cancel()
            await asyncio.wait([task])
            for worker in (sender, receiver):
                await worker.loop.call(partial(Engine.cancel, id=request.id))
        await sender.emptied()
        await receiver.emptied()
