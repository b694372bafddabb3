from __future__ import annotations

import asyncio
import threading

import pytest

from decant.router.text.text_work import LARGE, MAX_BYTES, TextWork
from decant.runtime.connections.channel import Deadline
from decant.runtime.errors import DeadlineExceeded, QueueFull

NEVER = Deadline()
PATIENCE = 60.0


class Held:
    def __init__(self) -> None:
        self.at_work = 0
        self.most = 0
        self.go = threading.Event()
        self._lock = threading.Lock()

    def __call__(self) -> int:
        with self._lock:
            self.most = max(self.most, self.at_work + 1)
            self.at_work += 1
        self.go.wait(PATIENCE)
        with self._lock:
            self.at_work -= 1
        return self.most


async def begun(held: Held, count: int) -> None:
    async with asyncio.timeout(PATIENCE):
        while held.at_work < count:  # noqa: ASYNC110 - it changes in a thread
            await asyncio.sleep(0.001)


async def test_concurrent_texts_never_exceed_the_limit() -> None:
    texts, held = TextWork(max_concurrent=2), Held()
    calls = [asyncio.create_task(texts.run(1, NEVER, held)) for _ in range(5)]
    await begun(held, 2)
    held.go.set()
    await asyncio.gather(*calls)
    assert held.most == 2
    assert texts._slots.active == texts._bytes == 0


async def test_a_large_text_waits_for_another_and_small_ones_pass_both() -> None:
    texts, held, small = TextWork(max_concurrent=2), Held(), Held()
    large = [asyncio.create_task(texts.run(LARGE, NEVER, held)) for _ in range(3)]
    await begun(held, 1)
    small.go.set()
    async with asyncio.timeout(PATIENCE):
        assert await texts.run(1, NEVER, small) == 1
    held.go.set()
    await asyncio.gather(*large)
    assert held.most == 1


async def test_a_full_queue_refuses_by_name() -> None:
    texts, held = TextWork(max_concurrent=1, queue_limit=1), Held()
    calls = [asyncio.create_task(texts.run(1, NEVER, held)) for _ in range(2)]
    await begun(held, 1)
    with pytest.raises(QueueFull) as refused:
        await texts.run(1, NEVER, held)
    assert refused.value.retry_after
    held.go.set()
    await asyncio.gather(*calls)


async def test_the_bytes_that_wait_are_bounded_and_one_text_is_always_taken() -> None:
    texts, held = TextWork(max_concurrent=1, max_bytes=100), Held()
    first = asyncio.create_task(texts.run(MAX_BYTES, NEVER, held))
    await begun(held, 1)
    with pytest.raises(QueueFull, match="bytes"):
        await texts.run(1, NEVER, held)
    held.go.set()
    await first
    assert await texts.run(100, NEVER, held) == 1


async def test_work_keeps_its_slot_until_it_is_done_though_its_caller_has_left() -> None:
    texts, held = TextWork(max_concurrent=1), Held()
    left = asyncio.create_task(texts.run(1, NEVER, held))
    await begun(held, 1)
    left.cancel()
    await asyncio.wait([left])
    with pytest.raises(DeadlineExceeded):
        await texts.run(1, Deadline.after(0.05), held)
    held.go.set()
    async with asyncio.timeout(PATIENCE):
        assert await texts.run(1, NEVER, lambda: 7) == 7


async def test_a_deadline_ends_the_wait_for_running_work() -> None:
    texts, held = TextWork(), Held()
    with pytest.raises(DeadlineExceeded):
        await texts.run(1, Deadline.after(0.05), held)
    held.go.set()


async def test_an_exception_of_the_work_is_raised_and_frees_its_slot() -> None:
    texts = TextWork(max_concurrent=1)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            await texts.run(1, NEVER, lambda: 1 // 0)
