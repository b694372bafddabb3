"""Work on long texts in threads: few at a time, bounded in bytes, with a bounded queue.

Tokenizing needs up to 200 bytes of memory per byte of text: two LARGE texts do not run together. The work must
release the interpreter's lock, or hold it for milliseconds at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, TypeVar

from decant.runtime.connections.channel import Deadline
from decant.runtime.errors import RETRY_AFTER_SECONDS, DeadlineExceeded, QueueFull
from decant.runtime.serving.admission import Admission

MAX_CONCURRENT = 4
QUEUE_LIMIT = 1024
"""Texts waiting."""
MAX_BYTES = 64 * 1024 * 1024
"""Size of all texts that wait or run."""
LARGE = 1024 * 1024
"""Bytes; such texts run one at a time."""

T = TypeVar("T")


class TextWork:
    """Bounded threads, used from one event loop at a time."""

    def __init__(
        self, max_concurrent: int = MAX_CONCURRENT, queue_limit: int = QUEUE_LIMIT, max_bytes: int = MAX_BYTES
    ) -> None:
        self._threads = ThreadPoolExecutor(max_concurrent, thread_name_prefix="text")
        self._slots = Admission(max_concurrent, queue_limit)
        self._large = Admission(1, queue_limit)
        self._bytes = 0
        self._max_bytes = max_bytes

    async def run(self, size: int, deadline: Deadline, work: Callable[..., T], *args: Any) -> T:
        """Run ``work`` on ``size`` bytes of text in a thread; it keeps its slot until done, even if the caller is
        cancelled.

        Raises QueueFull, DeadlineExceeded.
        """
        if self._bytes and self._bytes + size > self._max_bytes:
            raise QueueFull(f"at most {self._max_bytes} bytes of text wait", retry_after=RETRY_AFTER_SECONDS)
        with ExitStack() as resources:
            self._bytes += size
            resources.callback(self._release, size)
            if size >= LARGE:
                resources.callback((await self._large.enter(0, deadline)).release)
            resources.callback((await self._slots.enter(0, deadline)).release)
            job = self._threads.submit(work, *args)
            job.add_done_callback(partial(_close_resources, asyncio.get_running_loop(), resources.pop_all()))
        try:
            async with asyncio.timeout(deadline.remaining()) as limit:
                return await asyncio.wrap_future(job)
        except TimeoutError:
            if limit.expired():
                raise DeadlineExceeded from None
            raise

    def _release(self, size: int) -> None:
        self._bytes -= size


def _close_resources(loop: asyncio.AbstractEventLoop, resources: ExitStack, _: Future[Any]) -> None:
    with suppress(RuntimeError):  # the loop is closed, and its slots with it
        loop.call_soon_threadsafe(resources.close)
