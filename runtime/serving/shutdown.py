from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, TypeVar

from decant.runtime.telemetry import logs

_T = TypeVar("_T")
_log = logs.get(__name__)


class Shutdown:
    def __init__(self) -> None:
        self.ends_process = False
        """The next request ends the process with status 0: set while another thread holds the GIL for long."""
        self._requested = asyncio.Event()
        self._forced = asyncio.Event()

    def request(self, reason: str) -> None:
        _log.info("shutdown", reason=reason, at_once=self.ends_process or self._requested.is_set())
        if self.ends_process:
            _log.info("ended")
            end_process(0)
        (self._forced if self._requested.is_set() else self._requested).set()

    def on_signals(self) -> None:
        """Request on SIGTERM and SIGINT; main thread only."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.request, number.name)

    async def wait_requested(self) -> None:
        await self._requested.wait()

    async def wait_forced(self) -> None:
        await self._forced.wait()


async def race(*coroutines: Coroutine[Any, Any, _T]) -> _T:
    """Return the first result; the other coroutines are cancelled and awaited."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled():
                task.exception()  # marks it as retrieved: of several failures, one is raised
    return next(task for task in tasks if task in done).result()


def run(main: Coroutine[Any, Any, _T]) -> _T:
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(main)


def end_process(status: int) -> NoReturn:
    """Flush the output and end the process; `sys.exit` would wait for threads. Neither ``finally`` blocks nor exit
    handlers run: first release what outlives the process.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
