from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from decant.runtime.background import BackgroundTask, start_task


def is_running(name: str) -> bool:
    return name in {task.get_name() for task in asyncio.all_tasks()}


async def forever() -> None:
    await asyncio.Event().wait()


async def crash() -> None:
    raise ValueError("broken")


async def test_a_background_task_runs_only_inside_its_block() -> None:
    async with BackgroundTask("forever", forever):
        await asyncio.sleep(0)
        assert is_running("forever")
    assert not is_running("forever")


async def test_close_waits_for_the_clean_up() -> None:
    steps = []

    async def clean_up_slowly() -> None:
        try:
            await forever()
        finally:
            await asyncio.sleep(0.01)
            steps.append("cleaned up")

    task = BackgroundTask("slow", clean_up_slowly)
    task.start()
    await asyncio.sleep(0)
    await task.close()
    assert steps == ["cleaned up"]


async def test_a_crash_is_reported_at_once() -> None:
    crashes = asyncio.Queue[tuple[str, BaseException]]()
    async with BackgroundTask("part", crash, lambda *report: crashes.put_nowait(report)):
        name, error = await crashes.get()
        assert (name, str(error)) == ("part", "broken")
        assert not is_running("part")


async def test_close_raises_a_crash_that_has_no_other_reader() -> None:
    task = BackgroundTask("part", crash)
    task.start()
    await asyncio.sleep(0)
    with pytest.raises(ValueError, match="broken"):
        await task.close()


async def test_a_crash_while_it_is_cancelled_is_reported() -> None:
    crashes = []

    async def crash_at_the_end() -> None:
        try:
            await forever()
        finally:
            await crash()

    async with BackgroundTask("part", crash_at_the_end, lambda name, error: crashes.append(error)):
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [str(error) for error in crashes] == ["broken"]


async def test_close_leaves_a_task_behind_that_does_not_end() -> None:
    let_go = asyncio.Event()

    async def ignore_cancellation() -> None:
        while not let_go.is_set():
            try:
                await let_go.wait()
            except asyncio.CancelledError:
                continue

    task = BackgroundTask("stubborn", ignore_cancellation, close_seconds=0.01)
    task.start()
    await asyncio.sleep(0)
    await task.close()
    assert is_running("stubborn")
    let_go.set()
    await task.close()
    assert not is_running("stubborn")


async def test_a_task_may_return_by_itself_and_be_closed_twice() -> None:
    async def return_at_once() -> None:
        pass

    crashes = []
    task = BackgroundTask("short", return_at_once, lambda *report: crashes.append(report))
    await task.close()
    task.start()
    await asyncio.sleep(0)
    await task.close()
    await task.close()
    assert not crashes


async def test_a_background_task_starts_once() -> None:
    async with BackgroundTask("forever", forever) as task:
        with pytest.raises(RuntimeError, match="forever was started before"):
            task.start()


async def test_an_exception_that_ends_a_task_is_logged_and_passed_on() -> None:
    errors: list[BaseException] = []
    with capture_logs() as logs:
        task = start_task("call", crash(), errors.append, worker="w")
        await asyncio.wait([task])
        await asyncio.sleep(0)
    assert errors == [task.exception()]
    (line,) = logs
    assert (line["event"], line["task"], line["worker"]) == ("a task failed", "call", "w")
    assert line["exc_info"] is task.exception()


async def test_a_task_that_returns_or_is_cancelled_has_not_failed() -> None:
    errors: list[BaseException] = []
    with capture_logs() as logs:
        returned = start_task("call", asyncio.sleep(0), errors.append)
        cancelled = start_task("call", forever(), errors.append)
        await returned
        cancelled.cancel()
        await asyncio.wait([cancelled])
        await asyncio.sleep(0)
    assert not errors
    assert not logs
