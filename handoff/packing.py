"""Packs blocks into messages of at most 1 MiB, and unpacks them; every byte is verified exactly once.

    block checksum     over cache group, index, bytes                 computed when the block was filled
    message checksum   over run, group, position, size, block checksums   computed when it is sent

A message carries consecutive whole blocks of a cache group, or a piece of a block that is larger than a message::

    small blocks   [ block 4 | block 5 | block 6 ]     first_position of block 4, offset 0, three block checksums
    large block    [ block 4, first MiB ]              offset 0,      no block checksum: the block does not end here
                   [ block 4, the rest  ]              offset 1 MiB,  one block checksum
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import xxhash

from decant.engine.transfer import BlockAddress
from decant.handoff.codec import encode
from decant.handoff.errors import HandoffFailed
from decant.protos import worker_pb2 as wire

MESSAGE_BYTES = 1 << 20
"""Maximum of cache in one message. Both sides must agree."""

MESSAGE_BLOCKS = 64
"""Limits the handling of a message to a millisecond or two."""

checksum = xxhash.xxh3_64_intdigest
"""XXH3, 64 bits; also of a worker's block checksums."""

_PLACE = struct.Struct("<QIIIII")


@dataclass(frozen=True, slots=True)
class TransferLayout:
    """Equal on both sides. ``layout`` is the hash that the ticket carries."""

    block_size: int
    block_bytes: int
    layout: int
    message_bytes: int = MESSAGE_BYTES

    @property
    def blocks_per_message(self) -> int:
        return max(1, min(MESSAGE_BLOCKS, self.message_bytes // self.block_bytes))


@dataclass(frozen=True, slots=True)
class FilledBlock:
    """``checksum``: over ``address`` and ``data``."""

    address: BlockAddress
    data: bytes | memoryview
    checksum: int


@dataclass(frozen=True, slots=True)
class LocatedBlock:
    """A block whose bytes the receiver reads itself, at ``data`` of the sender's block memory."""

    address: BlockAddress
    data: range
    checksum: int


def message_checksum(run: wire.Run, shape: TransferLayout, message: wire.KvChunk, size: int) -> int:
    """Over run, group, position, size and the checksums of the blocks that end in this message."""
    place = _PLACE.pack(shape.layout, run.attempt, message.group, message.first_position, message.offset, size)
    checksums = message.block_checksums
    return checksum(run.request.encode() + place + struct.pack(f"<{len(checksums)}Q", *checksums))


def pack(run: wire.Run, shape: TransferLayout, blocks: Sequence[FilledBlock | LocatedBlock]) -> Iterator[bytes]:
    """Encoded messages of consecutive blocks of a group. Bytes are copied when the iterator yields their message."""
    if shape.block_bytes > shape.message_bytes:
        for block in blocks:
            yield from _pieces(run, shape, block)
        return
    for at in range(0, len(blocks), shape.blocks_per_message):
        some = blocks[at : at + shape.blocks_per_message]
        head = _head(shape, some[0].address, [block.checksum for block in some])
        yield _message(run, shape, head, [block.data for block in some])


def _pieces(run: wire.Run, shape: TransferLayout, block: FilledBlock | LocatedBlock) -> Iterator[bytes]:
    data = block.data if isinstance(block, LocatedBlock) else memoryview(block.data)
    for offset in range(0, shape.block_bytes, shape.message_bytes):
        piece = data[offset : offset + shape.message_bytes]
        checksums = [block.checksum] if offset + len(piece) == shape.block_bytes else []
        head = _head(shape, block.address, checksums)
        head.offset = offset
        yield _message(run, shape, head, [piece])


def _head(shape: TransferLayout, first: BlockAddress, checksums: Sequence[int]) -> wire.KvChunk:
    position = first.block * shape.block_size
    return wire.KvChunk(group=first.group, first_position=position, block_checksums=checksums)


def _message(
    run: wire.Run, shape: TransferLayout, head: wire.KvChunk, parts: Sequence[bytes | memoryview | range]
) -> bytes:
    head.checksum = message_checksum(run, shape, head, sum(len(part) for part in parts))
    head.block_offsets.extend(part.start for part in parts if isinstance(part, range))
    return encode(wire.FetchResponse(kv_chunk=head), [part for part in parts if not isinstance(part, range)])


def located_parts(shape: TransferLayout, chunk: wire.KvChunk) -> list[range]:
    """The parts of a ``_message`` that has ``block_offsets``. Raises HandoffFailed (CORRUPT)."""
    size = min(shape.block_bytes - chunk.offset, shape.message_bytes)
    if size <= 0 or len(chunk.block_offsets) > shape.blocks_per_message:
        raise _corrupt(f"{len(chunk.block_offsets)} block offsets with {size} bytes each")
    return [range(start, start + size) for start in chunk.block_offsets]


class Unpacker:
    """Rejects messages of another run, position or order. The caller compares block checksums."""

    def __init__(self, run: wire.Run, shape: TransferLayout) -> None:
        self.received = 0  # bytes of cache
        self._run = run
        self._shape = shape
        in_pieces = shape.block_bytes > shape.message_bytes
        self._whole = bytearray(shape.block_bytes if in_pieces else 0)
        self._filled = 0

    def unpack(self, message: wire.KvChunk, data: memoryview) -> list[FilledBlock]:
        """The blocks that it completes, valid until the next message. Raises HandoffFailed (CORRUPT)."""
        index, rest = divmod(message.first_position, self._shape.block_size)
        if message_checksum(self._run, self._shape, message, len(data)) != message.checksum:
            raise _corrupt(f"the message at position {message.first_position} does not match its checksum")
        if rest or not 0 < len(data) <= self._shape.message_bytes:
            raise _corrupt(f"a message of {len(data)} bytes at position {message.first_position}")
        self.received += len(data)
        if self._whole:
            return self._assemble(BlockAddress(message.group, index), message, data)
        size, checksums = self._shape.block_bytes, message.block_checksums
        if message.offset or len(data) != len(checksums) * size:
            raise _corrupt(f"{len(data)} bytes are not {len(checksums)} blocks of {size}")
        return [
            FilledBlock(BlockAddress(message.group, index + at), data[at * size : (at + 1) * size], total)
            for at, total in enumerate(checksums)
        ]

    def _assemble(self, address: BlockAddress, message: wire.KvChunk, data: memoryview) -> list[FilledBlock]:
        end = self._filled + len(data)
        if message.offset != self._filled or end > len(self._whole):
            raise _corrupt(f"a piece at {message.offset} of {address} came after {self._filled} bytes")
        if len(message.block_checksums) != (end == len(self._whole)):
            raise _corrupt(f"{address} has {end} bytes and {len(message.block_checksums)} checksums")
        self._whole[self._filled : end] = data
        self._filled = end % len(self._whole)
        return [FilledBlock(address, memoryview(self._whole), total) for total in message.block_checksums]


def _corrupt(detail: str) -> HandoffFailed:
    return HandoffFailed(wire.CAUSE_CORRUPT, detail)
