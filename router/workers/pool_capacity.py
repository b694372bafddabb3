from __future__ import annotations

import math
from collections.abc import Sequence

from decant.protos import worker_pb2 as wire
from decant.router.placement.capacity import PoolCapacity
from decant.router.workers.worker_handle import WorkerHandle

UNKNOWN_MAX_RUNNING = 256
"""Batch limit of a worker that does not report it."""


def capacity_of(workers: Sequence[WorkerHandle], prefill_s_per_token: float | None) -> PoolCapacity:
    """Capacity of usable workers; ``prefill_s_per_token`` is the time of one prompt alone, None if unknown."""
    prefill = [worker for worker in workers if worker.load.role == wire.ROLE_PREFILL]
    decode = [worker for worker in workers if worker.load.role != wire.ROLE_PREFILL] or prefill
    if not decode:
        return PoolCapacity()
    alone = 1 / prefill_s_per_token if prefill_s_per_token else 0.0
    prompt_rates = [max(worker.rates.prompt_tokens_per_s, alone) for worker in prefill or decode]
    sequences = [worker.load.sequences for worker in workers]
    return PoolCapacity(
        decode_workers=len(decode),
        batch_limit=sum(map(_max_running, decode)),
        step_s=sum(worker.rates.step_s for worker in decode) / len(decode),
        step_s_per_sequence=sum(worker.rates.step_s_per_sequence for worker in decode) / len(decode),
        prompt_tokens_per_s=sum(prompt_rates) or math.inf,
        queued_prompt_tokens=sum(worker.load.queued_tokens.value for worker in workers),
        other_sequences=sum(count.value - count.own for count in sequences),
    )


def _max_running(worker: WorkerHandle) -> int:
    return worker.registration.capacity.max_running or UNKNOWN_MAX_RUNNING
