"""A worker's registration in the directory: renewed with its load, removed when it drains."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from functools import partial
from types import TracebackType
from typing import Self

from decant.protos.state_pb2 import WorkerRegistration
from decant.protos.worker_pb2 import Adapter, Load, Role
from decant.runtime.background import BackgroundTask, RestartPolicy, run_restarting
from decant.runtime.telemetry import logs
from decant.state.directory import RegistrationHandle, Workers
from decant.state.errors import IncarnationReplaced, StoreFault, StoreUnavailable

_log = logs.get(__name__)


class Registrar:
    def __init__(
        self,
        workers: Workers,
        registration: WorkerRegistration,
        load: Callable[[], Load],
        every_s: float,
        on_lost: Callable[[str], None],
        restarts: RestartPolicy = RestartPolicy(),
    ) -> None:
        self._workers = workers
        self._registration = registration
        self._load = load
        self._every_s = every_s
        self._on_lost = on_lost
        self._handle: RegistrationHandle[WorkerRegistration] | None = None
        self._is_unavailable = False
        self._renewal_requested = asyncio.Event()
        renew = partial(run_restarting, "registration", self._renew_always, restarts)
        self._renewal_task = BackgroundTask("registration", renew, lambda _, error: on_lost(repr(error)))

    async def __aenter__(self) -> Self:
        """Register. Raises StoreFault for an unsuitable Redis; an unavailable one is retried later."""
        try:
            await self._renew()
        except StoreUnavailable as error:
            self._log_availability(error)
        self._renewal_task.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Remove the registration if Redis is available; idempotent."""
        await self._renewal_task.close()
        registration, self._handle = self._handle, None
        if registration is not None:
            with contextlib.suppress(StoreUnavailable, StoreFault):
                await registration.remove()

    def renew_now(self) -> None:
        self._renewal_requested.set()

    def set_role(self, role: Role) -> None:
        """Register the role soon, and again whenever the registration was lost."""
        self._registration.role = role  # the handle, if there is one, has the same message
        self.renew_now()

    def set_adapters(self, adapters: Iterable[Adapter]) -> None:
        """Register the adapters soon, and again whenever the registration was lost."""
        del self._registration.adapters[:]
        self._registration.adapters.extend(adapters)
        self.renew_now()

    async def _renew_always(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._every_s):
                    await self._renewal_requested.wait()
            self._renewal_requested.clear()
            try:
                await self._renew()
            except (StoreUnavailable, StoreFault) as error:
                self._log_availability(error)
            except IncarnationReplaced as replaced:
                _log.error("another incarnation of this worker registered", reason=str(replaced))
                self._handle = None
                self._on_lost(str(replaced))
                return
            else:
                self._log_availability(None)

    async def _renew(self) -> None:
        if self._handle is None:
            self._handle = await self._workers.register(self._registration, self._load())
            _log.info("registered", peer=self._registration.peer.id, address=self._registration.address)
        else:
            await self._handle.renew(self._load())

    def _log_availability(self, error: Exception | None) -> None:
        if error is not None and not self._is_unavailable:
            _log.warning("the directory is unavailable; this worker keeps serving", reason=str(error))
        elif error is None and self._is_unavailable:
            _log.info("the directory is available again")
        self._is_unavailable = error is not None
