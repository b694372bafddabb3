"""Metrics of a process, in seconds and bytes: counters, not rates; labels from closed sets, never ids."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from importlib.metadata import version
from types import MappingProxyType

import grpc
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric

from decant.runtime.error_details import Reason
from decant.runtime.errors import ServiceError
from decant.runtime.protocol import PROTOCOL
from decant.runtime.telemetry.usage_metrics import AdapterMetrics, KvEventMetrics, TenantMetrics

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

REFUSALS = (Reason.QUEUE_FULL, Reason.QUOTA_EXCEEDED, Reason.NO_WORKER, Reason.STATE_STORE_UNAVAILABLE)
"""Reasons for which a router refuses valid requests."""


GATEWAY_NAMES = MappingProxyType(
    {
        "requests_running": "num_requests_running",
        "requests_waiting": "num_requests_waiting",
        "kv_cache_usage_ratio": "kv_cache_usage_perc",
        "preemptions": "num_preemptions",
        "prompt_tokens": "prompt_tokens",
        "generation_tokens": "generation_tokens",
        "time_to_first_token_seconds": "time_to_first_token_seconds",
        "inter_token_latency_seconds": "inter_token_latency_seconds",
        "e2e_request_latency_seconds": "e2e_request_latency_seconds",
        "request_queue_time_seconds": "request_queue_time_seconds",
        "request_prefill_time_seconds": "request_prefill_time_seconds",
        "request_decode_time_seconds": "request_decode_time_seconds",
    }
)
"""vLLM's names of metrics, which the endpoint pickers of inference gateways and many dashboards read."""


class PromptSource(StrEnum):
    COMPUTED = "local_compute"
    CACHED = "local_cache_hit"
    HANDED_OVER = "external_kv_transfer"


class Registry:
    """Metrics of a process, and the pages of its admin port. Each part registers its own; the admin server renders
    them. With ``gateway_names`` those of GATEWAY_NAMES appear a second time, under vLLM's names.
    """

    def __init__(self, *, process: bool = True, gateway_names: bool = False) -> None:
        # Creation times would double the number of series, and no dashboard uses them.
        disable_created_metrics()
        self.collectors = CollectorRegistry(auto_describe=True)
        self.pages: dict[str, Callable[[], bytes]] = {}
        """JSON documents on the admin port, by path."""
        self._updates: list[Callable[[], None]] = []
        self._gateway_names = gateway_names
        if process:
            ProcessCollector(registry=self.collectors)

    def before_scrape(self, update: Callable[[], None]) -> None:
        self._updates.append(update)

    def text(self) -> bytes:
        for update in self._updates:
            update()
        text = generate_latest(self.collectors)
        return text + generate_latest(_Renamed(self.collectors)) if self._gateway_names else text

    def counter(self, name: str, description: str, labels: Iterable[str] = ()) -> Counter:
        return Counter(f"{PREFIX}_{name}", description, labels, registry=self.collectors)

    def gauge(self, name: str, description: str, labels: Iterable[str] = ()) -> Gauge:
        return Gauge(f"{PREFIX}_{name}", description, labels, registry=self.collectors)

    def histogram(
        self, name: str, description: str, buckets: tuple[float, ...], labels: Iterable[str] = ()
    ) -> Histogram:
        return Histogram(f"{PREFIX}_{name}", description, labels, buckets=buckets, registry=self.collectors)


class _Renamed:
    """The metrics of a registry that have a name in GATEWAY_NAMES."""

    def __init__(self, collectors: CollectorRegistry) -> None:
        self._collectors = collectors

    def collect(self) -> Iterator[Metric]:
        for family in self._collectors.collect():
            name = GATEWAY_NAMES.get(family.name.removeprefix(f"{PREFIX}_"))
            if name is None:
                continue
            renamed = Metric(f"vllm:{name}", family.documentation, family.type)
            for sample in family.samples:
                labels = {"model_name" if label == "model" else label: value for label, value in sample.labels.items()}
                full = f"vllm:{name}{sample.name.removeprefix(family.name)}"
                renamed.samples.append(sample._replace(name=full, labels=labels))
            yield renamed


class ProcessMetrics:
    def __init__(self, registry: Registry) -> None:
        labels = ("reason", "code", "fault_owner")
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
        self.errors.labels(error.label, error.code.name, error.fault_owner.value).inc()


