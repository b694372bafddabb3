"""An engine over blocks of real bytes that computes nothing, with both ends of a handoff."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from array import array
from typing import NamedTuple

import numpy as np

from engine.costs import Costs
from engine.engine import Engine
from engine.loop import EngineLoop
from engine.output import StepOutput
from engine.plan import StepPlan, StepResult
from engine.request import Request, StopParams
from engine.scheduler import Limits
from handoff.giver import Giver
from handoff.packing import Shape, checksum
from handoff.taker import Taker
from protos import worker_pb2 as wire

BLOCK_SIZE = 16
TOKEN_BYTES = 12 * 1024
"""Of Qwen2.5-0.5B."""
BLOCK_BYTES = BLOCK_SIZE * TOKEN_BYTES
LAYOUT = 1

BUSY = "busy"
"""The sequence whose steps take time."""
BUSY_TOKENS = 2000
STEP_OPERATIONS = 300
SWITCH_SECONDS = 0.0005
"""As a worker's process has it."""


class Span(NamedTuple):
    """Two instants of the machine's monotonic clock, which its processes share."""

    began: float
    ended: float


class Bulk:
    """A device of real bytes. Steps of ``BUSY`` are many short operations without the interpreter, like a model's."""

    block_size = BLOCK_SIZE
    block_bytes = BLOCK_BYTES
    vocab_size = 256
    eos_token_ids: frozenset[int] = frozenset()
    layout = "bulk"
    equal_bits = True
    costs = Costs()

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.window = num_blocks * BLOCK_SIZE
        self.steps: list[Span] = []
        self._blocks = np.frombuffer(bytearray(os.urandom(BLOCK_BYTES)) * num_blocks, np.uint8)
        self._blocks = self._blocks.reshape(num_blocks, BLOCK_BYTES)
        self._array = np.zeros((2, 1 << 15), dtype=np.float32)

    def read(self, block: int) -> memoryview:
        data: memoryview = self._blocks[block].data
        return data

    def write(self, block: int, data: bytes | bytearray | memoryview) -> None:
        np.copyto(self._blocks[block], np.frombuffer(data, np.uint8))

    def run(self, plan: StepPlan) -> StepResult:
        if any(row.request.id == BUSY for row in plan.rows):
            began = time.monotonic()
            for _ in range(STEP_OPERATIONS):
                np.exp(self._array[0], out=self._array[1])
            self.steps.append(Span(began, time.monotonic()))
        return StepResult([7 if row.sample else None for row in plan.rows])


class End:
    """One side, with room for a cache of ``mib`` and a busy sequence."""

    def __init__(self, name: str, mib: int) -> None:
        sys.setswitchinterval(SWITCH_SECONDS)
        self.tokens = mib * (1 << 20) // TOKEN_BYTES
        self.device = Bulk((self.tokens + BUSY_TOKENS) // BLOCK_SIZE + 8)
        limits = Limits(token_budget=self.device.window, max_running=4, window=self.device.window)
        self.engine = Engine(self.device, limits, checksum=checksum)
        self.peer = wire.Peer(id=name, incarnation=1, protocol=1)
        shape = Shape(BLOCK_SIZE, BLOCK_BYTES, LAYOUT)
        self.loop = EngineLoop(self.engine, self._on_step)
        self.giver = Giver(self.loop, shape, wire.Beat)
        self.taker = Taker(self.loop, shape, self.peer, wire.Beat)
        self._events: dict[str, asyncio.Event] = {}
        self.loop.start()

    def _on_step(self, output: StepOutput) -> None:
        self.giver.on_step(output)
        for name in (*output.parked, *(ended.id for ended in output.ended)):
            self._events.setdefault(name, asyncio.Event()).set()

    async def happened(self, name: str) -> None:
        """The sequence was parked or ended."""
        await self._events.setdefault(name, asyncio.Event()).wait()

    def request(self, name: str, park: bool) -> Request:
        """A prompt that no cache knows: its first tokens are its name."""
        tokens = (*name.encode(), *array("B", bytes(self.tokens - len(name))))
        stop = StopParams(max_tokens=2, ignore_eos=True)
        return Request(name, tokens, stop=stop, use_prefix_cache=False, park_after=1 if park else None)

    async def busy(self) -> None:
        """Step without a pause from now on."""
        stop = StopParams(max_tokens=BUSY_TOKENS - 1, ignore_eos=True)
        await self.loop.call(lambda engine: engine.add(Request(BUSY, (1,), stop=stop, use_prefix_cache=False)))

    async def rest(self) -> list[Span]:
        """Step no longer than there is work; the busy steps that there were."""
        await self.loop.call(lambda engine: engine.cancel(BUSY))
        steps, self.device.steps = self.device.steps, []
        return steps
