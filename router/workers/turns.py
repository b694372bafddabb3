"""Waiting for a worker with capacity, in a model's waiting line."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, TypeVar

from decant.router.workers.waiting_line import CapacityKind, Waiter, WaitingLine

PLACEMENT_RETRY_SECONDS = 1.0
"""Interval at which a waiting request checks whether a worker that it may go to still answers."""

_T_co = TypeVar("_T_co", covariant=True)
_T = TypeVar("_T")


class Search(Protocol[_T_co]):
    """A choice among the workers of a model, for one request."""

    @property
    def line(self) -> WaitingLine: ...

    @property
    def order(self) -> float:
        """The smallest goes first."""
        ...

    @property
    def kind(self) -> CapacityKind: ...

    def choose(self) -> _T_co | None:
        """Return a choice with capacity; None while there is none."""
        ...

    def is_answered(self) -> bool:
        """Whether any eligible worker answers."""
        ...

    def timeout_ends(self, since: float, unanswered: float | None) -> float:
        """Time at which a search that began at ``since`` ends; since ``unanswered`` no eligible worker answers."""
        ...

    def failure(self) -> Exception: ...


async def find(search: Search[_T], changed: asyncio.Event, is_over: Callable[[], bool] = lambda: False) -> _T | None:
    """Wait for a choice; None once ``is_over``, whose owner sets ``changed``. Raises the search's failure once its time
    is over, and what ``is_over`` raises.
    """
    line, kind = search.line, search.kind
    is_first = not line.has_waiter(kind)
    if is_first and (choice := search.choose()) is not None:
        return choice
    waiter = Waiter(search.order, kind, changed.set)
    line.add(waiter)
    if not is_first:
        line.open([kind])
    try:
        return await _until_turn(search, waiter, changed, is_over)
    finally:
        line.remove(waiter)


async def _until_turn(
    search: Search[_T], waiter: Waiter, changed: asyncio.Event, is_over: Callable[[], bool]
) -> _T | None:
    loop = asyncio.get_running_loop()
    since, unanswered = loop.time(), None
    while True:
        if search.line.is_turn_of(waiter):
            if (choice := search.choose()) is not None:
                return choice
            search.line.pass_turn(waiter)
        if is_over():
            return None
        if search.is_answered():
            unanswered = None
        elif unanswered is None:
            unanswered = loop.time()
        timeout_ends = search.timeout_ends(since, unanswered)
        if timeout_ends <= loop.time():
            raise search.failure()
        with suppress(TimeoutError):
            async with asyncio.timeout_at(min(timeout_ends, loop.time() + PLACEMENT_RETRY_SECONDS)):
                await changed.wait()
                changed.clear()
