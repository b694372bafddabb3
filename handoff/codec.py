"""``FetchResponse`` as bytes, with the cache data last: protobuf alone would copy the cache twice on either side.

    FetchResponse:  | kv_chunk: all but data | kv_chunk: data |

A protobuf parser merges the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from decant.protos import worker_pb2 as wire

_LENGTH_DELIMITED = 2  # protobuf's wire type of submessages and bytes
_RUN = wire.FetchResponse.KV_CHUNK_FIELD_NUMBER << 3 | _LENGTH_DELIMITED
_DATA = wire.KvChunk.DATA_FIELD_NUMBER << 3 | _LENGTH_DELIMITED


@dataclass(frozen=True, slots=True)
class Received:
    """A response; ``data`` is that of its ``kv_chunk``, whose own may be empty."""

    response: wire.FetchResponse
    data: memoryview


def encode(response: wire.FetchResponse, data: Sequence[bytes | memoryview] = ()) -> bytes:
    head = response.SerializeToString()
    if not data:
        return head
    size = sum(len(part) for part in data)
    field = bytes([_DATA, *_varint(size)])
    return b"".join([head, bytes([_RUN, *_varint(len(field) + size)]), field, *data])


def decode(message: bytes) -> Received:
    view = memoryview(message)
    head, data = _borders(view)
    if head:
        return Received(wire.FetchResponse.FromString(message[:head]), view[data:])
    response = wire.FetchResponse.FromString(message)
    return Received(response, memoryview(response.kv_chunk.data))


def _borders(view: memoryview) -> tuple[int, int]:
    """Return the end of the first ``kv_chunk`` and the start of the data; zeros for any other encoding."""
    head = _content(view, 0, _RUN)
    tail = head and _content(view, head.stop, _RUN)
    data = tail and _content(view, tail.start, _DATA)
    if head and tail and data and tail.stop == data.stop == len(view):
        return head.stop, data.start
    return 0, 0


def _content(view: memoryview, at: int, tag: int) -> slice | None:
    if at >= len(view) or view[at] != tag:
        return None
    length = shift = 0
    for start in range(at + 1, min(at + 6, len(view))):
        length |= (view[start] & 0x7F) << shift
        shift += 7
        if view[start] < 0x80:
            return slice(start + 1, start + 1 + length)
    return None


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
