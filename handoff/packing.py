"""Blocks in messages of at most 1 MiB, packed and unpacked; every byte is verified exactly once.

    block checksum     over cache group, index, bytes                     computed when the block was filled
    message checksum   over request, layout hash, attempt, group,         computed when it is sent
                       position, offset, size, block checksums

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

_POSITION = struct.Struct("<QIIIII")


@dataclass(frozen=True, slots=True)
class TransferLayout:
    """Sizes of blocks and messages of a transfer. Both ends must have equal ones, which the layout hash ensures."""

    block_size: int
    block_bytes: int
    layout_hash: int
    message_bytes: int = MESSAGE_BYTES

    @property
    def blocks_per_message(self) -> int:
        return max(1, min(MESSAGE_BLOCKS, self.message_bytes // self.block_bytes))


@dataclass(frozen=True, slots=True)
class FilledBlock:
    address: BlockAddress
    data: bytes | memoryview
    checksum: int


@dataclass(frozen=True, slots=True)
class LocatedBlock:
    """A block whose bytes the receiver reads itself, at ``data`` of the sender's block memory."""

    address: BlockAddress
    data: range
    checksum: int


def message_checksum(run: wire.Run, layout: TransferLayout, message: wire.KvChunk, size: int) -> int:
    position = _POSITION.pack(
        layout.layout_hash, run.attempt, message.group, message.first_position, message.offset, size
    )
    checksums = message.block_checksums
    return checksum(run.request.encode() + position + struct.pack(f"<{len(checksums)}Q", *checksums))


def pack(run: wire.Run, layout: TransferLayout, blocks: Sequence[FilledBlock | LocatedBlock]) -> Iterator[bytes]:
    """Encode consecutive blocks of one group. Bytes are copied when the iterator yields their message."""
    if layout.block_bytes > layout.message_bytes:
        for block in blocks:
            yield from _pieces(run, layout, block)
        return
    for at in range(0, len(blocks), layout.blocks_per_message):
        batch = blocks[at : at + layout.blocks_per_message]
        head = _head(layout, batch[0].address, [block.checksum for block in batch])
        yield _message(run, layout, head, [block.data for block in batch])


def _pieces(run: wire.Run, layout: TransferLayout, block: FilledBlock | LocatedBlock) -> Iterator[bytes]:
    data = block.data if isinstance(block, LocatedBlock) else memoryview(block.data)
    for offset in range(0, layout.block_bytes, layout.message_bytes):
        piece = data[offset : offset + layout.message_bytes]
        checksums = [block.checksum] if offset + len(piece) == layout.block_bytes else []
        head = _head(layout, block.address, checksums)
        head.offset = offset
        yield _message(run, layout, head, [piece])


def _head(layout: TransferLayout, first: BlockAddress, checksums: Sequence[int]) -> wire.KvChunk:
    position = first.block * layout.block_size
    return wire.KvChunk(group=first.group, first_position=position, block_checksums=checksums)


def _message(
    run: wire.Run, layout: TransferLayout, head: wire.KvChunk, parts: Sequence[bytes | memoryview | range]
) -> bytes:
    head.checksum = message_checksum(run, layout, head, sum(len(part) for part in parts))
    head.block_offsets.extend(part.start for part in parts if isinstance(part, range))
    return encode(wire.FetchResponse(kv_chunk=head), [part for part in parts if not isinstance(part, range)])


def located_parts(layout: TransferLayout, chunk: wire.KvChunk) -> list[range]:
    size = min(layout.block_bytes - chunk.offset, layout.message_bytes)
    if size <= 0 or len(chunk.block_offsets) > layout.blocks_per_message:
        raise _corrupt(f"{len(chunk.block_offsets)} block offsets with {size} bytes each")
    return [range(start, start + size) for start in chunk.block_offsets]


class Unpacker:
    """Unpacker of a fetch: rejects messages of another run, position or order; the caller compares block checksums."""

    def __init__(self, run: wire.Run, layout: TransferLayout) -> None:
        self.received_bytes = 0  # of cache
        self._run = run
        self._layout = layout
        in_pieces = layout.block_bytes > layout.message_bytes
        self._large_block = bytearray(layout.block_bytes if in_pieces else 0)
        self._num_filled = 0

    def unpack(self, message: wire.KvChunk, data: memoryview) -> list[FilledBlock]:
        """Return the blocks that a message completes, valid until the next. Raises HandoffFailed (CORRUPT)."""
        index, rest = divmod(message.first_position, self._layout.block_size)
        if message_checksum(self._run, self._layout, message, len(data)) != message.checksum:
            raise _corrupt(f"the message at position {message.first_position} does not match its checksum")
        if rest or not 0 < len(data) <= self._layout.message_bytes:
            raise _corrupt(f"a message of {len(data)} bytes at position {message.first_position}")
        self.received_bytes += len(data)
        if self._large_block:
            return self._assemble(BlockAddress(message.group, index), message, data)
        size, checksums = self._layout.block_bytes, message.block_checksums
        if message.offset or len(data) != len(checksums) * size:
            raise _corrupt(f"{len(data)} bytes are not {len(checksums)} blocks of {size}")
        return [
            FilledBlock(BlockAddress(message.group, index + at), data[at * size : (at + 1) * size], total)
            for at, total in enumerate(checksums)
        ]

    def _assemble(self, address: BlockAddress, message: wire.KvChunk, data: memoryview) -> list[FilledBlock]:
        end = self._num_filled + len(data)
        if message.offset != self._num_filled or end > len(self._large_block):
            raise _corrupt(f"a piece at {message.offset} of {address} came after {self._num_filled} bytes")
        if len(message.block_checksums) != (end == len(self._large_block)):
            raise _corrupt(f"{address} has {end} bytes and {len(message.block_checksums)} checksums")
        self._large_block[self._num_filled : end] = data
        self._num_filled = end % len(self._large_block)
        return [FilledBlock(address, memoryview(self._large_block), total) for total in message.block_checksums]


def _corrupt(detail: str) -> HandoffFailed:
    return HandoffFailed(wire.CAUSE_CORRUPT, detail)
