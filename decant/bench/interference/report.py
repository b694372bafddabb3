from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

from decant.bench.machine_load import busy
from decant.bench.reports.console import Bars, make_table

_Document = Mapping[str, Any]

COLUMNS = (
    ("longest gap, ms", "longest_gap_ms", "{:,.1f}"),
    ("worst of all trials", "worst_gap_ms", "{:,.1f}"),
    ("median gap, ms", "median_gap_ms", "{:,.1f}"),
    ("median before", "median_gap_before_ms", "{:,.1f}"),
    ("TTFT of the prompt, ms", "ttft_ms", "{:,.0f}"),
    ("tokens/s", "output_throughput", "{:,.1f}"),
    ("tokens/s before", "output_throughput_before", "{:,.1f}"),
)
"""Title, key and format."""

EXPLANATION = (
    "Gaps and tokens/s are those of the running answers, from the send of the prompt to its second token; medians of "
    "the trials. Each deployment has the same cores."
)


def title(document: _Document) -> str:
    return (
        f"{document['running']} running answers, a prompt of {document['prompt_tokens']:,} tokens, "
        f"{document['trials']} trials, {document['cores']} cores"
    )


def cells(row: _Document) -> tuple[str, ...]:
    return row["name"], *(form.format(row[key]) for _, key, form in COLUMNS)


def show(document: _Document, console: Console) -> None:
    table = make_table(title(document), ("", *(name for name, _, _ in COLUMNS)))
    for row in document["configurations"]:
        table.add_row(*cells(row))
    console.print(table)
    console.print(EXPLANATION)
    if warning := busy(document):
        console.print(warning)
    console.print(document["sentence"], soft_wrap=True)


class PartProgress(Bars):
    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
        super().__init__(console, *columns, TimeElapsedColumn())
        self._task = self.progress.add_task("")

    def notify(self, what: str, done: int, parts: int) -> None:
        self.progress.update(self._task, description=what, completed=done, total=parts)
