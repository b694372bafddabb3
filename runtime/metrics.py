"""Metrics of a process, in its own registry. Counters, not rates; labels from closed sets, never ids.

ProcessMetrics   every process     errors by reason, code and blame; the build
RequestMetrics   the router        times and tokens of requests, by model
EngineMetrics    a worker          its cache, its batch, its handoffs

Times are in seconds, sizes in bytes. Buckets are those of other LLM servers.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable
from enum import StrEnum
from importlib.metadata import version

import grpc
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.exposition import generate_latest

from decant.runtime.errors import ServiceError
from decant.runtime.peer import PROTOCOL

PREFIX = "decant"

TTFT_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
TOKEN_SECONDS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_SECONDS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
HANDOFF_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
HANDOFF_BYTES = tuple(float(4**power * 1024) for power in range(2, 13))
"""16 KiB to 16 GiB."""


class PromptSource(StrEnum):
    """Where the KV cache of a prompt's tokens came from."""

    COMPUTED = "local_compute"
    CACHED = "local_cache_hit"
    HANDED_OVER = "external_kv_transfer"


class Registry:
    """A process's metrics, and their text. `process` adds its CPU seconds, memory and open files."""

    def __init__(self, *, process: bool = True) -> None:
        # Creation times would double the number of series, and no dashboard uses them.
        disable_created_metrics()
        self.collectors = CollectorRegistry(auto_describe=True)
        if process:
            ProcessCollector(registry=self.collectors)

    def text(self) -> bytes:
        """All values in Prometheus' text format."""
        return generate_latest(self.collectors)

    def counter(self, name: str, description: str, labels: Iterable[str] = ()) -> Counter:
        return Counter(f"{PREFIX}_{name}", description, labels, registry=self.collectors)

    def gauge(self, name: str, description: str, labels: Iterable[str] = ()) -> Gauge:
        return Gauge(f"{PREFIX}_{name}", description, labels, registry=self.collectors)

    def histogram(
        self, name: str, description: str, buckets: tuple[float, ...], labels: Iterable[str] = ()
    ) -> Histogram:
        return Histogram(f"{PREFIX}_{name}", description, labels, buckets=buckets, registry=self.collectors)


class ProcessMetrics:
    """Metrics of every process."""

    def __init__(self, registry: Registry) -> None:
        labels = ("reason", "code", "blame")
        self.errors = registry.counter("errors_total", "Calls that ended with an error.", labels)
        build = {
            "version": version("decant-llm"),
            "protocol": str(PROTOCOL),
            "python": platform.python_version(),
            "grpc": grpc.__version__,
        }
        registry.gauge("build_info", "Always 1. Its labels are the versions of this process.", build).labels(
            **build
        ).set(1)

    def count_error(self, error: ServiceError) -> None:
        self.errors.labels(error.label, error.code.name, error.blame.value).inc()


class ModelMetrics:
    """The router's view of one model's requests."""

    def __init__(self, parent: RequestMetrics, model: str) -> None:
        self.ttft = parent.ttft.labels(model)
        self.inter_token = parent.inter_token.labels(model)
        self.e2e = parent.e2e.labels(model)
        self.queue = parent.queue.labels(model)
        self.prefill = parent.prefill.labels(model)
        self.decode = parent.decode.labels(model)
        self.generated = parent.generated.labels(model)
        self.prompt = {source: parent.prompt.labels(model, source.value) for source in PromptSource}


class RequestMetrics:
    """A router's metrics of requests. Only models that it serves get a label: `of` is called at their load."""

    def __init__(self, registry: Registry) -> None:
        model = ("model",)
        time = registry.histogram
        self.ttft = time("time_to_first_token_seconds", "From accepted to first token sent.", TTFT_SECONDS, model)
        self.inter_token = time("inter_token_latency_seconds", "Between two tokens of a stream.", TOKEN_SECONDS, model)
        self.e2e = time("e2e_request_latency_seconds", "From accepted to ended.", REQUEST_SECONDS, model)
        self.queue = time(
            "request_queue_time_seconds", "From accepted to taken up by a worker.", REQUEST_SECONDS, model
        )
        self.prefill = time("request_prefill_time_seconds", "From first chunk to first token.", REQUEST_SECONDS, model)
        self.decode = time(
            "request_decode_time_seconds", "From first decode step to last token.", REQUEST_SECONDS, model
        )
        self.prompt = registry.counter(
            "prompt_tokens_total", "Prompt tokens, by the source of their KV.", ("model", "source")
        )
        self.generated = registry.counter("generation_tokens_total", "Output tokens.", model)
        self.running = registry.gauge("requests_running", "Requests that a worker has taken up.")
        self.waiting = registry.gauge("requests_waiting", "Requests that wait for a worker.")
        self.ready_workers = registry.gauge(
            "ready_workers", "Workers to which this router may send new requests.", ("model", "role")
        )

    def of(self, model: str) -> ModelMetrics:
        """Metrics of one served model. Keep it: looking up labels costs more than counting."""
        return ModelMetrics(self, model)


class EngineMetrics:
    """A worker's metrics of its engine. `causes` are the names of all failures of a handoff."""

    def __init__(self, registry: Registry, causes: Iterable[str]) -> None:
        self.cache_usage = registry.gauge("kv_cache_usage_ratio", "Share of the KV blocks that are in use, 0 to 1.")
        self.running = registry.gauge("requests_running", "Sequences in the batch.")
        self.waiting = registry.gauge(
            "requests_waiting", "Sequences and arriving caches that wait for free blocks or their turn."
        )
        self.generated = registry.counter("generation_tokens_total", "Tokens sampled.")
        self.preemptions = registry.counter(
            "preemptions_total", "Sequences whose blocks were given to more urgent ones."
        )
        self.handoff_seconds = registry.histogram(
            "handoff_seconds", "From first block requested to cache owned.", HANDOFF_SECONDS
        )
        self.handoff_bytes = registry.histogram("handoff_bytes", "Bytes of KV cache moved by a handoff.", HANDOFF_BYTES)
        failures = registry.counter("handoff_failures_total", "Handoffs that failed.", ("cause",))
        self.handoff_failures = {cause: failures.labels(cause) for cause in causes}
        prompt = registry.counter("prompt_tokens_total", "Prompt tokens, by the source of their KV.", ("source",))
        self.prompt = {source: prompt.labels(source.value) for source in PromptSource}
