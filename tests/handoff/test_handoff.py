"""A cache changes owner, or it does not: never half."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, cast

import grpc
import pytest

from decant.engine.engine import Engine
from decant.engine.kv_layout import FULL, Kind, Window
from decant.engine.plan import StepPlan
from decant.engine.request import Request
from decant.engine.transfer import BlockAddress
from decant.handoff import packing
from decant.handoff.codec import Received, decode
from decant.handoff.errors import HandoffFailed, SequenceAlreadyFinished
from decant.handoff.heartbeat import with_heartbeat_timeout
from decant.handoff.packing import MESSAGE_BYTES, TransferLayout, message_sum
from decant.handoff.sender import SenderTiming
from decant.handoff.service import KvSourceService
from decant.handoff.transport import FETCH, GrpcTransport, KvSource
from decant.protos import worker_pb2 as wire
from decant.runtime.errors import InvalidArgument, ServiceError
from decant.runtime.interceptor import ErrorInterceptor
from tests.handoff.factories import LAYOUT, Tamper, Wire, Worker, alone, ask

Transport = Callable[[Worker], AbstractAsyncContextManager[KvSource]]


async def hand_over(sender: Worker, receiver: Worker, request: Request, tamper: Tamper | None = None) -> Wire:
    """The whole way, from the prompt on the sender to a running sequence on the receiver."""
    ticket = await sender.offer(request)
    arrival = await receiver.room(request)
    source = Wire(sender.sender, tamper) if tamper else Wire(sender.sender)
    await receiver.receiver.receive(source, ticket, arrival)
    return source


@asynccontextmanager
async def direct(sender: Worker) -> AsyncIterator[KvSource]:
    yield Wire(sender.sender)


@asynccontextmanager
async def grpc_source(sender: Worker) -> AsyncIterator[KvSource]:
    server = grpc.aio.server()
    KvSourceService(sender.sender).add_to(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    transport = GrpcTransport(connect)
    try:
        yield transport.source(f"127.0.0.1:{port}")
    finally:
        await transport.close()
        await server.stop(None)


def connect(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address)


TRANSPORTS = pytest.mark.parametrize("transport", [direct, grpc_source])


@TRANSPORTS
@pytest.mark.parametrize("length", [1, 3, 4, 5, 30, 64])
async def test_a_handoff_generates_the_text_of_one_engine(transport: Transport, length: int) -> None:
    request = ask(length=length)
    async with Worker("p") as sender, Worker("d") as receiver, transport(sender) as source:
        ticket = await sender.offer(request)
        taken = await receiver.receiver.receive(source, ticket, await receiver.room(request))
        text = await receiver.finished("r")
        assert sender.tokens["r"] + text == await alone(request)
        assert list(taken.output) == sender.tokens["r"]
        await sender.emptied()
        await receiver.emptied()


GROUPS = (FULL, Window(Kind.SLIDING, 9), Window(Kind.CHUNKED, 6))


@pytest.mark.parametrize("message_bytes", [MESSAGE_BYTES, 20])
@pytest.mark.parametrize("length", [1, 5, 30, 64])
async def test_the_blocks_of_all_cache_groups_are_handed_over(
    length: int, message_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a window only those that a later token sees; many blocks in a message, and one in two."""
    monkeypatch.setattr(packing, "MESSAGE_BYTES", message_bytes)
    request, positions = ask(length=length), set[tuple[int, int]]()

    def note(message: wire.FetchResponse) -> list[wire.FetchResponse]:
        if message.HasField("kv_chunk"):
            count = max(1, len(message.kv_chunk.block_checksums))
            first = message.kv_chunk.first_position // 4
            positions.update((message.kv_chunk.group, first + at) for at in range(count))
        return [message]

    workers = [Worker(name, blocks=192, windows=GROUPS) for name in "pd"]
    async with workers[0] as sender, workers[1] as receiver:
        await hand_over(sender, receiver, request, note)
        assert sender.tokens["r"] + await receiver.finished("r") == await alone(request, GROUPS)
        await sender.emptied()
        await receiver.emptied()
    stop = -(-length // 4)
    firsts = [window.first_block(length, 4) for window in GROUPS]
    for group, first in enumerate(firsts):
        sent = {index for of, index in positions if of == group}
        assert set(range(first, stop)) <= sent <= set(range(max(0, first - 1), stop))


@TRANSPORTS
async def test_blocks_travel_while_the_prompt_is_still_being_computed(transport: Transport) -> None:
    """The fetch is opened before the prompt is read, on a device whose steps take a while."""
    request = ask(length=64)
    async with Worker("p", cost=lambda _: 0.02) as sender, Worker("d") as receiver, transport(sender) as source:
        room = await receiver.room(request)
        began: dict[tuple[int, int], int] = {}

        def wrote(address: BlockAddress, *rest: Any, write: Any = room.write) -> None:
            began.setdefault(address, sender.engine.load().parked)
            write(address, *rest)

        room.write = wrote  # type: ignore[method-assign, assignment]
        await receiver.receiver.receive(source, await sender.offer(request), room)
        await receiver.finished("r")
    assert began[0, 0] == 0, "the first block waited for the last"


@pytest.mark.slow
@TRANSPORTS
async def test_a_fetch_lasts_longer_than_a_lease_while_its_runs_are_acknowledged(transport: Transport) -> None:
    request = ask(length=64)
    async with (
        Worker("p", lease_ms=1200, cost=lambda _: 0.4) as sender,
        Worker("d") as receiver,
        transport(sender) as source,
    ):
        await receiver.receiver.receive(source, await sender.offer(request), await receiver.room(request))
        assert sender.tokens["r"] + await receiver.finished("r") == await alone(request)
        assert not sender.sender.expired


async def test_a_joined_sequence_does_not_wait_for_its_sender() -> None:
    """The sender is notified meanwhile; only the end of the receiver waits for that."""
    heard = asyncio.Event()

    class Deaf(Wire):
        async def release(self, request: wire.ReleaseRequest, seconds: float) -> None:
            await heard.wait()
            await super().release(request, seconds)

    request = ask()
    async with Worker("p") as sender, Worker("d") as receiver:
        source = Deaf(sender.sender)
        async with asyncio.timeout(20):
            await receiver.receiver.receive(source, await sender.offer(request), await receiver.room(request))
            assert sender.tokens["r"] + await receiver.finished("r") == await alone(request)
        assert await sender.held()
        closing = asyncio.create_task(receiver.receiver.close())
        assert not (await asyncio.wait([closing], timeout=0.05))[0]
        heard.set()
        async with asyncio.timeout(20):
            await closing
        assert [release.outcome for release in source.released] == [wire.ReleaseRequest.OUTCOME_OWNED]
        await sender.emptied()


@TRANSPORTS
async def test_a_broken_fetch_is_reported_and_costs_one_lease(transport: Transport) -> None:
    request = ask(length=64)
    async with Worker("p", lease_ms=500, cost=lambda _: 0.05) as sender, Worker("d") as receiver:
        async with transport(sender) as source:
            ticket, room = await sender.offer(request), await receiver.room(request)
            task = asyncio.create_task(receiver.receiver.receive(source, ticket, room))
            await asyncio.sleep(0.15)
            task.cancel()
            await asyncio.wait([task])
        assert task.cancelled()
        await sender.emptied()
        await receiver.emptied()


async def test_an_unreachable_sender_is_lost() -> None:
    transport = GrpcTransport(connect)
    async with Worker("p", lease_ms=300) as sender, Worker("d") as receiver:
        ticket, room = await sender.offer(ask()), await receiver.room(ask())
        with pytest.raises(HandoffFailed) as failed:
            await receiver.receiver.receive(transport.source("127.0.0.1:1"), ticket, room)
        assert failed.value.cause == wire.CAUSE_PEER_LOST
        await receiver.emptied()
        await sender.emptied()
    await transport.close()


async def test_blocks_that_the_receiver_has_cached_are_not_sent() -> None:
    request, moved = ask(length=32), []

    def count(message: wire.FetchResponse) -> list[wire.FetchResponse]:
        moved.append(len(message.kv_chunk.data))
        return [message]

    async with Worker("p") as sender, Worker("d") as receiver:
        await receiver.loop.call(lambda engine: engine.add(ask("before", length=32, wanted=1)))
        await receiver.finished("before")
        await hand_over(sender, receiver, request, count)
        assert sender.tokens["r"] + await receiver.finished("r") == await alone(request)
    assert sum(moved) == sender.engine.device.block_bytes  # seven of eight blocks were there


async def test_many_at_once_each_get_their_own() -> None:
    requests = [ask(f"r{n}", length=9 + 3 * n, seed=n) for n in range(8)]
    async with Worker("p", blocks=128) as sender, Worker("d", blocks=128) as receiver:
        await asyncio.gather(*(hand_over(sender, receiver, request) for request in requests))
        texts = [sender.tokens[r.id] + await receiver.finished(r.id) for r in requests]
        assert texts == [await alone(request) for request in requests]
        await sender.emptied()
        await receiver.emptied()


def flip(message: wire.FetchResponse) -> list[wire.FetchResponse]:
    if message.kv_chunk.data:
        message.kv_chunk.data = bytes([message.kv_chunk.data[0] ^ 1]) + message.kv_chunk.data[1:]
    return [message]


def truncate(message: wire.FetchResponse) -> list[wire.FetchResponse]:
    if message.kv_chunk.data:
        message.kv_chunk.data = message.kv_chunk.data[:-1]
    return [message]


def drop_runs(message: wire.FetchResponse) -> list[wire.FetchResponse]:
    return [] if message.HasField("kv_chunk") else [message]


def move(message: wire.FetchResponse) -> list[wire.FetchResponse]:
    if message.kv_chunk.data:
        message.kv_chunk.first_position += 4
    return [message]


def forge_seal(message: wire.FetchResponse) -> list[wire.FetchResponse]:
    if message.HasField("commit"):
        tokens = message.commit.outputs[0].tokens
        message.commit.outputs[0].tokens = bytes([(tokens[0] + 1) % 64]) + tokens[1:]
    return [message]


def odd_logprobs(message: wire.FetchResponse) -> list[wire.FetchResponse]:
    if message.HasField("commit"):
        message.commit.outputs[0].logprobs.add(top_ids=[1, 2], top_logprobs=[-1])
    return [message]


def early_seal(message: wire.FetchResponse) -> list[wire.FetchResponse]:
    return [message] if message.HasField("heartbeat") else [wire.FetchResponse(commit=wire.TransferCommit(computed=4))]


def regroup(message: wire.FetchResponse) -> list[wire.FetchResponse]:
    if message.HasField("kv_chunk"):
        message.kv_chunk.group += 1
    return [message]


def forge_sum(message: wire.FetchResponse) -> list[wire.FetchResponse]:
    if message.kv_chunk.block_checksums:
        message.kv_chunk.block_checksums[0] ^= 1
    return [message]


def another_run(message: wire.FetchResponse) -> list[wire.FetchResponse]:
    """A message as an earlier attempt sent it."""
    if message.HasField("kv_chunk"):
        stale = wire.Run(request="r", epoch=1, attempt=0)
        shape = TransferLayout(4, 32, LAYOUT)
        message.kv_chunk.checksum = message_sum(stale, shape, message.kv_chunk, len(message.kv_chunk.data))
    return [message]


def double(message: wire.FetchResponse) -> list[wire.FetchResponse]:
    """The first block's bytes where the last one's belong."""
    half = len(message.kv_chunk.data) // 2
    if half:
        message.kv_chunk.data = message.kv_chunk.data[:half] * 2
    return [message]


def swap(message: wire.FetchResponse) -> list[wire.FetchResponse]:
    """Two halves in each other's place."""
    half = len(message.kv_chunk.data) // 2
    if half:
        message.kv_chunk.data = message.kv_chunk.data[half:] + message.kv_chunk.data[:half]
    return [message]


TAMPERS = [
    flip,
    truncate,
    drop_runs,
    move,
    regroup,
    forge_sum,
    another_run,
    double,
    swap,
    forge_seal,
    odd_logprobs,
    early_seal,
]


@pytest.mark.parametrize("message_bytes", [MESSAGE_BYTES, 20])
@pytest.mark.parametrize("tamper", TAMPERS)
async def test_a_mismatched_open_is_refused_and_everything_is_freed(
    tamper: Tamper, message_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of 32 bytes: many in a message, and one in two."""
    monkeypatch.setattr(packing, "MESSAGE_BYTES", message_bytes)
    request = ask()
    async with Worker("p") as sender, Worker("d") as receiver:
        with pytest.raises(HandoffFailed) as failed:
            await hand_over(sender, receiver, request, tamper)
        assert failed.value.cause == wire.CAUSE_CORRUPT
        await sender.emptied()
        await receiver.emptied()
        assert "r" not in receiver.tokens
        await receiver.loop.call(lambda engine: engine.add(request))  # the next attempt, from tokens
        assert await receiver.finished("r") == await alone(request)


async def test_blocks_larger_than_a_message_arrive_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "MESSAGE_BYTES", 20)
    request = ask()
    async with Worker("p") as sender, Worker("d") as receiver:
        await hand_over(sender, receiver, request)
        assert sender.tokens["r"] + await receiver.finished("r") == await alone(request)


async def test_a_silent_sender_is_lost_within_seconds() -> None:
    class Silent(Wire):
        async def fetch(self, requests: AsyncIterable[wire.FetchRequest]) -> AsyncGenerator[Received, None]:
            async for received in super().fetch(requests):
                if received.response.HasField("commit"):
                    await asyncio.sleep(3600)
                yield received

    async with Worker("p", lease_ms=500) as sender, Worker("d") as receiver:
        ticket, arrival = await sender.offer(ask()), await receiver.room(ask())
        with pytest.raises(HandoffFailed) as failed:
            await asyncio.wait_for(receiver.receiver.receive(Silent(sender.sender), ticket, arrival), 5)
        assert failed.value.cause == wire.CAUSE_PEER_LOST
        await receiver.emptied()
        await sender.emptied()


async def test_an_unopened_ticket_ends_with_its_lease_unless_it_is_renewed() -> None:
    async with Worker("p", lease_ms=400) as sender:
        ticket = await sender.offer(ask())
        for _ in range(4):
            await asyncio.sleep(0.2)
            assert sender.sender.leases.renew(ticket.id)
        assert await sender.held()
        await sender.emptied()
        assert sender.sender.expired == 1
        assert not sender.sender.leases.renew(ticket.id)


@pytest.mark.parametrize("is_silent", [False, True], ids=["closed connection", "silence"])
async def test_the_blocks_of_a_receiver_that_dies_are_free_long_before_the_lease(
    is_silent: bool,
) -> None:
    timing = SenderTiming(silent_s=0.3)
    async with Worker("p", lease_ms=600_000, timing=timing) as sender, Worker("d") as receiver:
        request = ask()
        ticket, arrival = await sender.offer(request), await receiver.room(request)

        async def dies() -> AsyncIterator[wire.FetchRequest]:
            yield wire.FetchRequest(open=receiver.receiver._open(ticket, arrival))
            if is_silent:
                await asyncio.sleep(3600)

        # Nothing is read after the first message, so that the seal is never sent.
        async with contextlib.aclosing(sender.sender.fetch(dies())) as responses:
            await anext(responses)
            if is_silent:
                await sender.emptied()
        await sender.emptied()
        assert not sender.sender.leases.all()
        assert sender.sender.expired == 0
        await receiver.loop.call(lambda _: arrival.abort())


async def test_the_blocks_of_a_receiver_that_dies_after_the_commit_are_free_long_before_the_lease() -> None:
    timing = SenderTiming(committed_s=0.1)
    async with Worker("p", lease_ms=600_000, timing=timing) as sender, Worker("d") as receiver:
        request = ask()
        ticket, arrival = await sender.offer(request), await receiver.room(request)

        async def opens() -> AsyncIterator[wire.FetchRequest]:
            yield wire.FetchRequest(open=receiver.receiver._open(ticket, arrival))

        responses = [decode(message).response async for message in sender.sender.fetch(opens())]
        assert responses[-1].HasField("commit")
        await sender.emptied()
        assert sender.sender.expired == 1
        await receiver.loop.call(lambda _: arrival.abort())


async def test_a_message_of_a_receiver_that_cannot_be_decoded_ends_its_fetch_and_frees_the_blocks() -> None:
    gate = threading.Event()  # the prompt is not computed before the message was read

    def waits(_: StepPlan) -> float:
        gate.wait(60)
        return 0.0

    async with Worker("p", lease_ms=600_000, cost=waits) as sender, Worker("d") as receiver:
        request = ask()
        ticket, arrival = await sender.offer(request), await receiver.room(request)
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
        ticket, arrival = await sender.offer(request), await receiver.room(request)
        await receiver.receiver.receive(Newer(sender.sender), ticket, arrival)
        assert sender.tokens["r"] + await receiver.finished("r") == await alone(request)


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
            ticket, arrival = await sender.offer(request), await receiver.room(request)
            with transport._borrow(address):  # another call
                await receiver.receiver.receive(source, ticket, arrival)
                await receiver.finished(f"r{n}")
                await asyncio.sleep(0.2)
                assert len(transport) == 1
            async with asyncio.timeout(60):
                while len(transport):  # noqa: ASYNC110 - a channel's end has no event
                    await asyncio.sleep(0.02)
        assert len(opened) == 2
        assert all(channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN for channel in opened)
        await server.stop(None)
        await transport.close()


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


@pytest.mark.parametrize("message_bytes", [64, 20])
async def test_nothing_is_read_once_the_lease_is_over(message_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 32 bytes, two in a message and one in two."""
    monkeypatch.setattr(packing, "MESSAGE_BYTES", message_bytes)
    async with Worker("p") as sender, Worker("d") as receiver:
        ticket, arrival = await sender.offer(ask(length=60)), await receiver.room(ask(length=60))

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


async def test_a_sequence_that_ends_at_the_sender_leaves_nothing_to_fetch() -> None:
    async with Worker("p") as sender, Worker("d") as receiver:
        with pytest.raises(SequenceAlreadyFinished):
            await hand_over(sender, receiver, ask(wanted=1))
        await sender.emptied()
        await receiver.emptied()


async def test_a_ticket_opens_once_and_only_for_what_it_names() -> None:
    async with Worker("p") as sender, Worker("d") as receiver:
        ticket, arrival = await sender.offer(ask()), await receiver.room(ask())
        good = receiver.receiver._open(ticket, arrival)
        wrong: dict[wire.Cause, dict[str, Any]] = {
            wire.CAUSE_LEASE_OVER: {"ticket": b"0123456789abcdef"},
            wire.CAUSE_WRONG_PEER: {"sender": wire.Peer(id="p", incarnation=2)},
            wire.CAUSE_UNKNOWN_RUN: {"run": wire.Run(request="r", epoch=1, attempt=2)},
            wire.CAUSE_LAYOUT_DIFFERS: {"layout": 1},
            wire.CAUSE_SALT_DIFFERS: {"salt": b"another"},
        }
        for cause, change in wrong.items():
            opening = wire.Open()
            opening.CopyFrom(good)
            opening.MergeFrom(wire.Open(**change))
            assert await first_word(sender, opening) == cause
        await receiver.receiver.receive(Wire(sender.sender), ticket, arrival)
        assert await first_word(sender, good) == wire.CAUSE_LEASE_OVER
        await receiver.finished("r")


async def first_word(sender: Worker, opening: wire.Open) -> wire.Cause:
    async def says() -> AsyncIterator[wire.FetchRequest]:
        yield wire.FetchRequest(open=opening)

    async with contextlib.aclosing(sender.sender.fetch(says())) as responses:
        response = await anext(responses)
    return decode(response).response.closed.failure.cause
