"""One side of a handoff over a real engine on one thread, with recorded step times."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch

from bench.comparison.steps import Prompted
from decant.engine.engine import Engine
from decant.engine.errors import InvalidConfig
from decant.engine.loading import load
from decant.engine.loop import EngineLoop
from decant.engine.model.model import ModelConfig, ModelDevice
from decant.engine.output import StepOutput
from decant.engine.plan import StepPlan, StepResult
from decant.engine.request import Request, StopParams
from decant.engine.scheduler import Limits
from decant.handoff.packing import TransferLayout, checksum
from decant.handoff.receiver import KvReceiver
from decant.handoff.sender import KvSender
from decant.protos import worker_pb2 as wire
from decant.runtime.protocol import PROTOCOL
from decant.runtime.serving.server import freeze_gc

LAYOUT_HASH = 1
CHUNK_TOKENS = 256
DECODES = 8
CONTEXT = 256
MOST_DECODED = 1000
DECODE_BYTES = 512 << 20
SWITCH_SECONDS = 0.0005
"""The interpreter's switch interval, as in a worker's process."""


class Span(NamedTuple):
    """Seconds of the machine's monotonic clock, which both processes share."""

    began: float
    ended: float


class Steps(NamedTuple):
    prompts: list[Span]
    decodes: list[Span]


class TimedDevice(Prompted):
    def __init__(self, device: ModelDevice) -> None:
        super().__init__(device)
        self.computes_prompts = False
        self.steps = Steps([], [])

    def run(self, plan: StepPlan) -> StepResult:
        reads = any(row.end - row.start > 1 for row in plan.rows)
        if reads and not self.computes_prompts:
            return super().run(plan)
        began = time.monotonic()
        result = self._device.run(plan)
        (self.steps.prompts if reads else self.steps.decodes).append(Span(began, time.monotonic()))
        return result


class End:
    """One side, whose ``tokens`` fill ``mib`` of cache. Raises InvalidConfig if the model's context is too short."""

    def __init__(self, name: str, model: Path, mib: int) -> None:
        sys.setswitchinterval(SWITCH_SECONDS)
        torch.set_num_threads(1)  # for all threads that start later
        size = (mib << 20) + DECODE_BYTES
        device = load(ModelConfig(str(model), dtype="bfloat16", device="cpu", kv_bytes=size))
        self.tokens = (mib << 20) // device.block_bytes * device.block_size
        if self.tokens + 2 > device.context_length:
            most = device.context_length // device.block_size * device.block_bytes / (1 << 20)
            raise InvalidConfig("mib", f"less than the {most:.1f} of this model's longest sequence", mib)
        device.store.blocks.fill_(1)  # untouched memory costs nothing to read
        self.device = TimedDevice(device)
        limits = Limits(CHUNK_TOKENS, max_running=2 * DECODES, context_length=device.context_length)
        self.engine = Engine(self.device, limits, checksum=checksum)
        self.peer = wire.Peer(id=name, incarnation=1, protocol=PROTOCOL)
        layout = TransferLayout(device.block_size, device.block_bytes, LAYOUT_HASH)
        self.loop = EngineLoop(self.engine, self._on_step)
        self.sender = KvSender(self.loop, layout, wire.Heartbeat)
        self.receiver = KvReceiver(self.loop, layout, self.peer, wire.Heartbeat)
        self._events: dict[str, asyncio.Event] = {}
        freeze_gc()  # as a worker does before it is ready
        self.loop.start()

    def _on_step(self, output: StepOutput) -> None:
        self.sender.on_step(output)
        for name in (*output.parked, *(ended.id for ended in output.ended)):
            self._events.setdefault(name, asyncio.Event()).set()

    async def happened(self, name: str) -> None:
        await self._events.setdefault(name, asyncio.Event()).wait()

    def request(self, name: str, tokens: int, *, park: bool) -> Request:
        stop = StopParams(max_tokens=2, ignore_eos=True)
        return Request(name, (1,) * tokens, stop=stop, use_prefix_cache=False, park_after=1 if park else None)

    async def offer(self, name: str, tokens: int, *, computed: bool) -> wire.Ticket:
        """Issue the ticket of a new prompt, whose steps skip the model unless ``computed``."""
        self.device.computes_prompts = computed
        ticket = wire.Ticket(run=wire.Run(request=name, epoch=1, attempt=1), sender=self.peer, layout_hash=LAYOUT_HASH)
        self.sender.issue(ticket, [name], tokens)
        await self.loop.call(lambda engine: engine.add(self.request(name, tokens, park=True)))
        return ticket

    async def busy(self) -> None:
        stop = StopParams(max_tokens=MOST_DECODED, ignore_eos=True)

        def add(engine: Engine) -> None:
            for number in range(DECODES):
                engine.add(Request(f"busy-{number}", (1,) * CONTEXT, stop=stop, use_prefix_cache=False))

        await self.loop.call(add)

    async def rest(self) -> Steps:
        def cancel(engine: Engine) -> None:
            for number in range(DECODES):
                engine.cancel(f"busy-{number}")

        await self.loop.call(cancel)
        steps, self.device.steps = self.device.steps, Steps([], [])
        return steps


def seconds(steps: list[Span], spans: list[Span]) -> list[float]:
    """Durations of the steps that overlap a span by at least half: those inside alone would favour short ones."""
    return [step.ended - step.began for step in steps if any(_is_beside(step, span) for span in spans)]


def _is_beside(step: Span, span: Span) -> bool:
    return min(step.ended, span.ended) - max(step.began, span.began) >= (step.ended - step.began) / 2
