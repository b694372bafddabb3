"""Integers in messages: little-endian uint32, without a length."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable

_NUMBER_BYTES = 4


def pack(numbers: Iterable[int]) -> bytes:
    packed = array("I", numbers)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def count(data: bytes) -> int:
    return len(data) // _NUMBER_BYTES


def unpack(data: bytes) -> array[int]:
    """Unpack all numbers. Raises ValueError if the bytes end within one."""
    numbers = array("I")
    numbers.frombytes(data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
