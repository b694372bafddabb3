"""Ways to serve a queue with the same KV memory, in real steps of the engine. Padding is computed.

STATIC_ALL    batches in turn, each row padded to the longest answer of all
STATIC_BATCH  to the longest answer of its batch
RESERVING     continuous; a sequence reserves its longest possible answer
PAGED         continuous; a sequence holds blocks for its tokens
SEPARATE      as PAGED, but a step computes either prompts or decodes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import fmean
from typing import Any

from decant.bench.batching.engine_run import Answer, OnTokens, Trace, make_engine, request, serve
from decant.bench.batching.queues import Queue
from decant.bench.reports.figures import distribution
from decant.engine.plan import Device
from decant.engine.request import Request

STATIC_ALL = "static, padded to the longest of all"
STATIC_BATCH = "static, padded to its batch"
RESERVING = "continuous, reserving"
PAGED = "continuous, paged"
SEPARATE = "continuous, paged, separate prefill steps"
CONTENDERS = (STATIC_ALL, STATIC_BATCH, RESERVING, PAGED, SEPARATE)

STATIC_SAMPLE = 5
"""Measured static batches; the others are scaled by their steps."""


@dataclass(frozen=True)
class Run:
    contender: str
    answers: Sequence[Answer]
    seconds: float
    decode_steps: int
    used_tokens: Sequence[int] = ()
    allocated_tokens: Sequence[int] = ()
    preemptions: int = 0
    measured: int = 1
    batches: int = 1

    def summary(self, queue: Queue) -> dict[str, Any]:
        tokens = sum(len(one.tokens) for one in self.answers)
        later_tokens = tokens - len(self.answers)
        return {
            "duration": self.seconds,
            "output_throughput": tokens / self.seconds,
            "request_throughput": len(self.answers) / self.seconds,
            "useful_per_step": later_tokens / self.decode_steps if self.decode_steps else 0.0,
            "decode_steps": self.decode_steps,
            "kv_used": fmean(self.used_tokens) / queue.kv_tokens if self.used_tokens else 0.0,
            "kv_lost_in_blocks": 1 - sum(self.used_tokens) / sum(self.allocated_tokens)
            if sum(self.allocated_tokens)
            else 0.0,
            "preemptions": self.preemptions,
            "measured_batches": self.measured,
            "batches": self.batches,
            **distribution("latency", [one.tokens[-1] for one in self.answers]),
            **distribution("ttft", [one.tokens[0] for one in self.answers]),
            **distribution("itl", [gap for one in self.answers for gap in one.gaps]),
        }


@dataclass(frozen=True)
class Setup:
    device: Device
    token_budget: int
    seed: int
    on_tokens: OnTokens


def run(contender: str, queue: Queue, setup: Setup) -> Run:
    if contender in (STATIC_ALL, STATIC_BATCH):
        return _static(contender, queue, setup)
    max_running = queue.reserved if contender == RESERVING else len(queue.outputs)
    separate = contender == SEPARATE
    budget = max(setup.token_budget, queue.prompt_len) if separate else setup.token_budget
    engine = make_engine(setup.device, queue.kv_tokens, budget, max_running, separate_prefill=separate)
    requests = _requests(queue, queue.outputs, setup)
    trace = serve(engine, requests, queue.outputs, setup.on_tokens)
    answers = [trace.answers[one.id] for one in requests]
    steps = len(trace.decode_steps)
    return Run(contender, answers, trace.seconds, steps, trace.used_tokens, trace.allocated_tokens, trace.preemptions)


def sample(batches: int, max_batches: int = STATIC_SAMPLE) -> list[int]:
    count = min(batches, max_batches)
    return [index * batches // count for index in range(count)]


@dataclass
class _Pace:
    prompts: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)

    def add(self, trace: Trace) -> None:
        self.prompts.append(max(one.tokens[0] for one in trace.answers.values()))
        self.steps += trace.decode_steps

    def predict(self, size: int, padded: int) -> Trace:
        first = fmean(self.prompts)
        step = fmean(self.steps) if self.steps else 0.0
        tokens = [first + step * index for index in range(padded)]
        return Trace({str(index): Answer(0.0, tokens[-1], tokens) for index in range(size)}, tokens[-1])


def _static(contender: str, queue: Queue, setup: Setup) -> Run:
    batches, longest = queue.batches, max(queue.outputs)
    padded = [longest if contender == STATIC_ALL else max(batch) for batch in batches]
    pace, traces = _Pace(), dict[int, Trace]()
    for index in sample(len(batches)):
        traces[index] = _batch(queue, batches[index], padded[index], setup)
        pace.add(traces[index])
    clock, answers = 0.0, list[Answer]()
    for index, batch in enumerate(batches):
        trace = traces.get(index) or pace.predict(len(batch), padded[index])
        for output, answer in zip(batch, trace.answers.values(), strict=True):
            own = [clock + at for at in answer.tokens[:output]]
            answers.append(Answer(clock + answer.begun_at, clock + trace.seconds, own))
        clock += trace.seconds
    used = [tokens for trace in traces.values() for tokens in trace.used_tokens]
    steps = sum(length - 1 for length in padded)
    return Run(contender, answers, clock, steps, used, measured=len(traces), batches=len(batches))


def _batch(queue: Queue, outputs: Sequence[int], padded: int, setup: Setup) -> Trace:
    kv_tokens = len(outputs) * (queue.prompt_len + padded + setup.device.block_size)
    budget = max(setup.token_budget, queue.prompt_len)
    engine = make_engine(setup.device, kv_tokens, budget, len(outputs), separate_prefill=True)
    return serve(engine, _requests(queue, [padded] * len(outputs), setup), outputs, setup.on_tokens)


def _requests(queue: Queue, outputs: Sequence[int], setup: Setup) -> list[Request]:
    rng, size = Random(setup.seed), setup.device.vocab_size
    return [
        request(str(index), [rng.randrange(size) for _ in range(queue.prompt_len)], output)
        for index, output in enumerate(outputs)
    ]
