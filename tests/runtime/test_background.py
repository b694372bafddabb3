from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from decant.runtime.background import BackgroundTask, RestartPolicy, run_restarting, start_task, task_group
from decant.runtime.backoff import Backoff


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


AT_ONCE = Backoff(0.0, 0.0)


async def test_a_loop_that_fails_runs_again_and_each_failure_is_logged() -> None:
    runs = list[int]()

    async def fail_twice() -> None:
        runs.append(len(runs))
        if len(runs) < 3:
            await crash()

    with capture_logs() as logs:
        await run_restarting("part", fail_twice, RestartPolicy(max_crashes=3, pause=AT_ONCE))
    assert runs == [0, 1, 2]
    assert [(line["task"], line["crashes"], str(line["exc_info"])) for line in logs] == [
        ("part", 1, "broken"),
        ("part", 2, "broken"),
    ]


async def test_a_loop_that_keeps_failing_raises() -> None:
    runs = list[int]()

    async def fail() -> None:
        runs.append(len(runs))
        await crash()

    with pytest.raises(ValueError, match="broken"):
        await run_restarting("part", fail, RestartPolicy(max_crashes=3, pause=AT_ONCE))
    assert len(runs) == 3


async def test_failures_far_apart_never_end_a_loop() -> None:
    runs = list[int]()

    async def fail_ten_times() -> None:
        runs.append(len(runs))
        await asyncio.sleep(0)
        if len(runs) <= 10:
            await crash()

    await run_restarting("part", fail_ten_times, RestartPolicy(max_crashes=2, pause=AT_ONCE, steady_s=-1.0))
    assert len(runs) == 11


async def test_a_loop_that_is_cancelled_does_not_run_again() -> None:
    async with BackgroundTask("part", lambda: run_restarting("part", forever)):
        await asyncio.sleep(0)
        assert is_running("part")
    assert not is_running("part")


async def test_a_group_raises_its_first_error_and_leaves_its_task_without_a_cancellation() -> None:
    async def fail() -> None:
        async with task_group() as group:
            group.create_task(crash())
            group.create_task(forever())

    task = asyncio.current_task()
    assert task is not None
    with pytest.raises(ValueError, match="broken"):
        await fail()
    assert task.cancelling() == 0
    await asyncio.sleep(0)


async def test_a_group_whose_caller_is_cancelled_is_cancelled() -> None:
    async def work() -> None:
        async with task_group() as group:
            group.create_task(forever())

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
