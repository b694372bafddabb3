from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from decant.engine.engine import Engine
from decant.engine.output import StepOutput
from decant.engine.request import Request, StopParams
from decant.engine.transfer import IncomingSequence
from decant.protos import worker_pb2 as wire
from decant.worker.decode.admission import DecodeAdmission
from decant.worker.decode.run import DecodeRun
from decant.worker.engine_host import EngineHost
from tests.worker.decode_harness import Device


class Queue:
    def __init__(self) -> None:
        self.engine = Engine(Device(16))
        self.posted: list[tuple[Callable[[Engine], object], Callable[[], object]]] = []
        self.admitted: list[tuple[str, IncomingSequence | None]] = []
        self.tasks: list[asyncio.Task[None]] = []
        host = SimpleNamespace(loop=self, add_queue=lambda _: None)
        self.admission = DecodeAdmission(cast(EngineHost, host))

    def post(self, command: Callable[[Engine], object], then: Callable[[], object]) -> None:
        self.posted.append((command, then))

    async def push(self, name: str, length: int, number: int = 0, *, due: float = math.inf) -> None:
        request = Request(name, tuple(range(length)), stop=StopParams(max_tokens=4))
        run = DecodeRun(wire.Run(request=name), [request], wire.Stopping(), (0.0, number), 0.0)
        run.ticket = wire.Ticket()
        run.due = due
        self.tasks.append(asyncio.create_task(self._enter(run)))
        await asyncio.sleep(0)

    async def _enter(self, run: DecodeRun) -> None:
        arrival = await self.admission.enter(run)
        self.admitted.append((run.root.request.id, arrival))

    async def step(self, *between: Callable[[Engine], object]) -> None:
        posted, self.posted = self.posted, []
        for command, _ in posted:
            command(self.engine)
        for other in between:
            other(self.engine)
        output: StepOutput = self.engine.step()
        self.admission.on_step(output)
        for _, then in posted:
            then()
        await asyncio.sleep(0)

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.admitted]

    def close(self) -> None:
        for task in self.tasks:
            task.cancel()


async def crowded() -> tuple[Queue, Any]:
    queue = Queue()
    await queue.push("first", 40)
    await queue.step()
    await queue.push("late", 40, 1)
    return queue, queue.admitted[0][1]


async def test_blocks_that_became_free_in_the_step_of_the_answer_are_noticed() -> None:
    queue, arrival = await crowded()
    await queue.step(lambda _: arrival.abort())  # after the command, before the step
    assert queue.posted, "no retry, and no other event will cause one"
    await queue.step()
    assert queue.names == ["first", "late"]


async def test_there_is_no_retry_while_nothing_changes() -> None:
    queue, arrival = await crowded()
    for _ in range(3):
        await queue.step()
        assert not queue.posted
    await queue.step(lambda _: arrival.abort())
    assert len(queue.posted) == 1
    await queue.step()
    assert not queue.posted


async def test_a_run_that_comes_before_the_answer_does_not_overtake() -> None:
    queue, arrival = await crowded()
    await queue.push("small", 4, 2)
    await queue.step()
    assert len(queue.admitted) == 1
    while queue.posted:
        await queue.step()
    await queue.step(lambda _: arrival.abort())
    await queue.step()
    assert queue.names == ["first", "late", "small"]


async def test_a_cancelled_run_leaves_the_queue() -> None:
    queue, arrival = await crowded()
    await queue.step()
    queue.tasks[-1].cancel()
    await asyncio.sleep(0)
    await queue.step(lambda _: arrival.abort())
    assert not queue.posted
    assert queue.names == ["first"]
