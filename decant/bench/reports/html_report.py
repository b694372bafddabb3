from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from decant.bench.benchmark import Result
from decant.bench.reports.chart import COLOURS, Axis, Chart
from decant.bench.reports.figures import percentile
from decant.bench.reports.html_page import page, table

_Run = Mapping[str, Any]

BINS = 40
_PARTS = {"router": COLOURS[5], "queue": COLOURS[1], "prefill": COLOURS[0]}
_ROWS = (
    ("completed", "completed", "{:d}"),
    ("failed", "failed", "{:d}"),
    ("requests/s", "request_throughput", "{:.3g}"),
    ("output tokens/s", "output_throughput", "{:.1f}"),
    *(
        (f"{label} {column}, ms", f"{column}_{name}_ms", "{:,.1f}")
        for label, name in (("TTFT", "ttft"), ("TPOT", "tpot"), ("ITL", "itl"), ("E2E", "e2el"))
        for column in ("mean", "p50", "p90", "p95", "p99")
    ),
)


def to_html(result: Result, slos: Mapping[str, float]) -> str:
    runs = result.runs
    charts = [_ttft_split(runs), _gaps(runs[-1])]
    if len(runs) > 1:
        charts = [
            _over_load(runs, "TTFT", "ttft", slos),
            _over_load(runs, "TPOT", "tpot", slos),
            _tradeoff(runs),
            *charts,
        ]
    if runs[-1]["ramp_to"]:
        charts.insert(0, _ramp(runs[-1]))
    charts.append(_timeline(runs[-1]))
    title = f"decant bench: {runs[0]['model_id']}, {runs[0]['date']}"
    return page(title, result.sentence, charts, [_table(runs)])


def _label(run: _Run) -> str:
    if run["max_concurrency"]:
        return f"{run['max_concurrency']} clients"
    if run["ramp_to"]:
        return f"{run['request_rate']:.3g} to {run['ramp_to']:.3g}/s"
    if run["trace"]:
        return "trace"
    return "at once" if math.isinf(run["request_rate"]) else f"{run['request_rate']:.3g}/s"


def _over_load(runs: Sequence[_Run], title: str, name: str, slos: Mapping[str, float]) -> Chart:
    highest = max(run[f"p99_{name}_ms"] for run in runs)
    chart = Chart(f"{title} over load", _rates(runs), Axis("ms", highest))
    for column, colour in zip(("p50", "p90", "p99"), COLOURS, strict=False):
        chart.line(column, [(run["request_rate"], run[f"{column}_{name}_ms"]) for run in runs], colour)
    if name in slos:
        chart.limit(f"objective {slos[name] * 1e3:g} ms", slos[name] * 1e3)
    return chart


def _rates(runs: Sequence[_Run]) -> Axis:
    return Axis("requests/s", max(run["request_rate"] for run in runs))


def _tradeoff(runs: Sequence[_Run]) -> Chart:
    x = Axis("output tokens/s", max(run["output_throughput"] for run in runs))
    chart = Chart("Throughput against latency", x, Axis("E2E, ms", max(run["p99_e2el_ms"] for run in runs)))
    for column, colour in zip(("p50", "p99"), COLOURS, strict=False):
        chart.line(column, [(run["output_throughput"], run[f"{column}_e2el_ms"]) for run in runs], colour)
    return chart


def _ttft_split(runs: Sequence[_Run]) -> Chart:
    x = Axis("runs", len(runs), [_label(run) for run in runs])
    y = Axis("mean, ms", max(run["mean_ttft_ms"] for run in runs))
    chart = Chart("Time to first token by phase", x, y)
    for index, run in enumerate(runs):
        parts = {"queue": run["mean_queue_ms"], "prefill": run["mean_prefill_ms"]}
        parts["router"] = max(0.0, run["mean_ttft_ms"] - sum(parts.values()))
        low = 0.0
        for name, value in parts.items():
            chart.bar((index + 0.2, index + 0.8), (low, low + value), _PARTS[name])
            low += value
    chart.legend(_PARTS)
    return chart


def _gaps(run: _Run) -> Chart:
    """Chart gaps up to a little above their p99, so that equal gaps are within the axis."""
    gaps = sorted(gap * 1e3 for gaps in run["itls"] for gap in gaps)
    end = Axis("ITL, ms", 1.02 * percentile(gaps, 99)).ticks[-1]
    counts = [0] * BINS
    for gap in gaps:
        if gap < end:
            counts[int(gap / end * BINS)] += 1
    share = [100 * count / max(len(gaps), 1) for count in counts]
    chart = Chart(f"Inter-token latency, {_label(run)}", Axis("ms", end), Axis("% of the gaps", max(share)))
    for index, value in enumerate(share):
        chart.bar((index * end / BINS, (index + 1) * end / BINS), (0, value), COLOURS[0])
    return chart


def _ramp(run: _Run) -> Chart:
    points = [(sent, (first - sent) * 1e3) for sent, first, _ in run["spans"]]
    x = Axis(f"seconds ({_label(run)})", max((at for at, _ in points), default=1.0))
    chart = Chart("TTFT while the rate changes", x, Axis("ms", max((value for _, value in points), default=1.0)))
    chart.points(points, COLOURS[0])
    return chart


def _timeline(run: _Run) -> Chart:
    spans = run["spans"]
    end = max((span[2] for span in spans), default=1.0)
    pools = {"prefill": [(span[0], span[1]) for span in spans], "decode": [(span[1], span[2]) for span in spans]}
    series = {name: _running(pool, end) for name, pool in pools.items()}
    highest = max((count for points in series.values() for _, count in points), default=1)
    chart = Chart(f"Requests in each pool, {_label(run)}", Axis("seconds", end), Axis("requests", highest))
    for (name, points), colour in zip(series.items(), COLOURS, strict=False):
        chart.line(name, points, colour)
    return chart


def _running(spans: Sequence[tuple[float, float]], end: float) -> list[tuple[float, float]]:
    moments = [end * index / 100 for index in range(101)]
    return [(moment, sum(begin <= moment < stop for begin, stop in spans)) for moment in moments]


def _table(runs: Sequence[_Run]) -> str:
    rows = [(label, *(form.format(run[key]) for run in runs)) for label, key, form in _ROWS]
    return table("", ("", *map(_label, runs)), rows)
