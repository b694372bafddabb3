"""Single kinds of step on a real engine: duration, linear layers alone, and profile.

Prompt steps before decodes skip the model; the content of the blocks does not affect speed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from random import Random
from typing import Any, NamedTuple, cast

import torch
from transformers import AttentionInterface

from bench.comparison.metrics import resident
from bench.comparison.own_engine import Meter, Stopwatch, layers, make_engine, weights
from bench.comparison.subprocess_runner import Job, OnProgress
from bench.machine import read_bytes, reader
from decant.engine.cpu.fused_layer import unfuse
from decant.engine.cpu.linear import PackedLinear
from decant.engine.engine import Engine
from decant.engine.errors import InvalidConfig
from decant.engine.loading import load
from decant.engine.model.attention.interface import NAME
from decant.engine.model.model import ModelConfig, ModelDevice
from decant.engine.plan import Device, StepPlan, StepResult
from decant.engine.request import Request, StopParams


class Case(NamedTuple):
    sequences: int
    context: int


CASES = {"decode 1": Case(1, 128), "decode 8": Case(8, 256), "decode 64": Case(64, 256)}
PROMPT = 1750

WARM_UP, STEPS, PROFILED = 2, 10, 4


class Prompted:
    def __init__(self, device: ModelDevice) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def submit(self, plan: StepPlan) -> Callable[[], StepResult]:
        return partial(self.run, plan)

    def run(self, plan: StepPlan) -> StepResult:
        if any(row.end - row.start > 1 for row in plan.rows):
            return StepResult([0 if row.sample else None for row in plan.rows])
        return self._device.run(plan)


class Profile:
    """Profiler of a step: seconds by part.

    Until ``close`` each layer runs module by module, as one compiled call can't be profiled. Probes cost some
    microseconds, so a timing uses other steps.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._fused = unfuse(model)
        self._watches = {"model": Stopwatch([model]), "linears": Stopwatch(layers(model)), "attention": Stopwatch([])}

    def of(self, call: Callable[[], object]) -> dict[str, float]:
        for watch in self._watches.values():
            watch.take()
        began = time.perf_counter()
        with self._attention():
            call()
        whole = time.perf_counter() - began
        spent = {name: watch.take() for name, watch in self._watches.items()}
        model = spent.pop("model")
        return {**spent, "other": model - sum(spent.values()), "outside": whole - model}

    def close(self) -> None:
        for watch in self._watches.values():
            watch.remove()
        for module, layer in self._fused:
            module.forward = layer

    @contextmanager
    def _attention(self) -> Iterator[None]:
        plain, watch = AttentionInterface()[NAME], self._watches["attention"]

        def timed(*args: Any, **options: Any) -> Any:
            watch.enter()
            try:
                return plain(*args, **options)
            finally:
                watch.leave()

        AttentionInterface.register(NAME, timed)
        try:
            yield
        finally:
            AttentionInterface.register(NAME, plain)


def measure(job: Job, on_progress: OnProgress) -> dict[str, Any]:
    torch.set_num_threads(job.threads)
    before = resident()
    device = load(ModelConfig(job.model, dtype=job.dtype, device="cpu", kv_bytes=job.kv_bytes))
    counted = weights(device.model)
    if counted is None:
        raise InvalidConfig("model", "one whose steps read all of its weights", job.model)
    blocks = device.store.blocks.fill_(1)  # untouched memory costs nothing to read
    held, cases = resident() - before - blocks.nbytes, {}
    for place, (name, case) in enumerate(CASES.items()):
        cases[name] = _decode(device, case)
        on_progress((place + 1) / (len(CASES) + 1))
    return {"cases": cases, "prompt": _prompt(device, job), "weights": asdict(counted), "held_bytes": held}


def decoding(device: ModelDevice, case: Case, written: int) -> Engine:
    # All prompts in one step: no sequence ends before all of them decode.
    engine = make_engine(cast(Device, Prompted(device)), case.sequences * case.context)
    needed = case.sequences * (case.context + written + device.block_size)
    if needed > device.num_blocks * device.block_size:
        raise InvalidConfig("kv_bytes", f"room for {needed} tokens", device.num_blocks * device.block_size)
    for index in range(case.sequences):
        engine.add(_request(f"s{index}", case.context, written + 1, device.vocab_size))
    while any(sequence.num_remaining > 1 for sequence in engine.scheduler.running) or engine.scheduler.waiting:
        engine.step()
    return engine


def _decode(device: ModelDevice, case: Case) -> dict[str, Any]:
    """Time decode steps, and the bandwidth between them: a shared machine's varies within seconds."""
    engine = decoding(device, case, 1 + WARM_UP + STEPS + PROFILED)
    size = read_bytes()
    read = reader(size)
    seconds, reads = zip(*((_timed(engine.step), _timed(read)) for _ in range(WARM_UP + STEPS)), strict=True)
    profile = Profile(device.model)
    parts = [profile.of(engine.step) for _ in range(PROFILED)]
    profile.close()
    if len(engine.scheduler.running) != case.sequences:
        raise RuntimeError(f"{len(engine.scheduler.running)} of {case.sequences} sequences decoded to the end")
    return {
        "seconds": statistics.median(seconds[WARM_UP:]),
        "read_bandwidth_gb_s": size / min(reads[WARM_UP:]) / 1e9,
        "sequences": case.sequences,
        "context": case.context,
        "products_seconds": _products(layers(device.model), case.sequences),
        "profile": {part: statistics.median(each[part] for each in parts) for part in parts[0]},
    }


def _prompt(device: ModelDevice, job: Job) -> dict[str, Any]:
    engine = make_engine(device, job.token_budget)
    meter = Meter(engine, device.model)
    meter.begin()
    engine.add(_request("prompt", PROMPT, 1, device.vocab_size))
    _run_to_end(engine, meter.step)
    profile = Profile(device.model)
    parts: list[dict[str, float]] = []
    engine.add(_request("another", PROMPT, 1, device.vocab_size))
    _run_to_end(engine, lambda: parts.append(profile.of(engine.step)))
    profile.close()
    return {
        "tokens": PROMPT,
        "seconds": sum(meter.steps),
        "schedule": meter.schedule,
        "profile": {part: sum(each[part] for each in parts) for part in parts[0]},
    }


def _run_to_end(engine: Engine, step: Callable[[], object]) -> None:
    while engine.has_work:
        step()


@torch.inference_mode()
def _products(linears: Sequence[PackedLinear], rows: int) -> float:
    inputs = [torch.randn(rows, layer.weight.shape[1], dtype=layer.weight.dtype) for layer in linears]

    def run() -> None:
        for layer, x in zip(linears, inputs, strict=True):
            layer(x)

    return statistics.median([_timed(run) for _ in range(1 + STEPS)][1:])


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _request(id: str, prompt: int, written: int, vocab_size: int) -> Request:
    rng = Random(id)
    tokens = tuple(rng.randrange(vocab_size) for _ in range(prompt))
    return Request(id, tokens, stop=StopParams(max_tokens=written, ignore_eos=True))
