from __future__ import annotations

import asyncio
from typing import Any

from decant.router.execution.execution import Execution
from decant.router.execution.services import RouterServices
from decant.router.request.valid_request import ValidRequest
from decant.runtime.background import start_task
from decant.runtime.telemetry import logs
from decant.state.ids import RequestKey
from decant.state.owned import StoredRequest


class ExecutionTable:
    """Owner of executions from their start until nothing more of them will be written."""

    def __init__(self, router: RouterServices) -> None:
        self.open: dict[RequestKey, Execution] = {}
        self._router = router
        self._unpersisted: dict[RequestKey, Execution] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def running(self) -> int:
        return sum(execution.is_scheduled for execution in self.open.values())

    @property
    def waiting(self) -> int:
        return len(self.open) - self.running

    def find(self, key: RequestKey) -> Execution | None:
        return self.open.get(key) or self._unpersisted.get(key)

    def launch(self, request: ValidRequest, adopted: StoredRequest | None = None, epoch: int = 1) -> Execution:
        execution = Execution(request, self._router, self, adopted, epoch)
        self.open[request.key] = execution
        with logs.bound(request_id=request.key.id):
            execution.task = start_task("request", execution.run())
        self.track(execution.task)
        return execution

    def track(self, task: asyncio.Task[Any]) -> None:
        """Own a task: ``close`` cancels it, and the table is not idle before it ends."""
        self._tasks.add(task)
        self._idle.clear()
        task.add_done_callback(self._untrack)

    def _untrack(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not self._tasks:
            self._idle.set()

    async def wait_idle(self) -> None:
        await self._idle.wait()

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def on_ended(self, execution: Execution) -> None:
        key = execution.stream.request.key
        if self.open.get(key) is execution:
            del self.open[key]
            self._unpersisted[key] = execution

    def on_persisted(self, execution: Execution) -> None:
        key = execution.stream.request.key
        if self._unpersisted.get(key) is execution:
            del self._unpersisted[key]
