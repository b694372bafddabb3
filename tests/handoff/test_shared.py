"""Shared values: a closed owner opens no more of them."""

from __future__ import annotations

import pytest

from decant.handoff.shared import Shared


async def test_nothing_is_opened_after_the_owner_is_closed() -> None:
    """A receiver that ends later may still release: what that opened would never be closed."""
    opened: list[str] = []

    async def close(value: str) -> None:
        opened.remove(value)

    def open_one(key: str) -> str:
        opened.append(key)
        return key

    shared: Shared[str, str] = Shared(open_one, close)
    with shared.borrow("a"):
        assert opened == ["a"]
    await shared.close()
    with pytest.raises(ConnectionError, match="closed"), shared.borrow("b"):
        pass
    assert opened == []
