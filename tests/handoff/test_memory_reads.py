from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import pytest

from decant.handoff.codec import decode
from decant.handoff.errors import HandoffFailed
from decant.handoff.memory_reads import NoBuffer
from decant.handoff.packing import MESSAGE_BYTES
from decant.handoff.receiver import ReceiverTiming
from decant.protos import worker_pb2 as wire
from tests.handoff.factories import Worker, ask, run_alone
from tests.handoff.harness import LocalAgent, LocalReader, reads
from tests.handoff.test_cache_groups import GROUPS
from tests.worker.waiting import advance, eventually


def agent_of(sender: Worker) -> LocalAgent:
    agent = LocalAgent(sender.engine.device.block_memory)
    sender.sender.memory = agent.memory
    return agent


@pytest.mark.parametrize("message_bytes", [MESSAGE_BYTES, 64, 20])
async def test_blocks_of_each_group_are_read_and_none_is_sent(message_bytes: int) -> None:
    """Blocks have 32 bytes: many in a message, two, or one in two messages."""
    request, sent = ask(length=64), list[wire.KvChunk]()

    def note(message: wire.FetchResponse) -> list[wire.FetchResponse]:
        sent.append(message.kv_chunk)
        return [message]

    workers = [Worker(name, blocks=192, windows=GROUPS, message_bytes=message_bytes) for name in "pd"]
    async with workers[0] as sender, workers[1] as receiver:
        agent = agent_of(sender)
        source = reads(sender, agent, note).source("p")
        result = await receiver.receiver.receive(source, await sender.offer(request), await receiver.reserve(request))
        assert all(reader.closed for reader in agent.readers)
        assert sender.tokens["r"] + await receiver.finished("r") == await run_alone(request, GROUPS)
        await sender.emptied()
        await receiver.emptied()
    assert not any(chunk.data for chunk in sent)
    assert sum(reader.count for reader in agent.readers) == result.received_bytes > 0


@pytest.mark.parametrize("offers", [True, False], ids=["only the sender", "only the receiver"])
async def test_where_one_end_has_no_agent_blocks_come_in_messages(offers: bool) -> None:
    request = ask()
    async with Worker("p") as sender, Worker("d") as receiver:
        agent = agent_of(sender)
        transport = reads(sender, agent)
        if not offers:
            sender.sender.memory = None
        source = transport._messages.source("p") if offers else transport.source("p")
        await receiver.receiver.receive(source, await sender.offer(request), await receiver.reserve(request))
        assert sender.tokens["r"] + await receiver.finished("r") == await run_alone(request)
    assert not any(reader.count for reader in agent.readers)


