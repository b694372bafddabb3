"""Figures of `decant top`: times in seconds, rates over each process's window."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from decant.command.top.samples import Distribution, Sample, Window

ROUTER, PREFILL, DECODE = "router", "prefill", "decode"


@dataclass(frozen=True)
class Latency:
    mean: float | None
    p50: float | None
    p99: float | None

    @classmethod
    def of(cls, one: Distribution) -> Latency:
        return cls(one.mean, one.quantile(0.5), one.quantile(0.99))


@dataclass(frozen=True)
class ModelFigures:
    """Figures of a model on all routers. ``ttft`` is from acceptance; the mean of ``itl`` is the mean TPOT, weighted by
    tokens.
    """

    model: str
    running: float
    waiting: float
    oldest_waiting_s: float
    waiting_prompt_s: float
    requests_per_s: float
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    cached_share: float | None
    refused_per_s: float
    failovers_per_s: float
    ttft: Latency
    itl: Latency
    requests_total: float
    output_tokens_total: float


@dataclass(frozen=True)
class RouterFigures:
    """Figures of a router; ``unwritten`` are ended requests whose end is not in Redis yet."""

    window_s: float
    is_store_available: bool
    unwritten: float
    running: float
    waiting: float
    requests_per_s: float
    output_tokens_per_s: float
    errors_per_s: float
    cpu_cores: float


@dataclass(frozen=True)
class WorkerFigures:
    window_s: float
    model: str
    running: float
    waiting: float
    queued_prompt_tokens: float
    kv_usage: float
    handoff_leases: float
    prefill_tokens_per_s: float
    output_tokens_per_s: float
    preemptions_per_s: float
    handoff_bytes_per_s: float
    cpu_cores: float
    prefill_tokens_total: float
    output_tokens_total: float


@dataclass(frozen=True)
class ProcessFigures:
    """State of a process; ``figures`` are None without an answer, ``role`` is empty while it is unknown."""

    name: str
    role: str
    address: str
    state: str
    figures: RouterFigures | WorkerFigures | None = None


@dataclass(frozen=True)
class Snapshot:
    """One reading; ``requests`` are those that routers list, the oldest first, each with the name of its "router"."""

    title: str
    processes: Sequence[ProcessFigures]
    models: Sequence[ModelFigures]
    requests: Sequence[dict[str, Any]]
    requests_in_flight: int

    def of(self, role: str) -> list[ProcessFigures]:
        return [one for one in self.processes if one.role == role]


def role_of(sample: Sample) -> str:
    if sample.has("decant_state_store_available"):
        return ROUTER
    return next(iter(sample.label_values("decant_worker_info", "role")), "")


def process_figures(role: str, window: Window) -> RouterFigures | WorkerFigures | None:
    if role == ROUTER:
        return _router(window)
    return _worker(window) if role in (PREFILL, DECODE) else None


def model_figures(routers: Sequence[Window]) -> list[ModelFigures]:
    models = {model for window in routers for model in window.last.label_values("decant_requests_running", "model")}
    return [_model(model, routers) for model in sorted(models)]


def _router(window: Window) -> RouterFigures:
    now = window.last
    return RouterFigures(
        window_s=window.seconds,
        is_store_available=now.total("decant_state_store_available") > 0,
        unwritten=now.total("decant_state_store_unwritten_requests"),
        running=now.total("decant_requests_running"),
        waiting=now.total("decant_requests_waiting"),
        requests_per_s=window.rate("decant_requests_total"),
        output_tokens_per_s=window.rate("decant_generation_tokens_total"),
        errors_per_s=window.rate("decant_errors_total", fault_owner="server"),
        cpu_cores=window.rate("process_cpu_seconds_total"),
    )


def _worker(window: Window) -> WorkerFigures:
    now = window.last
    return WorkerFigures(
        window_s=window.seconds,
        model=next(iter(now.label_values("decant_worker_info", "model")), ""),
        running=now.total("decant_requests_running"),
        waiting=now.total("decant_requests_waiting"),
        queued_prompt_tokens=now.total("decant_queued_prompt_tokens"),
        kv_usage=now.total("decant_kv_cache_usage_ratio"),
        handoff_leases=now.total("decant_handoff_leases"),
        prefill_tokens_per_s=window.rate("decant_prompt_tokens_total", source="local_compute"),
        output_tokens_per_s=window.rate("decant_generation_tokens_total"),
        preemptions_per_s=window.rate("decant_preemptions_total"),
        handoff_bytes_per_s=window.rate("decant_handoff_bytes_sum"),
        cpu_cores=window.rate("process_cpu_seconds_total"),
        prefill_tokens_total=now.total("decant_prompt_tokens_total", source="local_compute"),
        output_tokens_total=now.total("decant_generation_tokens_total"),
    )


def _model(model: str, routers: Sequence[Window]) -> ModelFigures:
    def now(name: str) -> Iterable[float]:
        return (window.last.total(name, model=model) for window in routers)

    def rate(name: str, **labels: str) -> float:
        return sum(window.rate(name, model=model, **labels) for window in routers)

    def latency(name: str) -> Latency:
        return Latency.of(sum((window.distribution(name, model=model) for window in routers), Distribution()))

    prompt = rate("decant_prompt_tokens_total")
    cached = rate("decant_prompt_tokens_total", source="local_cache_hit")
    return ModelFigures(
        model=model,
        running=sum(now("decant_requests_running")),
        waiting=sum(now("decant_requests_waiting")),
        oldest_waiting_s=max(now("decant_oldest_waiting_request_seconds"), default=0.0),
        waiting_prompt_s=sum(now("decant_waiting_prompt_seconds")),
        requests_per_s=rate("decant_requests_total"),
        output_tokens_per_s=rate("decant_generation_tokens_total"),
        prompt_tokens_per_s=prompt,
        cached_share=cached / prompt if prompt else None,
        refused_per_s=rate("decant_requests_refused_total"),
        failovers_per_s=rate("decant_failovers_total"),
        ttft=latency("decant_time_to_first_token_seconds"),
        itl=latency("decant_inter_token_latency_seconds"),
        requests_total=sum(now("decant_requests_total")),
        output_tokens_total=sum(now("decant_generation_tokens_total")),
    )
