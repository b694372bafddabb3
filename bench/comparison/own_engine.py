from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import torch

from bench.comparison.metrics import distribution, summarise
from bench.comparison.open_loop import WARM_UP, run_open_loop
from bench.comparison.roofline import Step, Weights
from bench.comparison.subprocess_runner import Job, OnProgress
from bench.workloads import Item
from decant.engine.checkpoint.expert_layers import ExpertLayers
from decant.engine.cpu.linear import FixedRows, PackedLinear
from decant.engine.engine import Engine
from decant.engine.kv_layout import longest_sequence
from decant.engine.loading import load
from decant.engine.model import calibration
from decant.engine.model.model import ModelConfig
from decant.engine.output import StepOutput
from decant.engine.plan import Device
from decant.engine.request import FinishReason, Request, StopParams
from decant.engine.scheduler import Limits
from decant.runtime.serving.server import freeze_gc


class Stopwatch:
    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self.seconds = 0.0
        self._entered = 0.0
        hooks = [
            (module.register_forward_pre_hook(self.enter), module.register_forward_hook(self.leave))
            for module in modules
        ]
        self._hooks = [hook for pair in hooks for hook in pair]

    def enter(self, *_: object) -> None:
        self._entered = time.perf_counter()

    def leave(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._entered

    def take(self) -> float:
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()


class Meter:
    def __init__(self, engine: Engine, model: torch.nn.Module) -> None:
        self.steps: list[float] = []
        self.models: list[float] = []
        self.schedule: list[Step] = []
        self._engine = engine
        self._model = Stopwatch([model])
        self._began = 0.0

    def begin(self) -> None:
        self.steps, self.models, self.schedule = [], [], []
        self._began = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._began

    def step(self) -> StepOutput:
        self._model.take()
        began = self.now()
        output = self._engine.step()
        if output.num_tokens:
            ended = self.now()
            self.steps.append(ended - began)
            self.models.append(self._model.take())
            self.schedule.append(Step(ended, output.num_tokens, len(output.tokens)))
        return output

    def summary(self) -> dict[str, Any]:
        outside = [step - model for step, model in zip(self.steps, self.models, strict=True)]
        return {
            "steps": len(self.steps),
            "mean_batch": sum(step.rows for step in self.schedule) / max(1, len(self.steps)),
            **distribution("step", self.steps),
            **distribution("model", self.models),
            **distribution("outside_model", outside),
            "schedule": self.schedule,
        }


class Server:
    def __init__(self, engine: Engine, meter: Meter) -> None:
        self._engine = engine
        self._meter = meter

    def add(self, item: Item) -> None:
        self._engine.add(request(item))

    def step(self) -> list[str]:
        output = self._meter.step()
        for ended in output.ended:
            if ended.reason is not FinishReason.LENGTH:
                raise RuntimeError(f"{ended.id} ended by {ended.reason.value} {ended.detail}")
        return [token.id for token in output.tokens]


def measure(job: Job, on_progress: OnProgress) -> dict[str, Any]:
    torch.set_num_threads(job.threads)
    began = time.perf_counter()
    device = load(ModelConfig(job.model, dtype=job.dtype, device="cpu", kv_bytes=job.kv_bytes))
    device.costs = calibration.measure(device)
    engine = make_engine(device, job.token_budget)
    meter = Meter(engine, device.model)
    loaded = time.perf_counter() - began
    server = Server(engine, meter)
    run_open_loop(server, WARM_UP, lambda _: None)
    freeze_gc()  # as a worker does before it is ready
    meter.begin()
    cpu = time.process_time()
    served = run_open_loop(server, job.items, on_progress)
    cpu = time.process_time() - cpu
    held = weights(device.model)
    extra = {
        "load_seconds": loaded,
        "cpu_seconds": cpu,
        "preemptions": engine.load().preemptions,
        "weights": None if held is None else asdict(held),
    }
    return {**summarise(served), **meter.summary(), **extra}


def layers(model: torch.nn.Module) -> list[PackedLinear]:
    return [module for module in model.modules() if isinstance(module, PackedLinear)]


def weights(model: Any) -> Weights | None:
    """Sizes of the weights; None for a model that reads only part of them in a step."""
    if any(isinstance(module, ExpertLayers | FixedRows) for module in model.modules()):
        return None
    head = model.get_output_embeddings().weight
    elements = sum(layer.weight.numel() for layer in layers(model))
    table = model.get_input_embeddings().weight
    return Weights(elements - head.numel(), head.numel(), table.numel(), head.dtype.itemsize)


def make_engine(device: Device, token_budget: int) -> Engine:
    context_length = longest_sequence(device.windows, device.num_blocks, device.block_size, device.context_length)
    return Engine(device, Limits(token_budget, min(256, token_budget), context_length))


def request(item: Item) -> Request:
    stop = StopParams(max_tokens=item.output_len, min_tokens=item.output_len, ignore_eos=True)
    return Request(item.id, tuple(item.prompt_token_ids), stop=stop)
