"""Queue metrics: a request waits until a worker has scheduled its present attempt; its prompt includes the output
tokens of earlier attempts. Requests that wait for a first worker count, with a lower bound of their prompt's tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from decant.router.admission.first_worker import WaitingForWorker
from decant.router.execution.execution import Execution
from decant.router.workers.pool import WorkerPool
from decant.runtime.telemetry.metrics import QueueMetrics

ASSUMED_PREFILL_S_PER_TOKEN = 0.001
"""Seconds per token until a prompt has been computed: a pool without workers has to show that work waits."""


@dataclass(slots=True)
class QueueDepth:
    running: int = 0
    waiting: int = 0
    oldest_at: float | None = None
    prompt_tokens: int = 0

    def add(self, execution: Execution) -> None:
        if execution.is_scheduled:
            self.running += 1
            return
        stream = execution.stream
        self.add_waiting(stream.request.accepted_at, stream.request.prompt_tokens + stream.num_tokens)

    def add_waiting(self, since: float, prompt_tokens: int) -> None:
        self.waiting += 1
        self.oldest_at = since if self.oldest_at is None else min(self.oldest_at, since)
        self.prompt_tokens += prompt_tokens


def set_queue_metrics(
    metrics: QueueMetrics,
    executions: Iterable[Execution],
    first_workers: Iterable[WaitingForWorker],
    pool: WorkerPool,
    now: float,
) -> None:
    depths = {model: QueueDepth() for model in pool.costs}
    for execution in executions:
        depths[execution.stream.request.engine_request.model].add(execution)
    for request in first_workers:
        depths[request.model].add_waiting(request.since, request.prompt_tokens)
    for model, depth in depths.items():
        per_token = pool.costs[model].prefill_s_per_token or ASSUMED_PREFILL_S_PER_TOKEN
        metrics.running.labels(model).set(depth.running)
        metrics.waiting.labels(model).set(depth.waiting)
        metrics.oldest.labels(model).set(0.0 if depth.oldest_at is None else max(0.0, now - depth.oldest_at))
        metrics.prompt_tokens.labels(model).set(depth.prompt_tokens)
        metrics.prompt_seconds.labels(model).set(depth.prompt_tokens * per_token)
