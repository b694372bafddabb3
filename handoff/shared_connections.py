"""Connections that calls share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

K = TypeVar("K")
T = TypeVar("T")

IDLE_SECONDS = 60.0


@dataclass(slots=True, eq=False)
class _Entry(Generic[T]):
    value: T
    users: int = 0
    timer: asyncio.TimerHandle | None = None


class SharedConnections(Generic[K, T]):
    """Connections by key: opened by their first user, closed ``idle_seconds`` after their last one."""

    def __init__(
        self,
        open: Callable[[K], T],
        close: Callable[[T], Coroutine[Any, Any, None]],
        idle_seconds: float = IDLE_SECONDS,
    ) -> None:
        self._open = open
        self._close = close
        self._idle_seconds = idle_seconds
        self._entries: dict[K, _Entry[T]] = {}
        self._evicted: set[_Entry[T]] = set()  # have users
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._entries)

    @contextmanager
    def borrow(self, key: K) -> Iterator[T]:
        if self._closed:
            raise ConnectionError("the transport is closed")
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = _Entry(self._open(key))
        if entry.timer is not None:
            entry.timer.cancel()
        entry.users += 1
        try:
            yield entry.value
        finally:
            entry.users -= 1
            if not entry.users:
                self._release(key, entry)

    def evict(self, key: K, value: T) -> None:
        """Open another value at the next use of the key; close this one when its last user has left."""
        entry = self._entries.get(key)
        if entry is None or entry.value is not value:
            return
        del self._entries[key]
        if entry.users:
            self._evicted.add(entry)
        else:
            self._start_close(entry)

    def _release(self, key: K, entry: _Entry[T]) -> None:
        if self._entries.get(key) is entry:
            entry.timer = asyncio.get_running_loop().call_later(self._idle_seconds, self.evict, key, entry.value)
        elif entry in self._evicted:
            self._evicted.remove(entry)
            self._start_close(entry)

    def _start_close(self, entry: _Entry[T]) -> None:
        if entry.timer is not None:
            entry.timer.cancel()
        closing = asyncio.get_running_loop().create_task(self._close(entry.value))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        self._closed = True
        entries = [*self._entries.values(), *self._evicted]
        self._entries.clear()
        self._evicted.clear()
        for entry in entries:
            self._start_close(entry)
        if self._closing:
            await asyncio.wait(self._closing)
