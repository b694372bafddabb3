from __future__ import annotations

import asyncio

import pytest

from decant.handoff.shared_connections import SharedConnections


async def test_nothing_is_opened_after_the_owner_is_closed() -> None:
    opened: list[str] = []

    async def close(value: str) -> None:
        opened.remove(value)

    def open_one(key: str) -> str:
        opened.append(key)
        return key

    shared: SharedConnections[str, str] = SharedConnections(open_one, close)
    with shared.borrow("a"):
        assert opened == ["a"]
    await shared.close()
    with pytest.raises(ConnectionError, match="closed"), shared.borrow("b"):
        pass
    assert opened == []


async def test_an_evicted_value_is_closed_after_its_last_user_and_nothing_else_is() -> None:
    closed: list[list[str]] = []

    async def close(value: list[str]) -> None:
        closed.append(value)

    shared: SharedConnections[str, list[str]] = SharedConnections(lambda key: [key], close)
    with shared.borrow("a") as first:
        with shared.borrow("a") as same:
            assert same is first
            shared.evict("a", first)
            with shared.borrow("a") as second:
                assert second is not first
                shared.evict("a", first)  # late
                assert len(shared) == 1
        await asyncio.sleep(0)
        assert not closed
    await asyncio.sleep(0)
    assert [value is first for value in closed] == [True]
    await shared.close()
    assert [value is second for value in closed] == [False, True]


async def test_an_evicted_value_in_use_is_closed_with_its_owner_once() -> None:
    closed: list[list[str]] = []

    async def close(value: list[str]) -> None:
        closed.append(value)

    shared: SharedConnections[str, list[str]] = SharedConnections(lambda key: [key], close)
    with shared.borrow("a") as value:
        shared.evict("a", value)
        await shared.close()
        assert closed == [value]
    await shared.close()
    assert closed == [value]
