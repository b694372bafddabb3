"""The journal of a request: one entry for each output token, in order; in Redis one string.

An entry is four bytes, little-endian: the token's id in the low 24 bits, the output's index in the high 8. A write is
appended only at the expected length:

    stored   | t0 | t1 | t2 |
    written            | t2 | t3 | t4 |     base 2: t2 is known, t3 and t4 are appended
    written                           | t5 |  base 5 after three entries: refused, the owner writes again from 3
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

ENTRY_BYTES = 4
TOKEN_LIMIT = 1 << 24
OUTPUT_LIMIT = 1 << 8


class Entry(NamedTuple):
    output: int  # index, below 2**8
    token: int  # id, below 2**24


def pack(entries: Iterable[Entry]) -> bytes:
    words = []
    for output, token in entries:
        if not (0 <= token < TOKEN_LIMIT and 0 <= output < OUTPUT_LIMIT):
            raise ValueError(
                f"journal entry: token below {TOKEN_LIMIT}, output below {OUTPUT_LIMIT}, got {token}, {output}"
            )
        words.append(output << 24 | token)
    return struct.pack(f"<{len(words)}I", *words)


def outputs_of(packed: bytes) -> bytes:
    """Index of the output of each entry."""
    return packed[ENTRY_BYTES - 1 :: ENTRY_BYTES]


def unpack(data: bytes | bytearray) -> list[Entry]:
    count, rest = divmod(len(data), ENTRY_BYTES)
    if rest:
        raise ValueError(f"journal: {len(data)} bytes are not whole entries of {ENTRY_BYTES}")
    return [Entry(word >> 24, word & (TOKEN_LIMIT - 1)) for word in struct.unpack(f"<{count}I", data)]
