"""Work on long texts, off the event loop: few at once, few bytes in memory, the rest waits in a bounded queue.

    run --queue and bytes within limits--> a place --> a thread --> the result
          '-- else QueueFull                 '-- a LARGE text also waits until no other is at work

Tokenizing needs up to 200 bytes of memory for each byte of a text, so two large ones at once are too many. The work
must release the interpreter's lock while it computes, or hold it for milliseconds at a time: else the event loop
stops in spite of the thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, TypeVar

from decant.runtime.admission import Admission
from decant.runtime.channel import Deadline
from decant.runtime.errors import RETRY_AFTER_SECONDS, DeadlineExceeded, QueueFull

AT_ONCE = 4
QUEUE_LIMIT = 1024
"""Texts that may wait."""
MAX_BYTES = 64 * 1024 * 1024
"""Of all texts that wait or are at work."""
LARGE = 1024 * 1024
"""Bytes from which a text is at work alone among its like."""

T = TypeVar("T")


class TextWork:
    """At most ``at_once`` calls at a time, each in a thread of its own. Used from one event loop at a time."""

    def __init__(self, at_once: int = AT_ONCE, queue_limit: int = QUEUE_LIMIT) -> None:
        self._threads = ThreadPoolExecutor(at_once, thread_name_prefix="text")
        self._places = Admission(at_once, queue_limit)
        self._large = Admission(1, queue_limit)
        self._bytes = 0

    async def run(self, size: int, deadline: Deadline, work: Callable[..., T], *args: Any) -> T:
        """``work(*args)``, for a text of ``size`` bytes. Raises QueueFull, DeadlineExceeded, and what the work raises.

        Work that has begun keeps its slot until it is done, also when its caller has gone.
        """
        if self._bytes and self._bytes + size > MAX_BYTES:
            raise QueueFull(f"at most {MAX_BYTES} bytes of text wait", retry_after=RETRY_AFTER_SECONDS)
        with ExitStack() as held:
            self._bytes += size
            held.callback(self._forget, size)
            if size >= LARGE:
                held.callback((await self._large.enter(0, deadline)).leave)
            held.callback((await self._places.enter(0, deadline)).leave)
            job = self._threads.submit(work, *args)
            job.add_done_callback(partial(_release, asyncio.get_running_loop(), held.pop_all()))
        try:
            async with asyncio.timeout(deadline.remaining()) as limit:
                return await asyncio.wrap_future(job)
        except TimeoutError:
            if limit.expired():
                raise DeadlineExceeded from None
            raise

    def _forget(self, size: int) -> None:
        self._bytes -= size


def _release(loop: asyncio.AbstractEventLoop, held: ExitStack, _: Future[Any]) -> None:
    """Called by the thread that is done: the places belong to the event loop."""
    with suppress(RuntimeError):  # the loop is closed, and its places with it
        loop.call_soon_threadsafe(held.close)
