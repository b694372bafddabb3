"""Keeps this router's open set in the store true, where a removal was lost.

A request leaves the open set when it ends or is taken over. Where Redis was away just then, or the request expired,
its entry stays; nothing else would remove it while this router lives.
"""

from __future__ import annotations

import asyncio

from decant.runtime import logs
from decant.state.errors import StateError
from decant.state.ids import Incarnation, RequestKey
from decant.state.store import Store

SWEEP_SECONDS = 30.0
"""An entry that is left over in two sweeps is removed: it may come a moment before its request."""

_log = logs.get(__name__)


class OpenEntries:
    """Sweeps the open set of one router while `run` runs."""

    def __init__(self, store: Store, router: Incarnation) -> None:
        self._store = store
        self._router = router
        self._left = set[RequestKey]()

    async def sweep(self) -> None:
        """Remove what was left over at the last sweep too. Raises StoreUnavailable."""
        left = await self._store.requests.leftovers(self._router)
        twice = list(left & self._left)
        await self._store.open.remove(self._router, twice)
        self._left = left.difference(twice)
        if twice:
            _log.info("entries without an open request were removed", entries=len(twice))

    async def run(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            try:
                await self.sweep()
            except StateError:  # the registration says that it is away
                self._left.clear()
