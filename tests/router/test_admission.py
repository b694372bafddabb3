from __future__ import annotations

import asyncio
import random

import pytest

from decant.runtime.connections.channel import Deadline
from decant.runtime.errors import DeadlineExceeded, QueueFull
from decant.runtime.priority import SECONDS_PER_PRIORITY
from decant.runtime.serving.admission import Admission, AdmissionSlot

NEVER = Deadline()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def full(places: int = 1, queue_limit: int = 8) -> tuple[Admission, list[AdmissionSlot]]:
    door = Admission(places, queue_limit)
    return door, [await door.enter(0, NEVER) for _ in range(places)]


async def test_admitted_requests_never_exceed_the_limit():
    door, inside = await full(places=2)
    third = asyncio.create_task(door.enter(0, NEVER))
    await settle()
    assert (door.active, door.waiting, third.done()) == (2, 1, False)
    inside[0].release()
    (await third).release()
    inside[1].release()
    assert (door.active, door.waiting) == (0, 0)


async def test_leaving_twice_frees_one_slot():
    door, inside = await full(places=2)
    inside[0].release()
    inside[0].release()
    assert door.active == 1


async def test_a_full_queue_refuses_by_its_limit():
    door, _ = await full(queue_limit=2)
    waiting = [asyncio.create_task(door.enter(0, NEVER)) for _ in range(2)]
    await settle()
    with pytest.raises(QueueFull) as refused:
        await door.enter(1000, NEVER)
    assert "2" in str(refused.value)
    assert refused.value.retry_after
    for task in waiting:
        task.cancel()


async def test_admission_is_by_priority_then_by_arrival():
    door, [inside] = await full()
    order: list[str] = []

    async def visit(name: str, priority: int) -> None:
        place = await door.enter(priority, NEVER)
        order.append(name)
        place.release()

    tasks = []
    for name, priority in [("a", 0), ("b", 0), ("urgent", 5), ("late", -5), ("c", 0), ("most urgent", 6)]:
        tasks.append(asyncio.create_task(visit(name, priority)))
        await settle()
    inside.release()
    await asyncio.gather(*tasks)
    assert order == ["most urgent", "urgent", "a", "b", "c", "late"]
    assert door.active == 0


async def test_a_request_that_waited_long_enough_is_before_an_urgent_one():
    clock = 100.0
    door = Admission(1, 100, lambda: clock)
    inside = await door.enter(0, NEVER)
    patient = asyncio.create_task(door.enter(-1000, NEVER))
    await settle()
    clock += 2000 * SECONDS_PER_PRIORITY + 1
    urgent = asyncio.create_task(door.enter(1000, NEVER))
    await settle()
    inside.release()
    await settle()
    assert (patient.done(), urgent.done()) == (True, False)
    (await patient).release()
    (await urgent).release()


async def test_a_deadline_ends_the_waiting_and_leaves_nothing_behind():
    door, [inside] = await full()
    with pytest.raises(DeadlineExceeded):
        await door.enter(0, Deadline.after(0.01))
    assert door.waiting == 0
    inside.release()
    assert door.active == 0


async def test_a_deadline_that_is_over_does_not_enter():
    door = Admission(1, 1)
    with pytest.raises(DeadlineExceeded):
        await door.enter(0, Deadline.after(0))
    assert door.active == 0


async def test_a_request_cancelled_while_waiting_leaves_nothing_behind():
    door, [inside] = await full()
    task = asyncio.create_task(door.enter(0, NEVER))
    await settle()
    task.cancel()
    await asyncio.wait([task])
    assert door.waiting == 0
    inside.release()
    assert door.active == 0


@pytest.mark.parametrize("leaves_first", [True, False])
async def test_a_slot_granted_to_a_cancelled_request_goes_to_the_next(leaves_first):
    door, [inside] = await full()
    first, second = (asyncio.create_task(door.enter(0, NEVER)) for _ in range(2))
    await settle()
    if leaves_first:
        inside.release()
    first.cancel()
    inside.release()
    (await second).release()
    assert first.cancelled()
    assert (door.active, door.waiting) == (0, 0)


@pytest.mark.parametrize("seed", range(20))
async def test_slots_are_neither_lost_nor_duplicated_in_any_order_of_events(seed):
    dice = random.Random(seed)
    door, inside_now, most = Admission(3, 5), 0, 0

    async def visit() -> None:
        nonlocal inside_now, most
        deadline = Deadline.after(dice.choice([0.0, 0.001, 10.0]))
        try:
            place = await door.enter(dice.randint(-3, 3), deadline)
        except (QueueFull, DeadlineExceeded):
            return
        inside_now += 1
        most = max(most, inside_now)
        try:
            await asyncio.sleep(dice.choice([0, 0, 0.001]))
        finally:
            inside_now -= 1
            place.release()

    tasks = []
    for _ in range(200):
        tasks.append(asyncio.create_task(visit()))
        if dice.random() < 0.4:
            await asyncio.sleep(0)
        if dice.random() < 0.3:
            dice.choice(tasks).cancel()
    await asyncio.wait(tasks)
    assert most == 3
    assert (door.active, door.waiting, inside_now) == (0, 0, 0)
