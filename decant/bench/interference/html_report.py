from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from decant.bench.interference import report
from decant.bench.interference.configurations import SPLIT, UNCHUNKED
from decant.bench.interference.experiment import by_name
from decant.bench.interference.verdict import best_mixed
from decant.bench.machine_load import busy
from decant.bench.reports.chart import COLOURS, Axis, Chart
from decant.bench.reports.html_page import page, table

_Document = Mapping[str, Any]


def to_html(document: _Document) -> str:
    rows = document["configurations"]
    shown = dict.fromkeys((UNCHUNKED, best_mixed(rows)["name"], SPLIT))
    highest = max(gap for name in shown for _, gap in by_name(document, name)["gaps"])
    charts = [
        _over_chunks(document, "longest_gap_ms", "Longest gap of running answers"),
        _over_chunks(document, "median_gap_ms", "Median gap of running answers"),
        _over_chunks(document, "ttft_ms", "Time to first token of the prompt"),
        _tradeoff(document),
        *(_gaps(by_name(document, name), highest) for name in shown),
    ]
    head = ("", *(name for name, _, _ in report.COLUMNS))
    figures = table(report.title(document), head, [report.cells(row) for row in rows], note=report.EXPLANATION)
    title = f"decant bench interference: {document['model_id']}, {document['date']}"
    return page(title, document["sentence"], charts, [figures], note=busy(document))


def _over_chunks(document: _Document, key: str, title: str) -> Chart:
    whole = document["prompt_tokens"] + document["running"]
    mixed = [row for row in document["configurations"] if row["chunk"]]
    points = [(row["chunk"], row[key]) for row in mixed] + [(whole, by_name(document, UNCHUNKED)[key])]
    split = by_name(document, SPLIT)[key]
    chart = Chart(title, Axis("tokens per step", whole), Axis("ms", max(split, *(value for _, value in points))))
    chart.line("mixed", points, COLOURS[0])
    chart.limit(f"split {split:,.0f} ms", split)
    return chart


def _tradeoff(document: _Document) -> Chart:
    rows = document["configurations"]
    x = Axis("TTFT of the prompt, ms", max(row["ttft_ms"] for row in rows))
    chart = Chart("Longest gap against TTFT", x, Axis("longest gap, ms", max(row["longest_gap_ms"] for row in rows)))
    for row in rows:
        chart.points([(row["ttft_ms"], row["longest_gap_ms"])], COLOURS[0] if row["mixed"] else COLOURS[1])
    chart.legend({"mixed": COLOURS[0], "split": COLOURS[1]})
    return chart


def _gaps(row: _Document, highest: float) -> Chart:
    gaps: Sequence[Sequence[float]] = row["gaps"]
    begin = gaps[0][0]
    x = Axis(f"seconds (the prompt is sent at {-begin:.2g})", gaps[-1][0] - begin)
    chart = Chart(f"Gaps: {row['name']}", x, Axis("ms", highest))
    width = (gaps[-1][0] - begin) / 400
    for end, gap in gaps:
        at = end - begin
        chart.bar((at, at + width), (0, gap), COLOURS[1] if end > 0 else COLOURS[5])
    chart.legend({"before": COLOURS[5], "meanwhile": COLOURS[1]})
    return chart
