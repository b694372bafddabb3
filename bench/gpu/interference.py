"""Gaps of running answers while long prompts arrive: prompts in the same steps, or on an engine of their own.

Split: a thread computes the prompts on its own stream and blocks of the same model; the blocks move as in a handoff,
written by another thread. The stream of the answers has priority.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import pairwise
from queue import SimpleQueue
from statistics import median
from typing import NamedTuple

import torch

from bench.gpu.serving import Trace, make_engine, request
from bench.gpu.shapes import Sizes
from decant.engine.engine import Engine
from decant.engine.plan import Device
from decant.engine.request import Request
from decant.engine.sequence import BlockAddress
from decant.engine.transfer import IncomingSequence, TransferCommit

_ONE_AT_A_TIME = threading.Lock()
"""Held during a step on a CPU, whose layers have one set of buffers."""

Payload = tuple[Request, list[tuple[BlockAddress, bytes, int]], TransferCommit]


class Gaps(NamedTuple):
    """Seconds between tokens of the answers, from the arrival of the prompts to their end."""

    longest: float
    median: float


def gaps_mixed(device: Device, sizes: Sizes, budget: int) -> Gaps:
    """Compute at most ``budget`` tokens of the prompts in a step."""
    prompts = _prompts(device, sizes)
    engine = make_engine(device, sizes.answers + len(prompts), budget=sizes.answers + budget)
    return _gaps(engine, sizes, lambda: list(map(engine.add, prompts)))


def gaps_split(device: Device, prefill_device: Device, sizes: Sizes) -> Gaps:
    engine, arrived = make_engine(device, sizes.answers + sizes.long_prompts[0]), SimpleQueue[Payload]()
    thread = threading.Thread(target=_prefill, args=(prefill_device, _prompts(device, sizes), arrived))
    with ThreadPoolExecutor(1) as writer, _stream(priority=-1):
        arrivals = Arrivals(engine, arrived, writer)
        try:
            return _gaps(engine, sizes, thread.start, arrivals.advance)
        finally:
            if thread.ident is not None:
                thread.join()


def _prompts(device: Device, sizes: Sizes) -> list[Request]:
    count, length = sizes.long_prompts
    return [request(f"long-{index}", length, 4, device.vocab_size) for index in range(count)]


def _gaps(
    engine: Engine, sizes: Sizes, arrive: Callable[[], object], between: Callable[[], object] = lambda: None
) -> Gaps:
    count, trace = sizes.long_prompts[0], Trace()
    length = engine.limits.context_length - 17
    answers = [request(f"answer-{index}", 16, length, engine.device.vocab_size) for index in range(sizes.answers)]
    for one in answers:
        engine.add(one)
    began, arrived, ended = time.perf_counter(), 0.0, 0
    while (ended < count and engine.scheduler.running) or not arrived:
        between()
        with _step():
            output = engine.step()
        now = time.perf_counter() - began
        for token in output.tokens:
            trace.tokens.setdefault(token.id, []).append(now)
        ended += sum(one.id.startswith("long") for one in output.ended)
        if not arrived and len(trace.tokens) == len(answers) and all(len(at) > 4 for at in trace.tokens.values()):
            arrived = now
            arrive()
    for one in answers:
        engine.cancel(one.id)
    while engine.has_work:
        engine.step()
    gaps = [after - before for one in answers for before, after in pairwise(trace.tokens[one.id]) if after > arrived]
    return Gaps(max(gaps), median(gaps))


def _prefill(device: Device, prompts: list[Request], arrived: SimpleQueue[Payload]) -> None:
    engine = make_engine(device, len(prompts))
    with _stream():
        for one in prompts:
            engine.add(replace(one, park_after=1))
        while engine.has_work:
            with _step():
                output = engine.step()
            for id in output.parked:
                export = engine.transfers.export(id)
                commit = engine.transfers.finalize(id)
                blocks = [(block.address, bytes(export.read(block.address)), block.checksum) for block in export.blocks]
                engine.transfers.release(id)
                arrived.put((next(one for one in prompts if one.id == id), blocks, commit))


def _step() -> AbstractContextManager[object]:
    return nullcontext() if torch.cuda.is_available() else _ONE_AT_A_TIME


def _stream(priority: int = 0) -> AbstractContextManager[object]:
    return torch.cuda.stream(torch.cuda.Stream(priority=priority)) if torch.cuda.is_available() else nullcontext()


class Arrivals:
    """Prompts on their way into an engine: ``writer`` checks and writes blocks while the engine computes steps."""

    def __init__(self, engine: Engine, arrived: SimpleQueue[Payload], writer: ThreadPoolExecutor) -> None:
        self._engine = engine
        self._arrived = arrived
        self._writer = writer
        self._writing: list[tuple[IncomingSequence, TransferCommit, Future[None]]] = []

    def advance(self) -> None:
        """Reserve blocks for prompts that came, and join those that are written. Called between steps."""
        while not self._arrived.empty():
            one, blocks, commit = self._arrived.get()
            arrival = self._engine.transfers.reserve(one)
            arrival.extend(commit.computed + 1)
            self._writing.append((arrival, commit, self._writer.submit(_write, arrival, blocks)))
        for entry in [entry for entry in self._writing if entry[2].done()]:
            arrival, commit, written = entry
            written.result()
            self._engine.transfers.join(arrival, commit)
            self._writing.remove(entry)


def _write(arrival: IncomingSequence, blocks: list[tuple[BlockAddress, bytes, int]]) -> None:
    for block in blocks:
        arrival.write(*block)
