from __future__ import annotations

import pytest

from decant.handoff.errors import HandoffFailed
from decant.handoff.packing import MESSAGE_BYTES, TransferLayout, message_checksum
from decant.protos import worker_pb2 as wire
from tests.handoff.factories import LAYOUT_HASH, Tamper, Worker, ask, run_alone
from tests.handoff.harness import hand_over


def flip(message: wire.FetchResponse) -> list[wire.FetchResponse]:
    if message.kv_chunk.data:
        message.kv_chunk.data = bytes([message.kv_chunk.data[0] ^ 1]) + message.kv_chunk.data[1:]
    return [message]


def truncate(message: wire.FetchResponse) -> list[wire.FetchResponse]:
    if message.kv_chunk.data:
        message.kv_chunk.data = message.kv_chunk.data[:-1]
    return [message]


def drop_chunks(message: wire.FetchResponse) -> list[wire.FetchResponse]:
    return [] if message.HasField("kv_chunk") else [message]


def move(message: wire.FetchResponse) -> list[wire.FetchResponse]:
    if message.kv_chunk.data:
        message.kv_chunk.first_position += 4
    return [message]


def regroup(message: wire.FetchResponse) -> list[wire.FetchResponse]:
    if message.HasField("kv_chunk"):
        message.kv_chunk.group += 1
    return [message]


def forge_commit(message: wire.FetchResponse) -> list[wire.FetchResponse]:
    if message.HasField("commit"):
        tokens = message.commit.outputs[0].tokens
        message.commit.outputs[0].tokens = bytes([(tokens[0] + 1) % 64]) + tokens[1:]
    return [message]


def odd_logprobs(message: wire.FetchResponse) -> list[wire.FetchResponse]:
    if message.HasField("commit"):
        message.commit.outputs[0].logprobs.add(top_ids=[1, 2], top_logprobs=[-1])
    return [message]


def early_commit(message: wire.FetchResponse) -> list[wire.FetchResponse]:
    return [message] if message.HasField("heartbeat") else [wire.FetchResponse(commit=wire.TransferCommit(computed=4))]


def forge_checksum(message: wire.FetchResponse) -> list[wire.FetchResponse]:
    if message.kv_chunk.block_checksums:
        message.kv_chunk.block_checksums[0] ^= 1
    return [message]


def another_run(message: wire.FetchResponse) -> list[wire.FetchResponse]:
    if message.HasField("kv_chunk"):
        stale = wire.Run(request="r", epoch=1, attempt=0)
        layout = TransferLayout(4, 32, LAYOUT_HASH)
        message.kv_chunk.checksum = message_checksum(stale, layout, message.kv_chunk, len(message.kv_chunk.data))
    return [message]


def double(message: wire.FetchResponse) -> list[wire.FetchResponse]:
    half = len(message.kv_chunk.data) // 2
    if half:
        message.kv_chunk.data = message.kv_chunk.data[:half] * 2
    return [message]


def swap(message: wire.FetchResponse) -> list[wire.FetchResponse]:
    half = len(message.kv_chunk.data) // 2
    if half:
        message.kv_chunk.data = message.kv_chunk.data[half:] + message.kv_chunk.data[:half]
    return [message]


TAMPERS = [
    flip,
    truncate,
    drop_chunks,
    move,
    regroup,
    forge_checksum,
    another_run,
    double,
    swap,
    forge_commit,
    odd_logprobs,
    early_commit,
]


@pytest.mark.slow
@pytest.mark.parametrize("message_bytes", [MESSAGE_BYTES, 20])
@pytest.mark.parametrize("tamper", TAMPERS)
async def test_a_tampered_message_is_refused_and_everything_is_freed(tamper: Tamper, message_bytes: int) -> None:
    """Blocks have 32 bytes: many in a message, or one in two messages."""
    request = ask()
    async with Worker("p", message_bytes=message_bytes) as sender, Worker("d", message_bytes=message_bytes) as receiver:
        with pytest.raises(HandoffFailed) as failed:
            await hand_over(sender, receiver, request, tamper)
        assert failed.value.cause == wire.CAUSE_CORRUPT
        await sender.emptied()
        await receiver.emptied()
        assert "r" not in receiver.tokens
        await receiver.loop.call(lambda engine: engine.add(request))  # the next attempt, from tokens
        assert await receiver.finished("r") == await run_alone(request)


async def test_blocks_larger_than_a_message_arrive_whole() -> None:
    request = ask()
    async with Worker("p", message_bytes=20) as sender, Worker("d", message_bytes=20) as receiver:
        await hand_over(sender, receiver, request)
        assert sender.tokens["r"] + await receiver.finished("r") == await run_alone(request)
