from __future__ import annotations

from collections.abc import Iterable

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from decant.engine.transfer import BlockAddress, block_checksum
from decant.handoff.codec import Received, decode, encode
from decant.handoff.errors import HandoffFailed
from decant.handoff.packing import (
    MESSAGE_BLOCKS,
    MESSAGE_BYTES,
    FilledBlock,
    TransferLayout,
    Unpacker,
    checksum,
    message_checksum,
    pack,
)
from decant.protos import worker_pb2 as wire

RUN = wire.Run(request="tenant/r", epoch=1, attempt=2)


SMALL, LARGE = 400, 2 * MESSAGE_BYTES + 5
"""Bytes of a block: some in a message, and one in three."""


def blocks_of(layout: TransferLayout, first: int, count: int, salt: bytes = b"") -> list[FilledBlock]:
    made = []
    for index in range(first, first + count):
        data = ((salt + index.to_bytes(4, "little")) * (layout.block_bytes // 4 + 1))[: layout.block_bytes]
        address = BlockAddress(1, index)
        made.append(FilledBlock(address, data, block_checksum(checksum, address, data)))
    return made


def received(layout: TransferLayout, blocks: list[FilledBlock], run: wire.Run = RUN) -> list[Received]:
    return [decode(message) for message in pack(run, layout, blocks)]


def taken(layout: TransferLayout, messages: Iterable[Received], run: wire.Run = RUN) -> dict[BlockAddress, bytes]:
    unpacker, found = Unpacker(run, layout), {}
    for message in messages:
        for block in unpacker.unpack(message.response.kv_chunk, message.data):
            if block_checksum(checksum, block.address, block.data) != block.checksum:
                raise HandoffFailed(wire.CAUSE_CORRUPT, "by the arrival")
            found[block.address] = bytes(block.data)
    return found


@settings(max_examples=40, deadline=None)
@given(
    size=st.one_of(
        st.integers(1, 5000), st.sampled_from([MESSAGE_BYTES - 1, MESSAGE_BYTES, MESSAGE_BYTES + 1, 3 << 20])
    ),
    first=st.integers(0, 50),
    count=st.integers(1, 6),
)
def test_packed_blocks_are_unpacked_and_no_message_is_too_large(size: int, first: int, count: int) -> None:
    layout = TransferLayout(16, size, layout_hash=7)
    blocks = blocks_of(layout, first, count)
    messages = received(layout, blocks)
    assert all(len(message.data) <= MESSAGE_BYTES for message in messages)
    assert len(messages) <= -(-size // MESSAGE_BYTES) * count
    assert taken(layout, messages) == {block.address: block.data for block in blocks}


def test_a_message_has_a_maximum_number_of_tiny_blocks() -> None:
    layout = TransferLayout(16, 8, layout_hash=7)
    messages = received(layout, blocks_of(layout, 0, 1000))
    assert max(len(message.response.kv_chunk.block_checksums) for message in messages) == MESSAGE_BLOCKS
    assert len(taken(layout, messages)) == 1000


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_any_parser_reads_what_is_sent_and_any_writer_is_read(size: int) -> None:
    layout = TransferLayout(16, size, layout_hash=7)
    blocks = blocks_of(layout, 3, 2)
    plain = [wire.FetchResponse.FromString(message) for message in pack(RUN, layout, blocks)]
    assert b"".join(one.kv_chunk.data for one in plain) == b"".join(bytes(block.data) for block in blocks)
    again = [decode(one.SerializeToString()) for one in plain]
    assert taken(layout, again) == {block.address: block.data for block in blocks}


def test_messages_without_cache_are_plain_protobuf() -> None:
    responses = [
        wire.FetchResponse(heartbeat=wire.Heartbeat(step=3)),
        wire.FetchResponse(commit=wire.TransferCommit(computed=9, checksum=1)),
        wire.FetchResponse(closed=wire.ExportClosed()),
        wire.FetchResponse(kv_chunk=wire.KvChunk(first_position=16)),
        wire.FetchResponse(),
    ]
    for response in responses:
        assert decode(encode(response)) == Received(response, memoryview(b""))


def test_the_cache_is_not_copied_out_of_a_message() -> None:
    message = encode(wire.FetchResponse(kv_chunk=wire.KvChunk(first_position=16)), [b"some", memoryview(b"bytes")])
    assert decode(message).data.obj is message
    assert bytes(decode(message).data) == b"somebytes"


@pytest.mark.parametrize("at", [1, 7, 9])
def test_a_wrong_length_is_no_message(at: int) -> None:
    message = bytearray(encode(wire.FetchResponse(kv_chunk=wire.KvChunk(first_position=16, offset=1)), [b"cache"]))
    message[at] += 1
    with pytest.raises(DecodeError):
        decode(bytes(message))


def test_repeated_data_are_merged_as_protobuf_does() -> None:
    head = wire.FetchResponse(kv_chunk=wire.KvChunk(first_position=16, data=b"first"))
    twice = encode(head, [b"second"])
    assert bytes(decode(twice).data) == wire.FetchResponse.FromString(twice).kv_chunk.data == b"second"
    then = twice + wire.FetchResponse(kv_chunk=wire.KvChunk(checksum=5)).SerializeToString()
    assert bytes(decode(then).data) == b"second"
    assert decode(then).response.kv_chunk.checksum == 5


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(size=st.sampled_from([40, 90]), at=st.integers(0), bit=st.integers(0, 7))
def test_a_flipped_bit_anywhere_in_a_message_is_refused_or_changes_nothing(size: int, at: int, bit: int) -> None:
    layout = TransferLayout(16, size, layout_hash=7, message_bytes=80)  # two blocks a message, or one in two
    blocks = blocks_of(layout, 1, 4)
    messages = list(pack(RUN, layout, blocks))
    flat, place = bytearray(b"".join(messages)), 0
    flat[at % len(flat)] ^= 1 << bit
    changed = []
    for message in messages:
        changed.append(bytes(flat[place : place + len(message)]))
        place += len(message)
    try:
        found = taken(layout, map(decode, changed))
    except (HandoffFailed, DecodeError):
        return
    assert found == {block.address: block.data for block in blocks}


@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize(
    "fault",
    [
        "data",
        "first_position",
        "group",
        "offset",
        "checksum",
        "block_checksums",
        "attempt",
        "layout",
        "request",
        "size",
        "splice",
    ],
)
def test_bytes_are_bound_to_their_position_and_their_run(size: int, fault: str) -> None:
    layout, run, reader = (
        TransferLayout(16, size, layout_hash=7),
        wire.Run(),
        TransferLayout(16, size, layout_hash=8 if fault == "layout" else 7),
    )
    run.CopyFrom(RUN)
    messages = received(layout, blocks_of(layout, 0, 2))
    head, data = messages[0].response.kv_chunk, messages[0].data
    match fault:
        case "data":
            data = memoryview(bytes(data[:-1]) + b"?")
        case "first_position" | "group" | "offset" | "checksum":
            setattr(head, fault, getattr(head, fault) + 16)
        case "block_checksums":
            messages[-1].response.kv_chunk.block_checksums[0] ^= 1
        case "attempt":
            run.attempt = 3
        case "request":
            run.request = "tenant/s"
        case "size":
            data = data[:-1]
        case "splice":  # other bytes with a checksum that matches them, in this run's message
            other = received(layout, blocks_of(layout, 0, 2, b"other"))
            messages[1:], data = other[1:], other[0].data
            del head.block_checksums[:]
            head.block_checksums.extend(other[0].response.kv_chunk.block_checksums)
            for mine, theirs in zip(received(layout, blocks_of(layout, 0, 2))[1:], messages[1:], strict=True):
                theirs.response.kv_chunk.checksum = mine.response.kv_chunk.checksum
    messages[0] = Received(messages[0].response, data)
    with pytest.raises(HandoffFailed) as failed:
        taken(reader, messages, run)
    assert failed.value.cause == wire.CAUSE_CORRUPT


@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("fault", ["first_position", "group", "offset", "checksum", "size", "checksums"])
def test_a_wrong_position_is_refused_before_any_byte_is_read(size: int, fault: str) -> None:
    layout = TransferLayout(16, size, layout_hash=7)
    first = received(layout, blocks_of(layout, 0, 2))[0]
    head, data = first.response.kv_chunk, first.data
    match fault:
        case "size":
            data = data[:-1]
        case "checksums":
            head.block_checksums.append(0)
        case _:
            setattr(head, fault, getattr(head, fault) + 16)
    with pytest.raises(HandoffFailed, match="does not match its checksum"):
        Unpacker(RUN, layout).unpack(head, data)


def test_pieces_of_a_large_block_must_come_in_order_and_whole() -> None:
    layout = TransferLayout(16, 3 * MESSAGE_BYTES, layout_hash=7)
    messages = received(layout, blocks_of(layout, 0, 2))
    assert len(messages) == 6
    for order in ([1], [0, 2], [0, 1, 3], [0, 0], [0, 1, 2, 2], [3, 1, 2]):
        with pytest.raises(HandoffFailed):
            taken(layout, [messages[at] for at in order])
    assert taken(layout, messages[:2]) == {}


@pytest.mark.parametrize(("size", "checksums"), [(MESSAGE_BYTES, []), (5, []), (4, [1]), (5, [1, 2])])
def test_a_block_ends_with_its_message_and_one_checksum(size: int, checksums: list[int]) -> None:
    """The third piece of a LARGE block has five bytes and one checksum."""
    layout = TransferLayout(16, LARGE, layout_hash=7)
    pieces = received(layout, blocks_of(layout, 0, 1))
    head = wire.KvChunk(offset=2 * MESSAGE_BYTES, block_checksums=checksums)
    head.checksum = message_checksum(RUN, layout, head, size)
    with pytest.raises(HandoffFailed):
        Unpacker(RUN, layout).unpack(head, pieces[0].data[:size])
    unpacker = Unpacker(RUN, layout)
    for piece in pieces[:2]:
        unpacker.unpack(piece.response.kv_chunk, piece.data)
    with pytest.raises(HandoffFailed):
        unpacker.unpack(head, pieces[0].data[:size])
