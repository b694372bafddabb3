"""Logprobs as bytes, little-endian: one entry for each token, all of a request equally long.

    | logprob f4 | rank u4 | id u4, logprob f4 of the likeliest token | ... of each alternative |

A missing alternative (of a small vocabulary) has the id NONE.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence

from decant.protos.worker_pb2 import TokenLogprobs

NONE = (1 << 32) - 1
MAX_ALTERNATIVES = 1024
_ID_LIMIT = 1 << 24


def entry_bytes(alternatives: int) -> int:
    return 8 * (1 + alternatives)


class Logprobs:
    """Packed logprobs of a request. Values are copied, as a protobuf submessage keeps its whole message in memory."""

    __slots__ = ("_alternatives", "_data", "_layout")

    def __init__(self, alternatives: int = 0, data: bytes = b"") -> None:
        if alternatives > MAX_ALTERNATIVES:
            raise ValueError(f"logprobs: at most {MAX_ALTERNATIVES} alternatives, got {alternatives}")
        size = entry_bytes(alternatives)
        if len(data) % size:
            raise ValueError(f"logprobs: {len(data)} bytes are not whole entries of {size}")
        self._alternatives = alternatives
        self._layout = struct.Struct("<fI" + "If" * alternatives)
        self._data = bytearray(data)

    def __len__(self) -> int:
        return len(self._data) // self._layout.size

    def __iter__(self) -> Iterator[TokenLogprobs]:
        return iter(self.entries())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Logprobs):
            return NotImplemented
        return self._alternatives == other._alternatives and self._data == other._data

    __hash__ = None  # type: ignore[assignment]

    def append(self, token: TokenLogprobs) -> None:
        """Append an entry without surplus alternatives. Raises ValueError for an invalid one."""
        self._data += self._layout.pack(token.logprob, token.rank, *self._top(token))

    def extend(self, tokens: Iterable[TokenLogprobs]) -> None:
        """Append entries. Raises ValueError for the first invalid one, after those before it were appended."""
        for token in tokens:
            self.append(token)

    def entries(self, first: int = 0, end: int | None = None) -> list[TokenLogprobs]:
        size = self._layout.size
        data = self._data[first * size : None if end is None else end * size]
        return [_message(numbers) for numbers in self._layout.iter_unpack(data)]

    def select(self, chosen: Iterable[bool]) -> Logprobs:
        """Entries at the places that are ``chosen``."""
        size = self._layout.size
        data = b"".join(
            bytes(self._data[place * size : (place + 1) * size]) for place, is_chosen in enumerate(chosen) if is_chosen
        )
        return Logprobs(self._alternatives, data)

    def packed(self, first: int = 0) -> bytes:
        return bytes(self._data[first * self._layout.size :])

    def _top(self, token: TokenLogprobs) -> list[float]:
        ids, values = token.top_ids, token.top_logprobs
        if len(ids) != len(values):
            raise ValueError(f"logprobs: as many top_ids as top_logprobs, got {len(ids)} and {len(values)}")
        top: list[float] = []
        for id, value in zip(ids[: self._alternatives], values[: self._alternatives], strict=True):
            if id >= _ID_LIMIT:
                raise ValueError(f"logprobs: top_ids below {_ID_LIMIT}, got {id}")
            top += (id, value)
        return top + [NONE, 0.0] * (self._alternatives - len(top) // 2)


def _message(numbers: Sequence[float]) -> TokenLogprobs:
    logprob, rank, *top = numbers
    kept = [(int(id), value) for id, value in zip(top[::2], top[1::2], strict=True) if id != NONE]
    return TokenLogprobs(
        logprob=logprob, rank=int(rank), top_ids=[id for id, _ in kept], top_logprobs=[value for _, value in kept]
    )