@pytest.mark.rule(
    "memory-reads-verified", "handoff/memory_reads.py:_ReadingSource.fetch", "handoff/nixl_agent.py:NixlReader.read"
)
async def test_bytes_that_changed_before_they_were_read_are_refused() -> None:
    """The change is as if the lease had expired and the block another sequence's."""

    def overwrite(message: wire.FetchResponse) -> list[wire.FetchResponse]:
        for offset in message.kv_chunk.block_offsets[:1]:
            block = sender.engine.device.read(offset // sender.transfer_layout.block_bytes)
            block[0] ^= 1
        return [message]

    request = ask()
    async with Worker("p") as sender, Worker("d") as receiver:
        transport = reads(sender, agent_of(sender), overwrite)
        with pytest.raises(HandoffFailed) as failed:
            await receiver.receiver.receive(
                transport.source("p"), await sender.offer(request), await receiver.reserve(request)
            )
        assert failed.value.cause == wire.CAUSE_CORRUPT
        await sender.emptied()
        await receiver.emptied()
        again = ask("again", seed=1)
        await receiver.receiver.receive(transport.source("p"), await sender.offer(again), await receiver.reserve(again))
        assert sender.tokens["again"] + await receiver.finished("again") == await run_alone(again)


async def test_a_second_memory_in_one_fetch_is_corrupt() -> None:
    def twice(message: wire.FetchResponse) -> list[wire.FetchResponse]:
        return [message, message] if message.HasField("memory") else [message]

    request = ask()
    async with Worker("p") as sender, Worker("d") as receiver:
        agent = agent_of(sender)
        source = reads(sender, agent, twice).source("p")
        with pytest.raises(HandoffFailed) as failed:
            await receiver.receiver.receive(source, await sender.offer(request), await receiver.reserve(request))
        assert failed.value.cause == wire.CAUSE_CORRUPT
        assert not any(reader.count for reader in agent.readers)
        assert all(reader.closed for reader in agent.readers)
        await sender.emptied()
        await receiver.emptied()


async def test_without_a_buffer_blocks_come_in_messages() -> None:
    class Full(LocalAgent):
        def reader(self) -> LocalReader:
            raise NoBuffer("too much memory is locked")

    async with Worker("p") as sender, Worker("d") as receiver:
        sender.sender.memory = agent_of(sender).memory
        source = reads(sender, Full(sender.engine.device.block_memory)).source("p")
        await receiver.receiver.receive(source, await sender.offer(ask()), await receiver.reserve(ask()))
        assert sender.tokens["r"] + await receiver.finished("r") == await run_alone(ask())


@pytest.mark.parametrize("fault", ["beyond", "offset", "many"])
@pytest.mark.parametrize("message_bytes", [64, 20])
async def test_nothing_outside_of_the_senders_blocks_is_read(fault: str, message_bytes: int) -> None:
    def change(message: wire.FetchResponse) -> list[wire.FetchResponse]:
        chunk = message.kv_chunk
        if chunk.block_offsets:
            match fault:
                case "beyond":
                    chunk.block_offsets[0] = agent.memory.bytes - 1
                case "offset":
                    chunk.offset = sender.transfer_layout.block_bytes
                case "many":
                    chunk.block_offsets.extend([0] * sender.transfer_layout.blocks_per_message)
        return [message]

    request = ask()
    async with Worker("p", message_bytes=message_bytes) as sender, Worker("d", message_bytes=message_bytes) as receiver:
        agent = agent_of(sender)
        source = reads(sender, agent, change).source("p")
        with pytest.raises(HandoffFailed) as failed:
            await receiver.receiver.receive(source, await sender.offer(request), await receiver.reserve(request))
        assert failed.value.cause == wire.CAUSE_CORRUPT
        assert not any(reader.count for reader in agent.readers)
        await sender.emptied()
        await receiver.emptied()


@pytest.mark.rule(
    "memory-reads-verified",
    "handoff/memory_reads.py:MemoryReads.source",
    "handoff/memory_reads.py:MemoryReads.record_failure",
)
@pytest.mark.parametrize("fails", ["connect", "read"])
async def test_after_a_failed_read_blocks_come_in_messages(fails: str) -> None:
    class Broken(LocalAgent):
        def reader(self) -> LocalReader:
            return Unreachable()

    class Unreachable(LocalReader):
        def connect(self, memory: wire.BlockMemory) -> None:
            if fails == "connect":
                raise ConnectionError("no route")

        async def read(self, parts: Sequence[range]) -> memoryview:
            raise ConnectionError("no route")

    async with Worker("p") as sender, Worker("d") as receiver:
        transport = reads(sender, Broken(sender.engine.device.block_memory))
        sender.sender.memory = LocalAgent(sender.engine.device.block_memory).memory
        ticket, arrival = await sender.offer(ask("first")), await receiver.reserve(ask("first"))
        with pytest.raises(HandoffFailed) as failed:
            await receiver.receiver.receive(transport.source("p"), ticket, arrival)
        assert failed.value.cause == wire.CAUSE_PEER_LOST
        ticket, arrival = await sender.offer(ask()), await receiver.reserve(ask())
        await receiver.receiver.receive(transport.source("p"), ticket, arrival)
        assert sender.tokens["r"] + await receiver.finished("r") == await run_alone(ask())
        await sender.emptied()
        await receiver.emptied()


async def test_a_fetch_cancelled_in_a_read_frees_both_ends() -> None:
    request = ask()
    async with Worker("p") as sender, Worker("d") as receiver:
        agent = agent_of(sender)
        ticket, arrival = await sender.offer(request), await receiver.reserve(request)
        opened = agent.reader

        def blocked() -> LocalReader:
            reader = opened()
            reader.gate.clear()
            return reader

        agent.reader = blocked  # type: ignore[method-assign]
        task = asyncio.create_task(receiver.receiver.receive(reads(sender, agent).source("p"), ticket, arrival))
        await eventually(lambda: agent.readers)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        await eventually(lambda: agent.readers[0].closed)
        await sender.emptied()
        await receiver.emptied()


@pytest.mark.parametrize("length", [20, 240])
async def test_the_commit_waits_for_no_heartbeat(length: int) -> None:
    """One prompt has fewer chunks than ACK_CHUNKS, the other more."""
    request = ask(length=length)
    workers = [Worker(name, message_bytes=20, receiver_timing=ReceiverTiming(heartbeat_s=3600)) for name in "pd"]
    async with workers[0] as sender, workers[1] as receiver:
        source = reads(sender, agent_of(sender)).source("p")
        await receiver.receiver.receive(source, await sender.offer(request), await receiver.reserve(request))
        assert sender.tokens["r"] + await receiver.finished("r") == await run_alone(request)


@pytest.mark.rule("commit-after-last-ack", "handoff/sender.py:KvSender._messages")
async def test_the_commit_waits_until_every_chunk_was_read() -> None:
    count = 8
    request = ask(length=count * 2)
    async with Worker("p", message_bytes=20) as sender, Worker("d") as receiver:
        agent_of(sender)
        ticket, arrival = await sender.offer(request), await receiver.reserve(request)
        sent = asyncio.Event()
        last = asyncio.Event()

        async def requests() -> AsyncIterator[wire.FetchRequest]:
            opening = receiver.receiver._open(ticket, arrival)
            opening.reads_memory = True
            yield wire.FetchRequest(open=opening)
            await sent.wait()
            yield wire.FetchRequest(ack=wire.Ack(kv_chunks=count - 1))
            await last.wait()
            yield wire.FetchRequest(ack=wire.Ack(kv_chunks=count))
            await asyncio.sleep(3600)

        chunks = 0
        async with contextlib.aclosing(sender.sender.fetch(requests())) as messages:
            async for message in messages:
                response = decode(message).response
                chunks += response.HasField("kv_chunk")
                if response.HasField("heartbeat") and chunks == count:
                    (last if sent.is_set() else sent).set()
                if response.HasField("commit"):
                    break
        assert last.is_set()
        await receiver.loop.call(lambda _: arrival.abort())


async def test_a_receiver_that_stops_reading_loses_the_blocks_with_its_lease_and_gets_no_commit() -> None:
    async with Worker("p", lease_ms=600_000) as sender, Worker("d") as receiver:
        agent_of(sender)
        ticket, arrival = await sender.offer(ask()), await receiver.reserve(ask())

        async def requests() -> AsyncIterator[wire.FetchRequest]:
            opening = receiver.receiver._open(ticket, arrival)
            opening.reads_memory = True
            yield wire.FetchRequest(open=opening)
            while True:
                await asyncio.sleep(0.05)
                yield wire.FetchRequest(heartbeat=wire.Heartbeat())

        responses, passed = list[wire.FetchResponse](), 0.0
        async with contextlib.aclosing(sender.sender.fetch(requests())) as messages:
            async for message in messages:
                responses.append(decode(message).response)
                if sender.tokens.get("r") and responses[-1].HasField("heartbeat"):
                    assert passed < 1200, "heartbeats renew the lease"
                    advance(240)
                    passed += 240
                    await asyncio.sleep(0.1)  # heartbeats of the receiver arrive
        assert responses[-1].closed.failure.cause == wire.CAUSE_LEASE_EXPIRED
        assert not any(response.HasField("commit") for response in responses)
        await sender.emptied()
        await receiver.loop.call(lambda _: arrival.abort())
