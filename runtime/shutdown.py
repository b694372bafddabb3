"""How a process is told to end, and the loop that it runs on."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, TypeVar

from decant.runtime import logs

_T = TypeVar("_T")
_log = logs.get(__name__)


class Shutdown:
    """Asked once, a process drains; asked again, it ends at once."""

    def __init__(self) -> None:
        self.ends_process = False
        """Whether a request ends the process at once, with status 0: for a time in which another thread holds the
        interpreter's lock for long, and each turn of the event loop waits for it."""
        self._asked = asyncio.Event()
        self._insisted = asyncio.Event()

    def request(self, why: str) -> None:
        """Asks, or insists when it was asked before; `why` is for the log."""
        _log.info("shutdown", why=why, at_once=self.ends_process or self._asked.is_set())
        if self.ends_process:
            _log.info("ended")
            end_process(0)
        (self._insisted if self._asked.is_set() else self._asked).set()

    def on_signals(self) -> None:
        """Requested by SIGTERM and SIGINT from now on; the main thread only."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.request, number.name)

    async def asked(self) -> None:
        await self._asked.wait()

    async def insisted(self) -> None:
        await self._insisted.wait()


async def first(*coroutines: Coroutine[Any, Any, _T]) -> _T:
    """What the first of them to end returns or raises; the others are cancelled, and have ended, when it returns."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled():
                task.exception()  # seen: of those that fail together, one is told
    return next(task for task in tasks if task in done).result()


def run(main: Coroutine[Any, Any, _T]) -> _T:
    """Runs a process's main on uvloop where that is installed, else on asyncio's own loop."""
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(main)


def end_process(status: int) -> NoReturn:
    """End the process now, with its output flushed. Python itself would wait for every thread, also for one that is in
    a long call which cannot be interrupted. Neither ``finally`` blocks nor exit handlers run: release first what
    outlives a process."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
