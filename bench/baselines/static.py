"""transformers' ``generate``: static batches, one after another.

A virtual clock advances by each batch's measured or predicted duration. A token is received when ``generate`` has drawn
it: the best case of a stream.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from bench.comparison.metrics import Served, summarise
from bench.comparison.subprocess_runner import Job, OnProgress
from bench.workloads import Item

PAD = 0
WARM_UP = [Item(f"warm-up-{index}", list(range(64)), 3, 0.0) for index in range(2)]


@dataclass(slots=True)
class Pace:
    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    steps: list[float] = field(default_factory=list)

    def note(self, batch: Sequence[Item], stamps: Sequence[float]) -> None:
        self.prompt_tokens += _padded(batch)
        self.prompt_seconds += stamps[0]
        self.steps += [after - before for before, after in pairwise(stamps)]

    def predict(self, batch: Sequence[Item]) -> list[float]:
        first = _padded(batch) * self.prompt_seconds / self.prompt_tokens
        step = sum(self.steps) / max(1, len(self.steps))
        return [first + step * index for index in range(_longest(batch))]


def measure(job: Job, on_progress: OnProgress) -> dict[str, Any]:
    torch.set_num_threads(job.threads)
    began = time.perf_counter()
    dtype = getattr(torch, job.dtype)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(job.model, dtype=dtype, use_safetensors=True)
    model.eval()
    model.generation_config.eos_token_id = None  # lengths are forced
    loaded = time.perf_counter() - began
    generate(model, WARM_UP, lambda _: None)
    served, counts = run(model, job, on_progress)
    return {**summarise(served), **counts, "load_seconds": loaded}


def run(model: PreTrainedModel, job: Job, on_progress: OnProgress) -> tuple[list[Served], dict[str, Any]]:
    waiting = deque(sorted(job.items, key=lambda item: item.arrival_s))
    wanted = job.static_batches or len(job.items)
    expected = min(wanted, -(-len(job.items) // job.batch_size))
    pace, clock, sizes, steps = Pace(), 0.0, list[int](), 0
    served: dict[str, Served] = {}
    while waiting:
        clock = max(clock, waiting[0].arrival_s)
        batch = [waiting.popleft()]
        while waiting and len(batch) < job.batch_size and waiting[0].arrival_s <= clock:
            batch.append(waiting.popleft())
        if len(sizes) < wanted:
            stamps = generate(model, batch, _part(on_progress, len(sizes), expected))
            pace.note(batch, stamps)
        else:
            stamps = pace.predict(batch)
        for item in batch:
            tokens = [clock + stamp for stamp in stamps[: item.output_len]]
            served[item.id] = Served(item.id, len(item.prompt_token_ids), item.arrival_s, tokens)
        clock += stamps[-1]
        sizes.append(len(batch))
        steps += len(stamps)
    counts = {
        "batches": len(sizes),
        "measured_batches": min(wanted, len(sizes)),
        "steps": steps,
        "mean_batch": sum(item.output_len for item in job.items) / steps,
        "mean_step_ms": sum(pace.steps) / max(1, len(pace.steps)) * 1e3,
    }
    return [served[item.id] for item in job.items], counts


@torch.inference_mode()
def generate(model: Any, batch: Sequence[Item], on_progress: OnProgress) -> list[float]:
    width, longest = max(len(item.prompt_token_ids) for item in batch), _longest(batch)
    stamps: list[float] = []
    began = time.perf_counter()

    def stamp(input_ids: torch.Tensor, _scores: object, **_: Any) -> torch.Tensor:
        stamps.append(time.perf_counter() - began)
        on_progress(len(stamps) / longest)
        return torch.zeros(len(input_ids), dtype=torch.bool)

    gaps = [width - len(item.prompt_token_ids) for item in batch]
    ids = torch.tensor([[PAD] * gap + item.prompt_token_ids for gap, item in zip(gaps, batch, strict=True)])
    mask = torch.tensor([[0] * gap + [1] * (width - gap) for gap in gaps])
    written = model.generate(
        input_ids=ids,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=longest,
        pad_token_id=PAD,
        stopping_criteria=[stamp],
    )
    if written.shape[1] != width + longest or len(stamps) != longest:
        raise RuntimeError(f"asked for {longest} tokens, got {written.shape[1] - width} in {len(stamps)} steps")
    return stamps


def _part(on_progress: OnProgress, done: int, whole: int) -> OnProgress:
    return lambda share: on_progress(min(1.0, (done + share) / whole))


def _padded(batch: Sequence[Item]) -> int:
    return len(batch) * max(len(item.prompt_token_ids) for item in batch)


def _longest(batch: Sequence[Item]) -> int:
    return max(item.output_len for item in batch)
