"""Registration of this router. If Redis was emptied, all requests here are written again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from decant.protos.state_pb2 import RouterRegistration, UnusedWorker
from decant.protos.worker_pb2 import Load
from decant.router.timings import STORE_RETRY_SECONDS
from decant.runtime.telemetry import logs
from decant.state.directory import RegistrationHandle
from decant.state.errors import IncarnationReplaced, StateError
from decant.state.store import Store

_log = logs.get(__name__)


class RouterRegistrar:
    def __init__(
        self,
        store: Store,
        registration: RouterRegistration,
        on_store_emptied: Callable[[], None],
        on_replaced: Callable[[], None],
        load: Callable[[], Load] = Load,
        unused_workers: Callable[[], Sequence[UnusedWorker]] = tuple,
    ) -> None:
        self._store = store
        self._registration = registration
        self._on_store_emptied = on_store_emptied
        self._on_replaced = on_replaced
        self._load = load
        self._unused_workers = unused_workers
        self._handle: RegistrationHandle[RouterRegistration] | None = None
        self._instance: str | None = None
        self.is_store_available = False

    async def close(self) -> None:
        """Remove the registration; `run` must have ended."""
        if self._handle is not None:
            try:
                await self._handle.remove()
            except StateError as error:
                _log.warning("this router stays registered until its registration expires", error=str(error))

    async def run(self, renew_every_s: float) -> None:
        is_logged = False
        while True:
            try:
                await self._renew()
                self.is_store_available, is_logged = True, False
            except IncarnationReplaced as error:
                _log.error("another process has this router's id", error=str(error))
                self._on_replaced()
                return
            except StateError as error:
                if not is_logged:
                    _log.warning("this router can't be registered now", error=str(error))
                self.is_store_available, is_logged = False, True
            await asyncio.sleep(renew_every_s if self.is_store_available else min(renew_every_s, STORE_RETRY_SECONDS))

    async def _renew(self) -> None:
        del self._registration.unused_workers[:]
        self._registration.unused_workers.extend(self._unused_workers())
        if self._handle is None:
            self._handle = await self._store.routers.register(self._registration, self._load())
        else:
            await self._handle.renew(self._load())
        instance = (await self._store.instance.current()).id
        if self._instance is not None and instance != self._instance:
            _log.warning("the state store was emptied: all requests here are written again")
            self._on_store_emptied()
        self._instance = instance
