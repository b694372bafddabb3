from __future__ import annotations

import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, median
from typing import Any, cast

from decant.engine.engine import Engine
from decant.engine.plan import Device
from decant.engine.request import Request, StopParams
from decant.engine.scheduler import Limits

NO_LIMIT_S = 3600.0

BUDGET = 2048


class _PartOfDevice:
    def __init__(self, device: Device, num_blocks: int) -> None:
        self._device = device
        self.num_blocks = num_blocks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)


def make_engine(device: Device, max_running: int, *, budget: int = BUDGET, kv_tokens: int | None = None) -> Engine:
    if kv_tokens is not None:
        device = cast(Device, _PartOfDevice(device, kv_tokens // device.block_size))
    length = min(device.context_length, device.num_blocks * device.block_size)
    limits = Limits(max(budget, max_running), max_running, length, NO_LIMIT_S)
    return Engine(device, limits, clock=time.perf_counter)


def request(id: str, prompt: int, output: int, vocabulary: int) -> Request:
    rng = random.Random(id)
    tokens = tuple(rng.randrange(vocabulary) for _ in range(prompt))
    return Request(id, tokens, stop=StopParams(output, output, ignore_eos=True), use_prefix_cache=False)


@dataclass
class Trace:
    """Times of each request's tokens in seconds after the start.

    ``decodes`` has the seconds and context tokens of each step in which all sequences decode; ``steps`` the seconds of
    every step, and whether it has tokens of a prompt.
    """

    tokens: dict[str, list[float]] = field(default_factory=dict)
    decodes: list[tuple[float, int]] = field(default_factory=list)
    steps: list[tuple[float, bool]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def throughput(self) -> float:
        return sum(map(len, self.tokens.values())) / self.seconds

    @property
    def tpot(self) -> float:
        return median(fmean(after - before for before, after in pairwise(at)) for at in self.tokens.values())

    def pace(self) -> dict[str, float]:
        """Number and median milliseconds of steps with and without prompts."""
        found: dict[str, float] = {}
        for name, is_mixed in (("decode", False), ("mixed", True)):
            if seconds := [took for took, mixed in self.steps if mixed is is_mixed]:
                found |= {f"{name}_steps": len(seconds), f"{name}_ms": median(seconds) * 1e3}
                found |= {f"{name}_s": sum(seconds)}
        return found


def serve(engine: Engine, requests: Iterable[Request], most: int = 0) -> Trace:
    trace = Trace()
    for one in requests:
        engine.add(one)
        trace.tokens[one.id] = []
    began = before = time.perf_counter()
    while engine.has_work:
        output = engine.step()
        now = time.perf_counter()
        for token in output.tokens:
            trace.tokens[token.id].append(now - began)
        trace.steps.append((now - before, output.num_tokens != len(output.tokens)))
        if most and output.num_tokens == len(output.tokens) == most:
            trace.decodes.append((now - before, sum(len(one.tokens) for one in engine.scheduler.running)))
        before = now
    trace.seconds = before - began
    return trace


def decode_steps(device: Device, sequences: int, context: int, steps: int) -> Sequence[tuple[float, int]]:
    filling = -(-sequences * context // BUDGET) + 2
    prompt = max(1, context - filling)
    requests = [
        request(f"{sequences}-{index}", prompt, filling + steps + 4, device.vocab_size) for index in range(sequences)
    ]
    return serve(make_engine(device, sequences), requests, sequences).decodes[-steps - 1 : -1]
