from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from decant.engine.errors import EngineStopped
from decant.engine.fake import FakeDevice
from decant.engine.loop import EngineLoop
from decant.engine.output import SequenceFinished, StepOutput
from decant.engine.plan import StepPlan, StepResult
from decant.engine.request import Request
from tests.engine.factories import BLOCK, make_engine

STEP_SECONDS = 0.02


class Device(FakeDevice):
    def __init__(self, num_blocks: int = 64) -> None:
        super().__init__(num_blocks=num_blocks, block_size=BLOCK, context_length=96, cost=lambda _: self.seconds)
        self.before: Callable[[], object] = lambda: None
        self.seconds = 0.0
        self.runs = 0
        self.crash_at = -1
        self.threads: set[str] = set()

    def run(self, plan: StepPlan) -> StepResult:
        self.runs += 1
        self.threads.add(threading.current_thread().name)
        self.before()
        if self.runs == self.crash_at:
            raise ZeroDivisionError("the device is broken")
        return super().run(plan)


class Harness:
    def __init__(self, num_blocks: int = 64) -> None:
        self.device = Device(num_blocks)
        self.engine = make_engine(device=self.device)
        self.steps = 0
        self.outputs: list[StepOutput] = []
        self.crashes: list[EngineStopped] = []
        self._step = self.engine.step
        self.engine.step = self._counted  # type: ignore[method-assign]
        self._changed = asyncio.Event()
        self.loop = EngineLoop(self.engine, self._on_step, self._on_crash)

    def _counted(self) -> StepOutput:
        self.steps += 1
        return self._step()

    def _on_step(self, output: StepOutput) -> None:
        self.outputs.append(output)
        self._changed.set()

    def _on_crash(self, stopped: EngineStopped) -> None:
        self.crashes.append(stopped)
        self._changed.set()

    async def add(self, request: Request) -> None:
        await self.loop.call(lambda engine: engine.add(request))

    async def until(self, reached: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not reached():
                self._changed.clear()
                await self._changed.wait()

    async def until_ended(self, id: str) -> SequenceFinished:
        await self.until(lambda: any(ended.id == id for output in self.outputs for ended in output.ended))
        return next(ended for output in self.outputs for ended in output.ended if ended.id == id)

    async def stays_asleep(self) -> bool:
        """Return whether, after the current work, the thread runs no step and uses no CPU for a while."""
        for _ in range(40):
            before = self._spent()
            await asyncio.sleep(0.05)
            if self._spent() == before:
                await asyncio.sleep(0.15)
                return self._spent() == before
        return False

    def _spent(self) -> tuple[int, float]:
        thread = self.loop._thread.ident
        assert thread is not None
        return self.steps, time.clock_gettime(time.pthread_getcpuclockid(thread))

    def text(self, id: str) -> list[int]:
        return [token.token for output in self.outputs for token in output.tokens if token.id == id]


@asynccontextmanager
async def running(num_blocks: int = 64) -> AsyncIterator[Harness]:
    harness = Harness(num_blocks)
    harness.loop.start()
    try:
        yield harness
    finally:
        await harness.loop.stop()


async def fails_as_stopped(call: Callable[[], Awaitable[object]]) -> BaseException | None:
    with pytest.raises(EngineStopped) as stopped:
        await asyncio.wait_for(call(), 20)
    return stopped.value.__cause__
