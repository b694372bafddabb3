"""Requests without a router: found by the routers that are left, each taken over by one of them.

    directory --a registration ran out--> is it dead? --its open requests--> adopt_orphan: one router wins--> Execution
                                             |                                                                without a
                                             no: a worker has a session with it, or this router                reader:
                                             could not read the directory for long enough                      its grace
                                                                                                               begins
A registration also runs out when its router can't reach the store, or when the store stood still. So a router is taken
for dead only when both hold:

  - this router has read the directory without a break for a whole registration: a router that lives, and was cut off
    from the store by the same fault, has had the time to register again;
  - no worker has a live session with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from decant.router.execution.registry import RequestRegistry
from decant.runtime import logs
from decant.runtime.errors import ServiceError
from decant.state.errors import OwnerAlive, StateError, StoreUnavailable, Superseded, UnknownRequest, UnreadableRequest
from decant.state.ids import Incarnation, RequestKey
from decant.state.keys import Ttls
from decant.state.store import Store

RETRY_SECONDS = 1.0
LATE_SECONDS = 0.5
"""An answer that comes later than this, and than a quarter of a registration, counts as a break of the directory."""
RECLAIM_SECONDS = 30.0
"""Between two looks for requests that this router owns and does not run."""
MOST_PAUSE_SECONDS = 30.0
"""Between two tries to take over requests that this router can't run."""

_log = logs.get(__name__)


class OrphanRecovery:
    """Watches the directory of routers while `run` runs.

    ``is_connected``: whether a worker has a live session with a router. The directory is read as often as
    registrations of these ``ttls`` are renewed.
    """

    def __init__(
        self,
        store: Store,
        dispatcher: RequestRegistry,
        router: Incarnation,
        is_connected: Callable[[Incarnation], bool],
        ttls: Ttls,
    ) -> None:
        self._store = store
        self._dispatcher = dispatcher
        self._router = router
        self._is_connected = is_connected
        self._ttls = ttls
        self._pauses: dict[Incarnation, _Pause] = {}

    async def run(self) -> None:
        while True:
            try:
                await self._watch()
            except StateError:  # the registration logs that the store is away
                await asyncio.sleep(RETRY_SECONDS)

    async def _watch(self) -> None:
        """Raises StateError when the directory can't be read any more; what was known of dead routers is void then."""
        clock, look_every_s = asyncio.get_running_loop().time, self._ttls.renew_every_s
        listing = await self._store.routers.listing()
        readable_since = clock()
        reclaim_at = readable_since
        while True:
            if clock() >= reclaim_at:
                await self._reclaim()
                reclaim_at = clock() + RECLAIM_SECONDS
            if clock() - readable_since >= self._ttls.registration_s:
                await self._take_over_dead()
            asked_at = clock()
            listing = await self._store.routers.change(listing, look_every_s)
            if clock() - asked_at - look_every_s > max(look_every_s, LATE_SECONDS):
                readable_since = clock()

    async def _take_over_dead(self) -> None:
        """In a Redis that was emptied, living routers are not registered at once: until then none is dead."""
        if (await self._store.instance.current()).refill_left_s:
            return
        orphaned = await self._store.open.orphaned() - {self._router}
        self._pauses = {dead: pause for dead, pause in self._pauses.items() if dead in orphaned}
        now = asyncio.get_running_loop().time()
        for dead in orphaned:
            if not self._is_connected(dead) and (dead not in self._pauses or self._pauses[dead].ends_at <= now):
                await self._take_over(dead)

    async def _take_over(self, dead: Incarnation) -> None:
        """All that this router can run; an entry that it can't run stays for others. Raises StoreUnavailable."""
        left = await self._store.open.of(dead)
        failures = [error for key in left if (error := await self._take(dead, key)) is not None]
        if failures:
            pause = self._pauses.setdefault(dead, _Pause(self._ttls.renew_every_s))
            pause.grow(asyncio.get_running_loop().time())
            words = "requests can't be taken over"
            _log.warning(words, requests=len(failures), router=dead.id, error=str(failures[-1]))
        if not left:
            with suppress(OwnerAlive):
                await self._store.open.take(dead, self._router)  # forgets a router that has no entries

    async def _reclaim(self) -> None:
        """Run what this router owns by the store and does not run: the answer to its acceptance or adoption was lost.
        Raises StoreUnavailable."""
        for key in await self._store.open.of(self._router):
            if not self._dispatcher.knows(key) and (error := await self._take(self._router, key)) is not None:
                _log.warning("a request can't be gone on with", request_id=key.id, error=str(error))

    async def _take(self, owner: Incarnation, key: RequestKey) -> Exception | None:
        """Returns why the request stays with its owner, where it can't be run here. Raises StoreUnavailable."""
        try:
            await self._dispatcher.take_over(key)
        except StoreUnavailable:
            raise
        except OwnerAlive as error:
            if error.owner == owner:
                return None  # it registered again meanwhile: the entry is its own
        except (Superseded, UnknownRequest):
            pass  # it has another owner, or is over
        except UnreadableRequest as error:  # no router can: it stays in the store until it expires
            _log.error("a request is set aside", request_id=key.id, router=owner.id, error=str(error))
        except (ServiceError, StateError) as error:
            return error
        if owner != self._router:  # an entry of its own goes with its request, or by `OpenEntries`
            await self._store.open.remove(owner, [key])
        return None


class _Pause:
    """Between two tries to take over what a router left that can't be run here: every router that looks reads all of
    these requests from the store."""

    def __init__(self, seconds: float) -> None:
        self.ends_at = 0.0
        self._seconds = seconds

    def grow(self, now: float) -> None:
        self.ends_at = now + self._seconds
        self._seconds = min(2 * self._seconds, MOST_PAUSE_SECONDS)
