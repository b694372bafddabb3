"""Takeover of the requests of dead routers; one remaining router adopts each.

A registration also expires when its router can't reach the store, or the store stalled. So a router counts as dead only
if no worker has a session with it, and this router has read the directory without a break for the time of a
registration: a live router that the same fault cut off would have registered again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from decant.router.execution.registry import RequestRegistry
from decant.router.timings import TakeoverTimings
from decant.runtime.backoff import Backoff
from decant.runtime.errors import ServiceError
from decant.runtime.telemetry import logs
from decant.state.errors import (
    OwnerRegistered,
    StateError,
    StoreUnavailable,
    Superseded,
    UnknownRequest,
    UnreadableRequest,
)
from decant.state.ids import Incarnation, RequestKey
from decant.state.keys import Ttls
from decant.state.store import Store

_log = logs.get(__name__)


class OrphanRecovery:
    def __init__(
        self,
        store: Store,
        registry: RequestRegistry,
        router: Incarnation,
        is_connected: Callable[[Incarnation], bool],
        ttls: Ttls,
        timings: TakeoverTimings = TakeoverTimings(),
    ) -> None:
        self._store = store
        self._registry = registry
        self._router = router
        self._is_connected = is_connected
        self._ttls = ttls
        self._timings = timings
        self._backoff = Backoff(ttls.renew_every_s, timings.max_pause_s)
        self._pauses: dict[Incarnation, _Pause] = {}

    async def run(self) -> None:
        while True:
            try:
                await self._watch()
            except StateError:  # the registration logs that the store is unavailable
                await asyncio.sleep(self._timings.retry_s)

    async def _watch(self) -> None:
        clock, poll_s = asyncio.get_running_loop().time, self._ttls.renew_every_s
        listing = await self._store.routers.listing()
        readable_since = clock()
        reclaim_at = readable_since
        while True:
            if clock() >= reclaim_at:
                await self._reclaim()
                reclaim_at = clock() + self._timings.reclaim_every_s
            if clock() - readable_since >= self._ttls.registration_s:
                await self._take_over_dead()
            began_at = clock()
            listing = await self._store.routers.wait_for_change(listing, poll_s)
            if clock() - began_at - poll_s > max(poll_s, self._timings.late_s):
                readable_since = clock()

    async def _take_over_dead(self) -> None:
        """Take over, unless Redis was emptied and live routers have not had time to register."""
        if (await self._store.instance.current()).refill_left_s:
            return
        orphaned = await self._store.open.orphaned() - {self._router}
        self._pauses = {dead: pause for dead, pause in self._pauses.items() if dead in orphaned}
        now = asyncio.get_running_loop().time()
        for dead in orphaned:
            if not self._is_connected(dead) and (dead not in self._pauses or self._pauses[dead].ends_at <= now):
                await self._take_over(dead)

    async def _take_over(self, dead: Incarnation) -> None:
        left = await self._store.open.of(dead)
        failures = [error for key in left if (error := await self._take(dead, key)) is not None]
        if failures:
            pause = self._pauses.setdefault(dead, _Pause())
            pause.failures += 1
            pause.ends_at = asyncio.get_running_loop().time() + self._backoff.seconds(pause.failures)
            message = "requests can't be taken over"
            _log.warning(message, requests=len(failures), router=dead.id, error=str(failures[-1]))
        if not left:
            with suppress(OwnerRegistered):
                await self._store.open.take(dead, self._router)  # forgets a router that has no entries

    async def _reclaim(self) -> None:
        """Continue requests that this router owns in the store and does not run: a reply was lost."""
        for key in await self._store.open.of(self._router):
            if not self._registry.has_request(key) and (error := await self._take(self._router, key)) is not None:
                _log.warning("a request can't be continued", request_id=key.id, error=str(error))

    async def _take(self, owner: Incarnation, key: RequestKey) -> Exception | None:
        try:
            await self._registry.take_over(key)
        except StoreUnavailable:
            raise
        except OwnerRegistered as error:
            if error.owner == owner:
                return None  # it registered again: the entry is its own
        except (Superseded, UnknownRequest):
            pass  # it has another owner, or has ended
        except UnreadableRequest as error:  # no router can run it: it expires in the store
            _log.error("an unreadable request is skipped", request_id=key.id, router=owner.id, error=str(error))
        except (ServiceError, StateError) as error:
            return error
        if owner != self._router:  # an own entry is removed with its request, or by `OpenEntries`
            await self._store.open.remove(owner, [key])
        return None


@dataclass(slots=True)
class _Pause:
    failures: int = 0
    ends_at: float = 0.0
