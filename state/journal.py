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
from dataclasses import dataclass
from typing import NamedTuple

from decant.state import keys, scripts
from decant.state.client import Client
from decant.state.ids import RequestKey
from decant.state.store_instance import StoreInstance

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


def unpack(data: bytes | bytearray) -> list[Entry]:
    count, rest = divmod(len(data), ENTRY_BYTES)
    if rest:
        raise ValueError(f"journal: {len(data)} bytes are not whole entries of {ENTRY_BYTES}")
    return [Entry(word >> 24, word & (TOKEN_LIMIT - 1)) for word in struct.unpack(f"<{count}I", data)]


@dataclass(frozen=True)
class Part:
    entries: list[Entry]
    length: int  # entries in the whole journal


class Journal:
    def __init__(self, client: Client, instance: StoreInstance) -> None:
        self._client = client
        self._instance = instance

    async def read(self, key: RequestKey, first: int, max_entries: int) -> Part:
        """Read at most `max_entries` entries from `first` on. Raises UnknownRequest, StoreRefilling."""
        if first < 0 or max_entries < 1:
            raise ValueError(f"journal: first from 0, max_entries from 1, got {first}, {max_entries}")
        names = [keys.request(key), keys.journal(key)]
        reply = await self._client.run(scripts.JOURNAL_READ.call(names, first, max_entries))
        if reply[0] == b"unknown":
            raise await self._instance.unknown_error(key)
        return Part(unpack(reply[2]), reply[1])
