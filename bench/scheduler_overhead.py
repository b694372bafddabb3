"""The cost of a step without the model, with many running sequences.

python -m bench.scheduler_overhead --json OUT.json

null        the engine's own work
laid out    adds row layout and the logits of a tiny vocabulary: the real ModelRunner around a model of constants
decode      every sequence gets one token per step, with contexts about ``--context``
churn       about one sequence per step ends and a new one starts
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import sys
import time
from collections.abc import Callable
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench import machine
from bench.comparison.metrics import distribution
from bench.options import add_json, positive, write_result
from decant.engine.backends import make_backend
from decant.engine.costs import StepCostModel
from decant.engine.engine import Engine
from decant.engine.fake import FakeAdapters
from decant.engine.kv_layout import FULL, KvFormat, KvLayout, LayerSpec
from decant.engine.model.backend import Backend
from decant.engine.model.runner import ModelRunner
from decant.engine.plan import BlockMemory, Device, DeviceMemory, StepPlan, StepResult
from decant.engine.request import Request, StopParams
from decant.engine.scheduler import Limits

BLOCK_SIZE = 16
VOCABULARY = 16
GOAL_MS = 1.5
"""Milliseconds a step for 256 running sequences."""

ROUND = 100
"""Limits the growth of contexts."""


class NullDevice:
    block_bytes = 0
    lookahead = 0
    overlaps_steps = False
    embedding_size = 0
    vocab_size = VOCABULARY
    eos_token_ids: frozenset[int] = frozenset()
    layout_hash = "null"
    equal_bits = True
    quantization = None
    costs = StepCostModel()
    adapters = FakeAdapters()
    windows = (FULL,)

    def __init__(self, num_blocks: int, block_size: int = BLOCK_SIZE) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.context_length = num_blocks * block_size

    @property
    def block_memory(self) -> BlockMemory:
        raise AssertionError("nothing is handed over here")

    def memory(self) -> DeviceMemory | None:
        return None

    def submit(self, plan: StepPlan) -> Callable[[], StepResult]:
        return partial(self.run, plan)

    def run(self, plan: StepPlan) -> StepResult:
        return StepResult([7 if row.sample else None for row in plan.rows])

    def read(self, block: int) -> memoryview:
        raise AssertionError("nothing is handed over here")

    def write(self, block: int, data: bytes | bytearray | memoryview) -> None:
        raise AssertionError("nothing is handed over here")


class NullModel(torch.nn.Module):
    def forward(self, *, logits_to_keep: torch.Tensor, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=torch.zeros(1, len(logits_to_keep), VOCABULARY))


class LaidOutDevice(NullDevice):
    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        layout = KvLayout((LayerSpec(1, 1, 1),), BLOCK_SIZE, KvFormat(4))
        self.backend = make_backend(torch.device("cpu"))
        store = self.backend.make_store(layout, num_blocks, torch.float32)
        self._runner = ModelRunner(NullModel(), store, (), frozenset(), self.backend)

    def run(self, plan: StepPlan) -> StepResult:
        return self._runner.run(plan)


DEVICES: dict[str, Callable[[int], Device]] = {"null": NullDevice, "laid out": LaidOutDevice}


class RunningBatch:
    def __init__(self, device: Callable[[int], Device], running: int, context: int, churn: bool) -> None:
        self._context = context
        self._churn = churn
        self._rng = Random(0)
        self._added = 0
        blocks = running * (2 * context + 2 * ROUND) // BLOCK_SIZE
        self.engine = Engine(device(blocks), Limits(4 * context + running, running, 2 * context + 2 * ROUND))
        for _ in range(running):
            self.add()
        while self.engine.scheduler.waiting or any(s.num_remaining > 1 for s in self.engine.scheduler.running):
            self.engine.step()

    def add(self) -> None:
        spread = self._context // 4
        length = self._context - self._rng.randint(0, spread) - (0 if self._churn else ROUND // 2)
        prompt = tuple(self._rng.choices(range(VOCABULARY), k=length))
        most = self._rng.randint(spread, 3 * spread) if self._churn else 4 * ROUND
        stop = StopParams(max_tokens=most, ignore_eos=True)
        self.engine.add(Request(f"s-{self._added}", prompt, stop=stop))
        self._added += 1

    def step(self) -> tuple[float, float]:
        began, worked = time.perf_counter(), time.thread_time()
        output = self.engine.step()
        took = (time.perf_counter() - began, time.thread_time() - worked)
        for _ in output.ended:
            self.add()
        return took


def measure(name: str, running: int, context: int, steps: int, *, churn: bool) -> dict[str, Any]:
    seconds: list[tuple[float, float]] = []
    while len(seconds) < steps:
        batch = RunningBatch(DEVICES[name], running, context, churn)
        for _ in range(context if churn else 1):  # until the ends are spread evenly
            batch.step()
        gc.collect()
        seconds += [batch.step() for _ in range(steps if churn else min(ROUND, steps - len(seconds)))]
    return distribution("step", [took for took, _ in seconds]) | distribution("cpu", [worked for _, worked in seconds])


class Parts:
    """Record the CPU seconds of each call of the named methods of a backend or its sampler, while entered."""

    def __init__(self, backend: Backend, *names: str) -> None:
        self.seconds: dict[str, list[float]] = {name: [] for name in names}
        self._owners = {name: backend if hasattr(backend, name) else backend.sampler for name in names}

    def __enter__(self) -> Parts:
        for name, owner in self._owners.items():
            setattr(owner, name, self._timed(getattr(owner, name), self.seconds[name]))
        return self

    def __exit__(self, *_: object) -> None:
        for name, owner in self._owners.items():
            delattr(owner, name)

    def _timed(self, function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            began = time.thread_time()
            result = function(*args, **options)
            seconds.append(time.thread_time() - began)
            return result

        return timed


def parts(running: int, context: int, steps: int) -> dict[str, float]:
    batch = RunningBatch(LaidOutDevice, running, context, churn=False)
    device = batch.engine.device
    assert isinstance(device, LaidOutDevice)
    with Parts(device.backend, "flatten", "make_attention", "top_tokens") as timed:
        for _ in range(min(ROUND, steps)):
            batch.step()
    return {name: distribution("x", seconds)["median_x_ms"] for name, seconds in timed.seconds.items()}


def profile(running: int, context: int, steps: int) -> None:
    batch = RunningBatch(LaidOutDevice, running, context, churn=False)
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(min(ROUND, steps)):
        batch.step()
    profiler.disable()
    pstats.Stats(profiler, stream=sys.stderr).strip_dirs().sort_stats("tottime").print_stats(25)


def bench(args: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {"machine": machine.facts(), "running": args.running, "context": args.context}
    result |= {"steps": args.steps, "threads": args.threads, "goal_ms": GOAL_MS, "scenes": {}}
    for workload in ("decode", "churn"):
        for name in DEVICES:
            figures = measure(name, args.running, args.context, args.steps, churn=workload == "churn")
            result["scenes"][f"{workload}, {name}"] = figures
    result["parts_median_ms"] = parts(args.running, args.context, args.steps)
    return result


def show(result: dict[str, Any], console: Console) -> None:
    title = f"a step apart from the model, {result['running']} running, ms (goal {result['goal_ms']})"
    table = Table("", title=title, box=None)
    keys = ("median_step_ms", "mean_step_ms", "p99_step_ms", "max_step_ms", "median_cpu_ms", "p99_cpu_ms")
    for column in ("median", "mean", "p99", "max", "CPU median", "CPU p99"):
        table.add_column(column, justify="right")
    for name, figures in result["scenes"].items():
        table.add_row(name, *(f"{figures[key]:.3f}" for key in keys))
    for name, value in result["parts_median_ms"].items():  # of "decode, laid out"
        table.add_row(f"  of it {name}", "", "", "", "", f"{value:.3f}")
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.scheduler_overhead", description="a step apart from the model"
    )
    add_json(parser)
    parser.add_argument("--running", type=positive, default=256)
    parser.add_argument("--context", type=positive, default=512)
    parser.add_argument("--steps", type=positive, default=1000)
    parser.add_argument("--threads", type=positive, default=1, help="of torch")
    parser.add_argument("--profile", action="store_true", help="show where the time goes instead")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.profile:
        profile(args.running, args.context, args.steps)
        return 0
    result = bench(args)
    write_result(result, args.json, lambda: show(result, Console(stderr=True)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
