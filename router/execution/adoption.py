"""Requests of other routers that this one continues, or reads from the store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from decant.router.execution.execution import Execution
from decant.router.execution.execution_table import ExecutionTable
from decant.router.execution.services import RouterServices
from decant.router.request.stored import (
    check_same_prompt,
    check_stored,
    finish_from_record,
    recorded_stream,
    store_error,
)
from decant.router.request.token_stream import TokenStream
from decant.router.request.valid_request import ValidRequest
from decant.runtime.telemetry import logs
from decant.state.errors import StateError
from decant.state.ids import Incarnation, RequestKey
from decant.state.owned import StoredRequest

Adopt = Callable[[RequestKey, Incarnation], Awaitable[StoredRequest]]
"""``adopt``, ``adopt_orphan`` or ``cancel`` of ``Requests``."""

OnAdopted = Callable[[Execution], None]
"""Called before the execution runs."""

_log = logs.get(__name__)


class Adoptions:
    def __init__(
        self, router: RouterServices, table: ExecutionTable, on_disconnect: Callable[[TokenStream], None]
    ) -> None:
        self._router = router
        self._table = table
        self._on_disconnect = on_disconnect
        self._tasks: dict[asyncio.Task[Execution | None], RequestKey] = {}

    def is_adopting(self, key: RequestKey) -> bool:
        return key in self._tasks.values()

    async def read(self, key: RequestKey) -> StoredRequest:
        try:
            stored = await self._router.requests.read(key)
            finish_from_record(stored)  # raises if it is unreadable
        except StateError as error:
            raise store_error(error, key) from None
        return stored

    async def replay(self, stored: StoredRequest) -> TokenStream:
        try:
            return recorded_stream(stored, await self._restore(stored))
        except StateError as error:
            raise store_error(error, stored.key) from None

    async def adopt_for_client(
        self, stored: StoredRequest, adopt: Adopt, on_adopted: OnAdopted | None = None
    ) -> Execution | None:
        try:
            return await self.adopt(stored, adopt, on_adopted)
        except StateError as error:
            raise store_error(error, stored.key) from None

    async def adopt(self, stored: StoredRequest, adopt: Adopt, on_adopted: OnAdopted | None = None) -> Execution | None:
        """Continue a stored request here; return None if it has ended meanwhile.

        If the caller is cancelled, the adoption continues, and the grace of a request without a reader starts. Raises
        StateError, and ServiceError where it can't run here.
        """
        request = await self._restore(stored)
        if adopt != self._router.requests.cancel:
            check_same_prompt(stored, request)
        task = asyncio.create_task(self._adopt(request, adopt, on_adopted))
        self._tasks[task] = request.key
        task.add_done_callback(self._tasks.pop)
        self._table.track(task)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(self._on_caller_gone)
            raise

    async def _adopt(self, request: ValidRequest, adopt: Adopt, on_adopted: OnAdopted | None) -> Execution | None:
        stored = await adopt(request.key, Incarnation.of(self._router.peer))
        execution = self._table.find(stored.key)  # another call may have been faster
        if execution is not None or stored.ended:
            return execution
        self._router.metrics.adopted.labels(request.engine_request.model).inc()
        _log.info("request adopted", request_id=stored.key.id, epoch=stored.epoch, entries=stored.length)
        execution = self._table.launch(request, stored)
        if on_adopted is not None:
            on_adopted(execution)
        return execution

    async def _restore(self, stored: StoredRequest) -> ValidRequest:
        request = await self._router.restore(stored)
        check_stored(stored, request)
        return request

    def _on_caller_gone(self, task: asyncio.Task[Execution | None]) -> None:
        if task.cancelled() or task.exception() is not None:
            return  # the sweep of orphans finds the request if it is this router's now
        execution = task.result()
        if execution is not None and execution.stream.reader is None:
            self._on_disconnect(execution.stream)
