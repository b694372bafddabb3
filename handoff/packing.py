"""Blocks into messages of at most 1 MiB, and back, with a sum over each.

A message carries some whole blocks of a sequence in order, or a piece of one that is larger than a message::

    small blocks   [ block 4 | block 5 | block 6 ]     first_position of block 4, offset 0, three block sums
    large block    [ block 4, first MiB ]              offset 0,      no block sum: it doesn't end here
                   [ block 4, the rest  ]              offset 1 MiB,  one block sum
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import xxhash

from handoff.errors import HandoffFailed
from protos import worker_pb2 as wire

MESSAGE_BYTES = 1 << 20
"""Most bytes of cache in one message."""

checksum = xxhash.xxh3_64_intdigest
"""Sum over bytes (XXH3, 64 bits): what a worker's engine sums its blocks with as well."""

_PLACE = struct.Struct("<QIII")


@dataclass(frozen=True, slots=True)
class Shape:
    """What both ends must agree on before a byte moves. ``layout`` is the hash that the ticket carries."""

    block_size: int
    block_bytes: int
    layout: int

    @property
    def blocks_per_message(self) -> int:
        return max(1, MESSAGE_BYTES // self.block_bytes)


@dataclass(frozen=True, slots=True)
class FilledBlock:
    """A block as it travels: its place in the sequence, its bytes, and the engine's sum of it."""

    index: int
    data: bytes | memoryview
    sum: int


def message_sum(run: wire.Run, shape: Shape, place: tuple[int, int], data: bytes) -> int:
    """Sum over whose bytes these are, where they belong (first position, offset), and the bytes."""
    digest = xxhash.xxh3_64(run.request.encode())
    digest.update(_PLACE.pack(shape.layout, run.attempt, *place))
    digest.update(data)
    return digest.intdigest()


def pack(run: wire.Run, shape: Shape, blocks: list[FilledBlock]) -> Iterator[wire.FetchResponse]:
    """Messages for blocks that follow each other."""
    if shape.block_bytes > MESSAGE_BYTES:
        for block in blocks:
            yield from _pieces(run, shape, block)
        return
    for at in range(0, len(blocks), shape.blocks_per_message):
        some = blocks[at : at + shape.blocks_per_message]
        place = (some[0].index * shape.block_size, 0)
        yield _message(run, shape, place, b"".join([block.data for block in some]), [block.sum for block in some])


def _pieces(run: wire.Run, shape: Shape, block: FilledBlock) -> Iterator[wire.FetchResponse]:
    data = memoryview(block.data)
    for offset in range(0, shape.block_bytes, MESSAGE_BYTES):
        last = offset + MESSAGE_BYTES >= shape.block_bytes
        place = (block.index * shape.block_size, offset)
        piece = bytes(data[offset : offset + MESSAGE_BYTES])
        yield _message(run, shape, place, piece, [block.sum] if last else [])


def _message(run: wire.Run, shape: Shape, place: tuple[int, int], data: bytes, sums: list[int]) -> wire.FetchResponse:
    """Filled in place: a message that is put into another is copied, and so is ``data`` whenever it is read off one."""
    response = wire.FetchResponse()
    message = response.kv_run
    message.first_position, message.offset = place
    message.data = data
    message.block_sums.extend(sums)
    message.sum = message_sum(run, shape, place, data)
    return response


class Unpacker:
    """Messages of one fetch back into blocks. Refuses what is corrupt, out of place or out of order."""

    def __init__(self, run: wire.Run, shape: Shape) -> None:
        self.received = 0  # bytes of cache
        self._run = run
        self._shape = shape
        self._piece = bytearray()  # of a block that has not come whole
        self._piece_index = 0

    @property
    def between_blocks(self) -> bool:
        """Whether all that came made whole blocks."""
        return not self._piece

    def unpack(self, message: wire.KvRun) -> list[FilledBlock]:
        """The blocks that this message completes. Raises HandoffFailed (CORRUPT)."""
        index, rest = divmod(message.first_position, self._shape.block_size)
        content = message.data
        if message_sum(self._run, self._shape, (message.first_position, message.offset), content) != message.sum:
            raise _corrupt(f"the message at position {message.first_position} does not agree with its sum")
        if rest or not content or len(content) > MESSAGE_BYTES:
            raise _corrupt(f"a message of {len(content)} bytes at position {message.first_position}")
        self.received += len(content)
        if self._shape.block_bytes > MESSAGE_BYTES:
            return self._piece_of(index, message)
        size, count = self._shape.block_bytes, len(message.block_sums)
        if message.offset or not self.between_blocks or len(content) != count * size:
            raise _corrupt(f"{len(content)} bytes are not {count} blocks of {size}")
        data = memoryview(content)
        return [
            FilledBlock(index + at, data[at * size : (at + 1) * size], total)
            for at, total in enumerate(message.block_sums)
        ]

    def _piece_of(self, index: int, message: wire.KvRun) -> list[FilledBlock]:
        if message.offset != len(self._piece) or (self._piece and index != self._piece_index):
            raise _corrupt(f"a piece at {message.offset} of block {index} came after {len(self._piece)} bytes")
        self._piece_index = index
        self._piece += message.data
        whole = len(self._piece) == self._shape.block_bytes
        if whole is not (len(message.block_sums) == 1):
            raise _corrupt(f"block {index} has {len(self._piece)} bytes and {len(message.block_sums)} sums")
        if not whole:
            return []
        data, self._piece = self._piece, bytearray()
        return [FilledBlock(index, bytes(data), message.block_sums[0])]


def _corrupt(detail: str) -> HandoffFailed:
    return HandoffFailed(wire.CAUSE_CORRUPT, detail)
