"""docs/reference/metrics.md: the metrics of each process, from the classes that define them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from prometheus_client import Counter, Gauge, Histogram

from decant.protos import worker_pb2 as wire
from decant.runtime import metrics
from decant.runtime.errors import FaultOwner
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
| Does the service fail? | `sum(rate(decant_errors_total{blame="server"}[5m]))` |
| Is a worker missing? | `min by (model, role) (decant_ready_workers)` |
| Do requests wait? | `sum by (job) (decant_requests_waiting)` |
| Is a KV cache full? | `max(decant_kv_cache_usage_ratio)` |
| Do handoffs fail? | `sum by (cause) (rate(decant_handoff_failures_total[5m]))` |"""


class Defined(NamedTuple):
    """One metric as a process defines it."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str


class Recorder(metrics.Registry):
    """A registry that notes what is defined in it."""

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
    causes = [name.removeprefix("CAUSE_").lower() for name, _ in wire.Cause.items()]
    parts = [head("Metrics", "runtime/metrics.py"), INTRO]
    parts += ["## Every process", _table(metrics.ProcessMetrics)]
    parts += ["## Router", _table(metrics.RequestMetrics)]
    parts += ["## Workers", _table(lambda registry: metrics.EngineMetrics(registry, causes))]
    parts += ["## Labels", table(("label", "values"), _labels(causes)), WATCH]
    return page(parts)


def _table(define: Callable[[metrics.Registry], Any]) -> str:
    registry = Recorder()
    define(registry)
    rows = [
        (code(metric.name), metric.kind, ", ".join(map(code, metric.labels)), sentence(metric.text))
        for metric in registry.defined
    ]
    return table(("metric", "type", "labels", ""), rows)


def _labels(causes: Iterable[str]) -> list[tuple[str, str]]:
    return [
        ("`reason`", "[reasons of errors](errors.md#reasons) in lower case"),
        ("`code`", "gRPC status"),
        ("`blame`", ", ".join(code(blame.value) for blame in FaultOwner)),
        ("`model`", "models that the router serves"),
        ("`role`", "`prefill`, `decode`"),
        ("`source`", ", ".join(code(source.value) for source in metrics.PromptSource)),
        ("`cause`", ", ".join(map(code, causes))),
    ]
