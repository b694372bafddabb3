from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self

from decant.runtime.telemetry import logs

CLOSE_SECONDS = 10.0
"""A cancelled task that takes longer is left running."""

OnCrash = Callable[[str, BaseException], None]
"""Called on the event loop with the task's name and exception."""

_log = logs.get(__name__)


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

    @property
    def is_running(self) -> bool:
        return self._task is not None and not self._task.done()

    def start(self) -> None:
        if self._task is not None:
            raise RuntimeError(f"{self._name} was started before")
        self._task = asyncio.create_task(self._run(), name=self._name)
        self._task.add_done_callback(self._report)

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

    def _report(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        _log.error("a task failed", task=self._name, exc_info=error)
        if self._on_crash is not None:
            self._on_crash(self._name, error)
