from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from decant.bench.batching import report
from decant.bench.batching.contenders import PAGED, RESERVING, STATIC_ALL, STATIC_BATCH
from decant.bench.machine_load import busy
from decant.bench.reports.chart import COLOURS, Axis, Chart
from decant.bench.reports.html_page import page, table

_Document = Mapping[str, Any]

PROMPT, ANSWER, PADDING = COLOURS[5], COLOURS[0], "#f1b0a0"


def to_html(document: _Document) -> str:
    queues = document["queues"]
    charts = [
        _curve(document, "tpot_ms", "TPOT over batch size", "ms"),
        _curve(document, "output_throughput", "Throughput over batch size", "output tokens/s"),
        *(timeline(queues[0], contender) for contender in (STATIC_ALL, STATIC_BATCH, RESERVING, PAGED)),
        *(_bars(queue, "output_throughput", 1.0, "output tokens/s") for queue in queues[:2]),
        *(_bars(queue, "p50_latency_ms", 1e-3, "p50 latency, s") for queue in queues[:2]),
        *(_ratio(document, over, label) for over, label in _STATIC),
    ]
    tables = [table(report.title(queue), *_rows(queue), note=report.scaled(queue)) for queue in queues]
    heading = "Continuous, paged, against static batches"
    tables.append(table(heading, report.RATIO_COLUMNS, report.ratio_rows(document), note=report.RATIOS))
    title = f"decant bench batching: {document['model_id']}, {document['date']}"
    return page(title, document["sentence"], charts, tables, note=busy(document))


_STATIC = (("over_all", "padded to the longest of all"), ("over_batch", "padded to their batch"))


def timeline(queue: _Document, contender: str) -> Chart:
    spans = queue["spans"][contender]
    slots = assign_slots(spans)
    chart = Chart(
        f"Slots: {contender}",
        Axis(f"seconds ({queue['name']})", max(span[3] for span in spans)),
        Axis("slot", max(slots) + 1),
    )
    for (begun, first, last, freed), slot in zip(spans, slots, strict=True):
        y = slot + 0.1, slot + 0.9
        chart.bar((begun, first), y, PROMPT)
        chart.bar((first, last), y, ANSWER)
        if freed > last:
            chart.bar((last, freed), y, PADDING)
    chart.legend({"padding": PADDING, "answer": ANSWER, "prompt": PROMPT})
    return chart


def assign_slots(spans: Sequence[Sequence[float]]) -> list[int]:
    free_at: list[float] = []
    slots = [0] * len(spans)
    for index in sorted(range(len(spans)), key=lambda index: (spans[index][0], index)):
        begun, freed = spans[index][0], spans[index][3]
        slot = next((slot for slot, at in enumerate(free_at) if at <= begun), len(free_at))
        free_at[slot : slot + 1] = [freed]
        slots[index] = slot
    return slots


def _curve(document: _Document, key: str, title: str, unit: str) -> Chart:
    points = [(one["batch_size"], one[key]) for one in document["batch_sizes"]]
    x = Axis("sequences", max(size for size, _ in points))
    chart = Chart(title, x, Axis(unit, max(value for _, value in points)))
    chart.line(unit, points, COLOURS[0])
    return chart


def _bars(queue: _Document, key: str, scale: float, unit: str) -> Chart:
    values = {name: run[key] * scale for name, run in queue["runs"].items()}
    x = Axis("", len(values), _SHORT[: len(values)])
    chart = Chart(f"{unit}: {queue['name']}", x, Axis(unit, max(values.values())))
    for index, value in enumerate(values.values()):
        chart.bar((index + 0.1, index + 0.9), (0, value), COLOURS[index])
    return chart


_SHORT = ("longest of all", "own batch", "reserving", "paged", "separate prefill")


def _ratio(document: _Document, over: str, label: str) -> Chart:
    queues = document["queues"][2:]
    keys = {"tokens/s": "throughput", "per step": "useful_per_step", "slots": "slots", "slots, 1,000": "slots_of_1000"}
    highest = max(queue[over][key] for queue in queues for key in keys.values())
    x = Axis("longest answer", max(queue["limit"] for queue in queues))
    chart = Chart(f"Continuous over static batches, {label}", x, Axis("times", highest))
    for (name, key), colour in zip(keys.items(), COLOURS, strict=False):
        chart.line(name, [(queue["limit"], queue[over][key]) for queue in queues], colour)
    return chart


def _rows(queue: _Document) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    head = ("", *(name for name, _ in report.COLUMNS))
    return head, [(name, *(cell(run) for _, cell in report.COLUMNS)) for name, run in queue["runs"].items()]
