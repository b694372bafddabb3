"""Rates and distributions of the last minute.

sample    sample    sample    sample          oldest dropped when another is at least as old as the window
|------------------ Window ----------|        counters: difference / seconds; histograms: difference of buckets
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

WINDOW_S = 60.0

_Key = tuple[str, frozenset[tuple[str, str]]]
"""Name and labels of a series."""

_START = "process_start_time_seconds"


@dataclass(frozen=True)
class Sample:
    at: float
    series: Mapping[_Key, float]

    @classmethod
    def parse(cls, at: float, text: str) -> Sample:
        """Parse Prometheus' text format. Raises ValueError."""
        families = text_string_to_metric_families(text)
        return cls(
            at, {(one.name, frozenset(one.labels.items())): one.value for family in families for one in family.samples}
        )

    def matching(self, name: str, **labels: str) -> Iterator[tuple[dict[str, str], float]]:
        for (series, series_labels), value in self.series.items():
            if series == name and labels.items() <= series_labels:
                yield dict(series_labels), value

    def total(self, name: str, **labels: str) -> float:
        return sum(value for _, value in self.matching(name, **labels))

    def has(self, name: str) -> bool:
        return next(self.matching(name), None) is not None

    def label_values(self, name: str, label: str) -> set[str]:
        return {labels[label] for labels, _ in self.matching(name) if label in labels}


@dataclass(frozen=True)
class Distribution:
    """Histogram; ``buckets`` are cumulative, by bound."""

    count: float = 0.0
    sum: float = 0.0
    buckets: Mapping[float, float] = field(default_factory=dict)

    def __add__(self, other: Distribution) -> Distribution:
        if not self.count or not other.count:
            return self if self.count else other
        both = {bound: self.buckets[bound] + other.buckets[bound] for bound in self.buckets.keys() & other.buckets}
        return Distribution(self.count + other.count, self.sum + other.sum, both)

    @property
    def mean(self) -> float | None:
        return self.sum / self.count if self.count else None

    def quantile(self, share: float) -> float | None:
        """Interpolate within a bucket, as PromQL's histogram_quantile; at most the last finite bound."""
        if not self.count:
            return None
        rank, low, below = share * self.count, 0.0, 0.0
        for bound, upto in sorted(self.buckets.items()):
            if upto >= rank and upto > below:
                return low if math.isinf(bound) else low + (bound - low) * (rank - below) / (upto - below)
            if not math.isinf(bound):
                low = bound
            below = upto
        return low


@dataclass(frozen=True)
class Window:
    first: Sample
    last: Sample

    @property
    def seconds(self) -> float:
        return self.last.at - self.first.at

    def increase(self, name: str, **labels: str) -> float:
        return self.last.total(name, **labels) - self.first.total(name, **labels)

    def rate(self, name: str, **labels: str) -> float:
        return self.increase(name, **labels) / self.seconds if self.seconds else 0.0

    def distribution(self, name: str, **labels: str) -> Distribution:
        bounds = self.last.label_values(f"{name}_bucket", "le")
        buckets = {float(bound): self.increase(f"{name}_bucket", le=bound, **labels) for bound in bounds}
        return Distribution(self.increase(f"{name}_count", **labels), self.increase(f"{name}_sum", **labels), buckets)


class History:
    """Samples of one process; a restart begins a new history."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque()

    def add(self, sample: Sample) -> None:
        samples = self._samples
        if samples and samples[-1].total(_START) != sample.total(_START):
            samples.clear()
        samples.append(sample)
        while len(samples) > 2 and sample.at - samples[1].at >= WINDOW_S:
            samples.popleft()

    @property
    def window(self) -> Window | None:
        return Window(self._samples[0], self._samples[-1]) if self._samples else None
