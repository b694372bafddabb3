"""Blocks into messages and back, whatever their size."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from handoff.errors import HandoffFailed
from handoff.packing import MESSAGE_BYTES, FilledBlock, Shape, Unpacker, checksum, pack
from protos import worker_pb2 as wire

RUN = wire.Run(request="tenant/r", epoch=1, attempt=2)


def blocks_of(shape: Shape, first: int, count: int) -> list[FilledBlock]:
    made = []
    for index in range(first, first + count):
        data = (index.to_bytes(4, "little") * (shape.block_bytes // 4 + 1))[: shape.block_bytes]
        made.append(FilledBlock(index, data, checksum(data)))
    return made


def unpacked(shape: Shape, messages: list[wire.KvRun], run: wire.Run = RUN) -> list[FilledBlock]:
    unpacker = Unpacker(run, shape)
    found = [block for message in messages for block in unpacker.unpack(message)]
    assert unpacker.between_blocks
    return found


@settings(max_examples=40, deadline=None)
@given(
    size=st.one_of(
        st.integers(1, 5000), st.sampled_from([MESSAGE_BYTES - 1, MESSAGE_BYTES, MESSAGE_BYTES + 1, 3 << 20])
    ),
    first=st.integers(0, 50),
    count=st.integers(1, 6),
)
def test_what_goes_in_comes_out_and_no_message_is_too_large(size: int, first: int, count: int) -> None:
    shape = Shape(16, size, layout=7)
    blocks = blocks_of(shape, first, count)
    messages = [response.kv_run for response in pack(RUN, shape, blocks)]
    assert all(len(message.data) <= MESSAGE_BYTES for message in messages)
    assert len(messages) <= -(-size // MESSAGE_BYTES) * count
    found = unpacked(shape, messages)
    assert [(b.index, bytes(b.data), b.sum) for b in found] == [(b.index, bytes(b.data), b.sum) for b in blocks]


@pytest.mark.parametrize("size", [400, 2 * MESSAGE_BYTES + 5])
@pytest.mark.parametrize("fault", ["data", "first_position", "offset", "attempt", "layout", "request"])
def test_bytes_are_bound_to_their_place_and_their_run(size: int, fault: str) -> None:
    shape, run, reader = Shape(16, size, layout=7), wire.Run(), Shape(16, size, layout=8 if fault == "layout" else 7)
    run.CopyFrom(RUN)
    messages = [response.kv_run for response in pack(RUN, shape, blocks_of(shape, 0, 2))]
    match fault:
        case "data":
            messages[0].data = messages[0].data[:-1] + b"?"
        case "first_position" | "offset":
            setattr(messages[0], fault, 16)
        case "attempt":
            run.attempt = 3
        case "request":
            run.request = "tenant/s"
    with pytest.raises(HandoffFailed) as failed:
        unpacked(reader, messages, run)
    assert failed.value.cause == wire.CAUSE_CORRUPT


def test_pieces_of_a_large_block_must_come_in_order_and_whole() -> None:
    shape = Shape(16, 3 * MESSAGE_BYTES, layout=7)
    messages = [response.kv_run for response in pack(RUN, shape, blocks_of(shape, 0, 2))]
    assert len(messages) == 6
    for order in ([1], [0, 2], [0, 1, 3], [0, 0]):
        with pytest.raises(HandoffFailed):
            unpacked(shape, [messages[at] for at in order])
    unpacker = Unpacker(RUN, shape)
    assert unpacker.unpack(messages[0]) == []
    assert not unpacker.between_blocks
