"""Requests of routers that are gone: found by those that are left, each gone on with by one of them.

directory --a router ran out--> its open requests --adopt_orphan: one of us wins--> Execution, read by nobody yet
                                                                                      '-- its grace runs from here
"""

from __future__ import annotations

import asyncio

from router.dispatch import Dispatcher
from runtime import logs
from runtime.errors import ServiceError
from state.errors import OwnerAlive, StateError, StoreUnavailable, Superseded, UnknownRequest, UnreadableRequest
from state.names import Life
from state.store import Store

WATCH_SECONDS = 30.0
RETRY_SECONDS = 1.0

_log = logs.get(__name__)


class Takeover:
    """Watches the directory of routers for as long as its task runs; ``close`` ends it."""

    def __init__(self, store: Store, dispatcher: Dispatcher, router: Life) -> None:
        self._store = store
        self._dispatcher = dispatcher
        self._router = router
        self._task: asyncio.Task[None] | None = None

    def start(self) -> asyncio.Task[None]:
        self._task = asyncio.create_task(self._run())
        return self._task

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        while True:
            try:
                listing = await self._store.routers.listing()
                while True:
                    await self._until_refilled()
                    for dead in await self._store.open.orphaned() - {self._router}:
                        await self._take_over(dead)
                    listing = await self._store.routers.change(listing, WATCH_SECONDS)
            except StateError:  # the registration says that it is away
                await asyncio.sleep(RETRY_SECONDS)

    async def _until_refilled(self) -> None:
        """In a Redis that was emptied, routers that live are not registered at once: until then nobody is gone."""
        while left_s := (await self._store.era.current()).refill_left_s:  # noqa: ASYNC110 - not a poll
            await asyncio.sleep(left_s)

    async def _take_over(self, dead: Life) -> None:
        """All that this router can run; an entry that it can't run stays for others. Raises StoreUnavailable."""
        left = await self._store.open.of(dead)
        for key in left:
            try:
                await self._dispatcher.take_over(key)
            except StoreUnavailable:
                raise
            except (OwnerAlive, Superseded, UnknownRequest):
                pass  # it is somebody's, or over
            except UnreadableRequest as error:  # no router can: it stays in the store until it expires
                _log.error("a request is set aside", request_id=key.id, router=dead.id, error=str(error))
            except (ServiceError, StateError) as error:
                _log.warning("a request can't be taken over", request_id=key.id, router=dead.id, error=str(error))
                continue
            await self._store.open.remove(dead, [key])
        if not left:
            await self._store.open.take(dead, self._router)  # forgets who has none
