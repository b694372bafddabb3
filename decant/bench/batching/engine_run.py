from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

from decant.engine.engine import Engine
from decant.engine.kv_layout import longest_sequence
from decant.engine.output import StepOutput
from decant.engine.plan import Device, StepPlan
from decant.engine.request import Request, StopParams
from decant.engine.scheduler import Limits, Scheduler
from decant.engine.sequence import Sequence as EngineSequence

NO_LIMIT_S = 3600.0
"""Step time that no step reaches."""

OnTokens = Callable[[int], None]


@dataclass(slots=True)
class Answer:
    """Times of an answer, in seconds after the start.

    begun_at    first step with its prompt
    freed_at    its slot is free, in a static batch later than the last token
    """

    begun_at: float = 0.0
    freed_at: float = 0.0
    tokens: list[float] = field(default_factory=list)

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in pairwise(self.tokens)]


@dataclass(slots=True)
class Trace:
    """Record of a run.

    decode_steps        seconds of each step with a token after the first
    used_tokens         in KV memory, by step
    allocated_tokens    those that have blocks, by step
    """

    answers: dict[str, Answer]
    seconds: float = 0.0
    decode_steps: list[float] = field(default_factory=list)
    used_tokens: list[int] = field(default_factory=list)
    allocated_tokens: list[int] = field(default_factory=list)
    preemptions: int = 0


class SeparatePrefill(Scheduler):
    def schedule(self, reserved_slots: int = 0) -> tuple[StepPlan, list[EngineSequence]]:
        return self._separate(*super().schedule(reserved_slots))

    def schedule_ahead(self, reserved_slots: int = 0) -> tuple[StepPlan, list[EngineSequence]] | None:
        ahead = super().schedule_ahead(reserved_slots)
        return None if ahead is None else self._separate(*ahead)

    @staticmethod
    def _separate(plan: StepPlan, sequences: list[EngineSequence]) -> tuple[StepPlan, list[EngineSequence]]:
        decodes = plan.decodes.tokens
        if not plan.prompts.tokens or not decodes:
            return plan, sequences
        # Sequences that are left out of a step stay as they are.
        return StepPlan(plan.rows[decodes:], plan.prompts.tokens, prompts=plan.prompts), sequences[decodes:]


class _PartOfDevice:
    def __init__(self, device: Device, num_blocks: int) -> None:
        self._device = device
        self.num_blocks = num_blocks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)


def make_engine(
    device: Device, kv_tokens: int, token_budget: int, max_running: int, *, separate_prefill: bool = False
) -> Engine:
    num_blocks = kv_tokens // device.block_size * len(device.windows)
    part = cast(Device, _PartOfDevice(device, num_blocks))
    context_length = longest_sequence(device.windows, num_blocks, device.block_size, device.context_length)
    limits = Limits(max(token_budget, max_running), max_running, context_length, NO_LIMIT_S)
    engine = Engine(part, limits, clock=time.perf_counter)
    if separate_prefill:
        engine.scheduler = SeparatePrefill(engine.pool, limits, engine.copy_block, engine.predictor)
    return engine


def request(id: str, prompt: Sequence[int], output_len: int) -> Request:
    stop = StopParams(max_tokens=output_len, min_tokens=output_len, ignore_eos=True)
    return Request(id, tuple(prompt), stop=stop, use_prefix_cache=False)


def serve(engine: Engine, requests: Sequence[Request], own: Sequence[int], on_tokens: OnTokens) -> Trace:
    """Serve all requests; `own` are their output lengths without padding."""
    trace = Trace({one.id: Answer() for one in requests})
    ends = {one.id: one.prompt_len + length for one, length in zip(requests, own, strict=True)}
    for one in requests:
        engine.add(one)
    began = step_began = time.perf_counter()
    while engine.has_work:
        output = engine.step()
        now = time.perf_counter()
        _record(trace, output, step_began - began, now - began)
        _record_memory(trace, engine, ends)
        on_tokens(len(output.tokens))
        step_began = now
    trace.seconds = step_began - began
    trace.preemptions = engine.scheduler.preemptions
    return trace


def _record(trace: Trace, output: StepOutput, begin: float, end: float) -> None:
    for started in output.started:
        trace.answers[started.id].begun_at = begin
    if any(token.position for token in output.tokens):
        trace.decode_steps.append(end - begin)
    for token in output.tokens:
        trace.answers[token.id].tokens.append(end)
    for ended in output.ended:
        trace.answers[ended.id].freed_at = end


def _record_memory(trace: Trace, engine: Engine, ends: dict[str, int]) -> None:
    running = engine.scheduler.running
    trace.used_tokens.append(sum(min(one.num_computed, ends[one.id]) for one in running))
    size = engine.pool.block_size
    trace.allocated_tokens.append(sum(one.block_table.num_blocks for one in running if one.block_table) * size)
