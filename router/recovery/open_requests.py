from __future__ import annotations

import asyncio

from decant.router.timings import RouterTimings
from decant.runtime.telemetry import logs
from decant.state.errors import StateError
from decant.state.ids import Incarnation, RequestKey
from decant.state.store import Store

_log = logs.get(__name__)


class OpenEntries:
    """Sweep of this router's open set for entries whose removal was lost.

    An entry without an open request in two sweeps is removed: it may be written a moment before its request.
    """

    def __init__(self, store: Store, router: Incarnation, sweep_every_s: float = RouterTimings().sweep_every_s) -> None:
        self._store = store
        self._router = router
        self._sweep_every_s = sweep_every_s
        self._stale = set[RequestKey]()

    async def sweep(self) -> None:
        stale = await self._store.requests.stale_entries(self._router)
        to_remove = list(stale & self._stale)
        await self._store.open.remove(self._router, to_remove)
        self._stale = stale.difference(to_remove)
        if to_remove:
            _log.info("entries without an open request were removed", entries=len(to_remove))

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._sweep_every_s)
            try:
                await self.sweep()
            except StateError:  # the registration logs that the store is unavailable
                self._stale.clear()
