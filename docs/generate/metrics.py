from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from prometheus_client import Counter, Gauge, Histogram

from decant.protos import worker_pb2 as wire
from decant.runtime.enum_names import enum_labels
from decant.runtime.errors import FaultOwner
from decant.runtime.telemetry import metrics, usage_metrics
from docs.generate.markdown import code, head, page, sentence, table

INTRO = """\
Each process serves its metrics in Prometheus' text format at `/metrics` of its `--admin-port`, with the CPU time,
memory and open files of the process (`process_*`). Counters only grow. Times are in seconds, sizes in bytes. Labels
have few values; ids of requests are never among them."""
WATCH = """\
## What to watch

| question | query |
| --- | --- |
| Are answers slow? | `histogram_quantile(0.99, sum by (le) (rate(decant_time_to_first_token_seconds_bucket[5m])))` |
| Does the service fail? | `sum(rate(decant_errors_total{fault_owner="server"}[5m]))` |
| Is a worker missing? | `min by (model, role) (decant_ready_workers)` |
| Do requests wait? | `sum by (job) (decant_requests_waiting)` |
| How many seconds of prefill wait? | `sum by (model) (decant_waiting_prompt_seconds)` |
| Are requests refused? | `sum by (model, reason) (rate(decant_requests_refused_total[5m]))` |
| Is a KV cache full? | `max(decant_kv_cache_usage_ratio)` |
| Does prefix caching help? | `sum(rate(decant_prompt_tokens_total{source="local_cache_hit"}[5m]))` |
| Do attempts fail? | `sum by (model, cause) (rate(decant_failovers_total[5m]))` |
| Do handoffs fail? | `sum by (cause) (rate(decant_handoff_failures_total[5m]))` |"""

SCALE = """\
## Scale a pool by its queue

`decant_waiting_prompt_seconds` is the work that waits for the prefill workers of a model: divided by the seconds that a
prompt may wait, it is the number of workers to add. A worker's own gauges can't wake a pool at zero; the router's can.
Scale a model from zero on

    sum by (model) (decant_requests_waiting{model!=""}) > 0

where routers have `--worker-wait-seconds`: a request of a model without workers then waits for a first one. Without it
a router refuses such requests with NO_WORKER, which clients retry:

    sum by (model) (increase(decant_requests_refused_total{reason="no_worker"}[1m])) > 0

[Kubernetes](../guides/kubernetes.md#scale-by-load) has autoscalers for both pools."""


CAUSES = enum_labels(wire.Cause)

Define = Callable[[metrics.Registry], Any]

DEFINITIONS: Mapping[str, Define] = {
    "Every process": metrics.ProcessMetrics,
    "Router": metrics.RequestMetrics,
    "Workers": lambda registry: metrics.EngineMetrics(registry, CAUSES),
}


class Defined(NamedTuple):
    name: str
    kind: str
    labels: tuple[str, ...]
    text: str


class Recorder(metrics.Registry):
    def __init__(self) -> None:
        super().__init__(process=False)
        self.defined: list[Defined] = []

    def counter(self, name: str, words: str, labels: Iterable[str] = ()) -> Counter:
        self._note(name, "counter", words, labels)
        return super().counter(name, words, labels)

    def gauge(self, name: str, words: str, labels: Iterable[str] = ()) -> Gauge:
        self._note(name, "gauge", words, labels)
        return super().gauge(name, words, labels)

    def histogram(self, name: str, words: str, buckets: tuple[float, ...], labels: Iterable[str] = ()) -> Histogram:
        self._note(name, "histogram", words, labels)
        return super().histogram(name, words, buckets, labels)

    def _note(self, name: str, kind: str, words: str, labels: Iterable[str]) -> None:
        self.defined.append(Defined(f"{metrics.PREFIX}_{name}", kind, tuple(labels), words))


def render() -> str:
    parts = [head("Metrics", "runtime/telemetry/metrics.py"), INTRO]
    for title, define in DEFINITIONS.items():
        parts += [f"## {title}", _table(define)]
    parts += ["## Labels", table(("label", "values"), _labels(CAUSES)), WATCH, SCALE]
    return page(parts)


def all_metrics() -> list[Defined]:
    """Metrics of all processes; a name may occur twice."""
    return [metric for define in DEFINITIONS.values() for metric in _defined(define)]


def _defined(define: Define) -> list[Defined]:
    registry = Recorder()
    define(registry)
    return registry.defined


def _table(define: Define) -> str:
    rows = [
        (code(metric.name), metric.kind, ", ".join(map(code, metric.labels)), sentence(metric.text))
        for metric in _defined(define)
    ]
    return table(("metric", "type", "labels", ""), rows)


def _labels(causes: Iterable[str]) -> list[tuple[str, str]]:
    return [
        (
            "`reason`",
            "[reasons of errors](errors.md#reasons) in lower case; of refusals only "
            + ", ".join(code(reason.value.lower()) for reason in metrics.REFUSALS),
        ),
        ("`code`", "gRPC status"),
        ("`fault_owner`", ", ".join(code(owner.value) for owner in FaultOwner)),
        ("`model`", "models that the router serves"),
        (
            "`tenant`",
            f"tenants of `--credentials`: the first {usage_metrics.MAX_TENANTS} of the file, then "
            f"`{usage_metrics.OTHER_TENANTS}`; `default` without the file",
        ),
        (
            "`adapter`",
            f"names of adapters: the first {usage_metrics.MAX_ADAPTERS} that requests use, then "
            f"`{usage_metrics.OTHER_ADAPTERS}`",
        ),
        (
            "`outcome`",
            "`stop`, `length`, `context_length`, `left` (the client left before the end), or the reason of an error",
        ),
        ("`role`", "`prefill`, `decode`"),
        ("`source`", ", ".join(code(source.value) for source in metrics.PromptSource)),
        ("`cause`", ", ".join(map(code, causes))),
    ]
