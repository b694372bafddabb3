from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from typing import Any, TypeVar

PATIENCE_S = 60.0

T = TypeVar("T")


@contextmanager
def on_a_thread(server: AbstractAsyncContextManager[T]) -> Iterator[T]:
    """Run a server on a thread and event loop of its own until the block ends.

    Raises the server's error, or TimeoutError if its start or its end takes PATIENCE_S.
    """
    started, stop = Future[tuple[T, asyncio.AbstractEventLoop]](), asyncio.Event()

    async def serve() -> None:
        async with AsyncExitStack() as stack:
            async with asyncio.timeout(PATIENCE_S):
                made = await stack.enter_async_context(server)
            started.set_result((made, asyncio.get_running_loop()))
            await stop.wait()
            async with asyncio.timeout(PATIENCE_S):
                await stack.aclose()

    with ThreadPoolExecutor(1) as thread:
        served = thread.submit(asyncio.run, serve())  # `run` waits for all that it started
        either: list[Future[Any]] = [started, served]
        wait(either, return_when=FIRST_COMPLETED)
        if served.done():
            served.result()
        made, loop = started.result(0)
        try:
            yield made
        finally:
            loop.call_soon_threadsafe(stop.set)
            served.result()
