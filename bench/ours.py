"""The engine as a contender: open loop, one step after the other, on this process's main thread."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch

from bench.child import Job, Tell
from bench.machine import peak_rss
from bench.metrics import Served, details, distribution, summarise
from bench.workloads import Item
from engine.engine import Engine
from engine.model import ModelConfig, ModelDevice, load
from engine.output import StepOutput
from engine.request import FinishReason, Request, StopParams
from engine.scheduler import Limits

WARM_UP = (96, 4)
"""Prompt and output tokens of the request that is served before anything is timed."""


class Meter:
    """Steps an engine and notes of every step the seconds, those within the model's call, and the batch."""

    def __init__(self, engine: Engine, model: torch.nn.Module) -> None:
        self.steps: list[float] = []
        self.models: list[float] = []
        self.rows: list[int] = []
        self._engine = engine
        self._entered = 0.0
        self._inside = 0.0
        model.register_forward_pre_hook(self._enter)
        model.register_forward_hook(self._leave)

    def step(self) -> StepOutput:
        self._inside = 0.0
        began = time.perf_counter()
        output = self._engine.step()
        if output.num_tokens:
            self.steps.append(time.perf_counter() - began)
            self.models.append(self._inside)
            self.rows.append(len(output.tokens))
        return output

    def clear(self) -> None:
        self.steps, self.models, self.rows = [], [], []

    def summary(self) -> dict[str, Any]:
        """Times of a step, all, in the model, and outside it (scheduling, laying out, sampling)."""
        outside = [step - model for step, model in zip(self.steps, self.models, strict=True)]
        return {
            "steps": len(self.steps),
            "mean_batch": sum(self.rows) / max(1, len(self.steps)),
            **distribution("step", self.steps),
            **distribution("model", self.models),
            **distribution("outside_model", outside),
        }

    def _enter(self, *_: object) -> None:
        self._entered = time.perf_counter()

    def _leave(self, *_: object) -> None:
        self._inside += time.perf_counter() - self._entered


def serve(job: Job, tell: Tell) -> dict[str, Any]:
    """Load the checkpoint, warm up, serve the workload."""
    began = time.perf_counter()
    device = load(ModelConfig(job.model, dtype=job.dtype, device="cpu", kv_bytes=job.kv_bytes))
    engine = make_engine(device, job.token_budget)
    meter = Meter(engine, device.model)
    loaded = time.perf_counter() - began
    warm = Item("warm-up", [token % device.vocab_size for token in range(WARM_UP[0])], WARM_UP[1], 0.0)
    run(meter, engine, [warm], lambda _: None)
    meter.clear()
    served = run(meter, engine, job.items, tell)
    extra = {"load_seconds": loaded, "peak_rss_bytes": peak_rss(), "preemptions": engine.load().preemptions}
    return {**summarise(served), **meter.summary(), **extra, "requests": details(served)}


def make_engine(device: ModelDevice, token_budget: int) -> Engine:
    """An engine that serves as long sequences as model and memory allow."""
    window = min(device.window, device.num_blocks * device.block_size)
    return Engine(device, Limits(token_budget, min(256, token_budget), window))


def run(meter: Meter, engine: Engine, items: tuple[Item, ...] | list[Item], tell: Tell) -> list[Served]:
    """Send every item at its time, whatever is still unanswered; seconds count from the start."""
    waiting = deque(sorted(items, key=lambda item: item.arrival_s))
    tokens: dict[str, list[float]] = {item.id: [] for item in items}
    total, done = sum(item.output_len for item in items), 0
    began = time.perf_counter()
    while waiting or engine.has_work:
        now = time.perf_counter() - began
        while waiting and waiting[0].arrival_s <= now:
            engine.add(request(waiting.popleft()))
        if not engine.has_work:
            time.sleep(waiting[0].arrival_s - now)
            continue
        output = meter.step()
        now = time.perf_counter() - began
        for token in output.tokens:
            tokens[token.id].append(now)
        for ended in output.ended:
            if ended.reason is not FinishReason.LENGTH:
                raise RuntimeError(f"{ended.id} ended by {ended.reason.value} {ended.detail}")
        done += len(output.tokens)
        tell(done / total)
    return [Served(item.id, len(item.prompt_token_ids), item.arrival_s, tokens[item.id]) for item in items]


def request(item: Item) -> Request:
    """Greedy, exactly as long as the item says."""
    stop = StopParams(max_tokens=item.output_len, min_tokens=item.output_len, ignore_eos=True)
    return Request(item.id, tuple(item.prompt_token_ids), stop=stop)
