"""This router among its peers: registered, renewed, and heard of when Redis was emptied.

register ---- renew ---- renew ---- ...            Redis is away: tried again at the next renewal
                '-- another era: Redis was emptied, everything that this router holds is written again
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from decant.protos.state_pb2 import RouterRegistration
from decant.protos.worker_pb2 import Load
from decant.runtime import logs
from decant.state.directory import Registration
from decant.state.errors import IncarnationReplaced, StateError
from decant.state.store import Store

_log = logs.get(__name__)


class RouterRegistrar:
    """Calls ``on_store_emptied`` when Redis has lost its data, ``on_replaced`` when another incarnation registers under
    this id. ``load`` is read at each renewal."""

    def __init__(
        self,
        store: Store,
        facts: RouterRegistration,
        on_store_emptied: Callable[[], None],
        on_replaced: Callable[[], None],
        load: Callable[[], Load] = Load,
    ) -> None:
        self._store = store
        self._facts = facts
        self._on_new_era = on_store_emptied
        self._on_replaced = on_replaced
        self._load = load
        self._registration: Registration[RouterRegistration] | None = None
        self._era: str | None = None

    async def close(self) -> None:
        """Leave the directory, after `run` was cancelled, as far as Redis can be reached."""
        if self._registration is not None:
            try:
                await self._registration.remove()
            except StateError as error:
                _log.warning("this router stays registered until that runs out", error=str(error))

    async def run(self, renew_every_s: float) -> None:
        away = False
        while True:
            try:
                await self._renew()
                away = False
            except IncarnationReplaced as error:
                _log.error("another process has this router's id", error=str(error))
                self._on_replaced()
                return
            except StateError as error:
                if not away:
                    _log.warning("this router can't be registered now", error=str(error))
                away = True
            await asyncio.sleep(renew_every_s)

    async def _renew(self) -> None:
        """Raises Replaced, StoreUnavailable, StoreFault."""
        if self._registration is None:
            self._registration = await self._store.routers.register(self._facts, self._load())
        else:
            await self._registration.renew(self._load())
        era = (await self._store.instance.current()).id
        if self._era is not None and era != self._era:
            _log.warning("the state store was emptied: what is held here is written again")
            self._on_new_era()
        self._era = era