class ModelMetrics:
    def __init__(self, parent: RequestMetrics, model: str) -> None:
        self.adapters, self.tenants = parent.adapters, parent.tenants
        self.ttft = parent.ttft.labels(model)
        self.inter_token = parent.inter_token.labels(model)
        self.e2e = parent.e2e.labels(model)
        self.queue = parent.queue.labels(model)
        self.prefill = parent.prefill.labels(model)
        self.handoff = parent.handoff.labels(model)
        self.decode = parent.decode.labels(model)
        self.generated = parent.generated.labels(model)
        self.prompt = {source: parent.prompt.labels(model, source.value) for source in parent.SOURCES}
        self.refused = {reason: parent.refused.labels(model, reason.value.lower()) for reason in REFUSALS}
        self._requests, self._model = parent.requests, model

    def count_request(self, outcome: str) -> None:
        self._requests.labels(self._model, outcome).inc()


class QueueMetrics:
    def __init__(self, registry: Registry) -> None:
        label = ("model",)
        self.running = registry.gauge("requests_running", "Requests that a worker has scheduled.", label)
        self.waiting = registry.gauge(
            "requests_waiting", "Requests whose current attempt no worker has scheduled yet.", label
        )
        self.oldest = registry.gauge(
            "oldest_waiting_request_seconds",
            "Age of the oldest request whose current attempt no worker has scheduled yet; 0 if there is none.",
            label,
        )
        self.prompt_tokens = registry.gauge(
            "waiting_prompt_tokens",
            "Tokens of the prompts that wait in requests_waiting. Cached prefixes are included.",
            label,
        )
        self.prompt_seconds = registry.gauge(
            "waiting_prompt_seconds",
            "waiting_prompt_tokens times the last measured prefill seconds per token of one worker; 1 ms per token"
            " before the first measurement.",
            label,
        )


class ResultMetrics:
    """Of results and memory in Redis, as of this router's last look."""

    def __init__(self, registry: Registry) -> None:
        gauge = registry.gauge
        self.bytes = gauge("result_bytes", "Memory in Redis of the results of all routers.")
        self.max_bytes = gauge(
            "result_max_bytes", "Memory in Redis beyond which this router deletes the oldest results."
        )
        self.count = gauge("results", "Ended requests of all routers that Redis keeps.")
        self.oldest = gauge("oldest_result_seconds", "Time since the end of the oldest result; 0 if there is none.")
        self.discarded = registry.counter(
            "results_discarded_total", "Results that this router deleted before their time, to keep result_max_bytes."
        )
        self.store_used = gauge("state_store_used_bytes", "Memory that Redis uses.")
        self.store_max = gauge("state_store_max_bytes", "Memory that Redis may use, its maxmemory; 0: no limit.")


class RequestMetrics:
    SOURCES = (PromptSource.COMPUTED, PromptSource.CACHED)
    """A router does not learn what came with a handoff."""

    def __init__(self, registry: Registry, tenants: Iterable[str] = (), causes: Iterable[str] = ()) -> None:
        self._causes = tuple(causes)
        self._define_times(registry)
        model = ("model",)
        self.prompt = registry.counter(
            "prompt_tokens_total",
            "Prompt tokens by the source of their KV cache; at a router local_cache_hit is any worker's prefix cache.",
            ("model", "source"),
        )
        self.generated = registry.counter("generation_tokens_total", "Output tokens sent to clients.", model)
        self.requests = registry.counter(
            "requests_total", "Requests that ended or lost their client, by outcome.", ("model", "outcome")
        )
        self.refused = registry.counter(
            "requests_refused_total", "Valid requests that were refused before they were accepted.", ("model", "reason")
        )
        self.failovers = registry.counter(
            "failovers_total", "Attempts at a request that failed and may be repeated, by cause.", ("model", "cause")
        )
        self.prompt_calls = registry.counter(
            "prompt_calls_total", "Calls of Score and Embed, by outcome.", ("model", "method", "outcome")
        )
        self.prompt_call_seconds = registry.histogram(
            "prompt_call_seconds", "Time of a call of Score or Embed.", REQUEST_SECONDS, ("model", "method")
        )
        self.adopted = registry.counter(
            "requests_adopted_total", "Requests that this router took over from another router.", model
        )
        self.queues = QueueMetrics(registry)
        self.tenants = TenantMetrics(registry, tenants)
        self.adapters = AdapterMetrics(registry)
        self.kv_events = KvEventMetrics(registry)
        self.ready_workers = registry.gauge(
            "ready_workers", "Workers to which this router may send new requests.", ("model", "role")
        )
        self.known_workers = registry.gauge(
            "known_workers",
            "Workers that are registered or have requests of this router, ready or not.",
            ("model", "role"),
        )
        self.cache_usage = registry.gauge(
            "kv_cache_usage_ratio",
            "Share of the KV blocks of the usable workers that are in use, 0 to 1, as they last reported.",
            model,
        )
        self.store_available = registry.gauge(
            "state_store_available",
            "1 if Redis answered the last renewal of the registration and no write waits for it, else 0.",
        )
        self.results = ResultMetrics(registry)
        self.store_unwritten = registry.gauge(
            "state_store_unwritten_requests", "Ended requests whose end is not written to Redis yet."
        )

    def _define_times(self, registry: Registry) -> None:
        model, time = ("model",), registry.histogram
        self.ttft = time(
            "time_to_first_token_seconds",
            "Time from the acceptance of a request until its first token is sent.",
            TTFT_SECONDS,
            model,
        )
        self.inter_token = time(
            "inter_token_latency_seconds", "Time between two tokens of a stream.", TOKEN_SECONDS, model
        )
        self.e2e = time(
            "e2e_request_latency_seconds", "Time from the acceptance of a request to its end.", REQUEST_SECONDS, model
        )
        self.queue = time(
            "request_queue_time_seconds",
            "Time from the acceptance of a request until a worker schedules it.",
            REQUEST_SECONDS,
            model,
        )
        self.prefill = time(
            "request_prefill_time_seconds",
            "Time from the first chunk of a prompt to the first token.",
            REQUEST_SECONDS,
            model,
        )
        self.handoff = time(
            "request_handoff_time_seconds",
            "Time from the first requested block of a request until the decode worker has its KV cache.",
            HANDOFF_SECONDS,
            model,
        )
        self.decode = time(
            "request_decode_time_seconds",
            "Time from the first decode step of a request to its last token.",
            REQUEST_SECONDS,
            model,
        )

    def of(self, model: str) -> ModelMetrics:
        """Metrics of a model. Keep the result: looking up labels costs more than counting."""
        self.adopted.labels(model)
        for cause in self._causes:  # else the first failovers of a cause would be no increase from 0
            self.failovers.labels(model, cause)
        return ModelMetrics(self, model)


