from __future__ import annotations

import pytest

from decant.runtime.packed import pack, unpack


def test_packed_numbers_are_little_endian_and_whole() -> None:
    assert pack([1, 258]) == b"\x01\0\0\0\x02\x01\0\0"
    assert list(unpack(b"\x01\0\0\0\x02\x01\0\0")) == [1, 258]
    with pytest.raises(ValueError):
        unpack(b"\0\0\0")
