from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from decant.runtime.backoff import Backoff
from decant.runtime.telemetry import logs

CLOSE_SECONDS = 10.0
"""A cancelled task that takes longer is left running."""

OnCrash = Callable[[str, BaseException], None]
"""Called on the event loop with the task's name and exception."""

_T = TypeVar("_T")

_log = logs.get(__name__)


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """Task group that raises its first error by itself.

    In Python before 3.13 the task of a group in which another task failed keeps a request to cancel it, as if its
    caller had cancelled it.
    """
    task = asyncio.current_task()
    assert task is not None
    requests = task.cancelling()
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except ExceptionGroup as failed:
        while task.cancelling() > requests:
            task.uncancel()
        raise failed.exceptions[0] from None


def start_task(
    name: str,
    coroutine: Coroutine[Any, Any, _T],
    on_failure: Callable[[BaseException], None] | None = None,
    **context: object,
) -> asyncio.Task[_T]:
    """Start a task; an exception that ends it is logged with ``context``, then passed to `on_failure`."""

    def report(task: asyncio.Task[_T]) -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        _log.error("a task failed", task=name, exc_info=error, **context)
        if on_failure is not None:
            on_failure(error)

    task = asyncio.create_task(coroutine, name=name)
    task.add_done_callback(report)
    return task


@dataclass(frozen=True)
class RestartPolicy:
    max_crashes: int = 5
    """Crashes in a row after which the last one is raised."""
    pause: Backoff = Backoff(0.5, 8.0)
    steady_s: float = 60.0
    """A run that lasts longer begins a new row."""


async def run_restarting(
    name: str, run: Callable[[], Coroutine[Any, Any, None]], policy: RestartPolicy = RestartPolicy()
) -> None:
    """Run until `run` returns; after an exception, log it and run again: one failed call ends no loop of a process.

    Raises the exception of the last of ``policy.max_crashes`` in a row: another process may do better.
    """
    clock = asyncio.get_running_loop().time
    crashes = 0
    while True:
        began_at = clock()
        try:
            return await run()
        except Exception as error:
            crashes = 1 if clock() - began_at > policy.steady_s else crashes + 1
            if crashes >= policy.max_crashes:
                raise
            _log.error("a task failed and starts again", task=name, crashes=crashes, exc_info=error)
        await asyncio.sleep(policy.pause.seconds(crashes))


class BackgroundTask:
    """A task from `start` (once) to `close` (idempotent); `run` may return earlier.

    A crash is logged and passed to `on_crash`; without one, `close` raises it.
    """

    def __init__(
        self,
        name: str,
        run: Callable[[], Coroutine[Any, Any, None]],
        on_crash: OnCrash | None = None,
        *,
        close_seconds: float = CLOSE_SECONDS,
    ) -> None:
        self._name = name
        self._run = run
        self._on_crash = on_crash
        self._close_seconds = close_seconds
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._task is not None:
            raise RuntimeError(f"{self._name} was started before")
        on_failure = None if self._on_crash is None else partial(self._on_crash, self._name)
        self._task = start_task(self._name, self._run(), on_failure)

    async def close(self) -> None:
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.wait([self._task], timeout=self._close_seconds)
        if not self._task.done():
            _log.error("a task does not end", task=self._name, limit_seconds=self._close_seconds)
        elif self._on_crash is None and not self._task.cancelled():
            self._task.result()

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