class EngineMetrics:
    def __init__(self, registry: Registry, causes: Iterable[str]) -> None:
        self.info = registry.gauge(
            "worker_info", "Always 1. Its labels are the model and the role of this worker.", ("model", "role")
        )
        self.device_memory_used = registry.gauge(
            "device_memory_used_bytes", "Memory of the GPU that is in use, by all its processes; 0 on a CPU."
        )
        self.device_memory_total = registry.gauge("device_memory_total_bytes", "Memory of the GPU; 0 on a CPU.")
        self.cache_usage = registry.gauge("kv_cache_usage_ratio", "Share of the KV blocks that are in use, 0 to 1.")
        self.running = registry.gauge("requests_running", "Sequences in the batch.")
        self.waiting = registry.gauge(
            "requests_waiting", "Sequences and incoming KV caches that wait for free blocks or for their turn."
        )
        self.queued_tokens = registry.gauge(
            "queued_prompt_tokens", "Tokens of waiting and running sequences that have yet to be prefilled."
        )
        self.leases = registry.gauge(
            "handoff_leases", "Sequences whose KV blocks are kept for a decode worker to fetch."
        )
        self.generated = registry.counter("generation_tokens_total", "Tokens sampled.")
        self.preemptions = registry.counter(
            "preemptions_total", "Sequences that lost their blocks to more urgent ones and are computed again."
        )
        self.handoff_seconds = registry.histogram(
            "handoff_seconds",
            "Time from the first requested block until this worker has the KV cache.",
            HANDOFF_SECONDS,
        )
        self.handoff_bytes = registry.histogram(
            "handoff_bytes", "Bytes of KV cache that a handoff transferred.", HANDOFF_BYTES
        )
        self.adapters = registry.gauge("adapters_in_memory", "LoRA adapters that this worker has in memory.")
        self.adapter_bytes = registry.gauge("adapter_memory_bytes", "Memory of the adapters' matrices.")
        self.adapter_loads = registry.counter("adapter_loads_total", "LoRA adapters that were read into memory.")
        self.adapter_evictions = registry.counter(
            "adapter_evictions_total", "LoRA adapters that left memory for others, within --adapter-memory."
        )
        failures = registry.counter("handoff_failures_total", "Handoffs that failed, by cause.", ("cause",))
        self.handoff_failures = {cause: failures.labels(cause) for cause in causes}
        prompt = registry.counter("prompt_tokens_total", "Prompt tokens by the source of their KV cache.", ("source",))
        self.prompt = {source: prompt.labels(source.value) for source in PromptSource}
