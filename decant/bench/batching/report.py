from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from decant.bench.machine_load import busy
from decant.bench.reports.console import Bars, make_table

_Document = Mapping[str, Any]

SCALED = (
    "Static batches: {measured} of {batches} are measured, the others are scaled from these by their steps. "
    "An answer of a static batch counts as done at its own last token."
)
RATIOS = (
    "Times the tokens/s and the sequences per decode step of static batches. Slots: the same by arithmetic, where "
    "prompts cost nothing and steps are equal; for these requests, and for 1,000. While a sequence's prompt is in "
    "progress it counts in no step, so that short answers to long prompts stay below the arithmetic."
)
RATIO_COLUMNS = (
    "",
    *("over longest of all: tokens/s", "per step", "slots", "of 1,000"),
    *("over own batch: tokens/s", "per step", "slots", "of 1,000"),
)


def show(document: _Document, console: Console) -> None:
    console.print(_sizes(document))
    for queue in document["queues"]:
        console.print(_queue(queue))
        console.print(scaled(queue))
    console.print(_ratios(document))
    console.print(RATIOS)
    if warning := busy(document):
        console.print(warning)
    console.print(document["sentence"])


def scaled(queue: _Document) -> str:
    first = next(iter(queue["runs"].values()))
    return SCALED.format(measured=first["measured_batches"], batches=first["batches"])


def title(queue: _Document) -> str:
    return (
        f"{queue['name']}: {queue['requests']} requests, prompts of {queue['prompt_tokens']} tokens, KV memory for "
        f"{queue['kv_tokens']:,}, static batches of {queue['batch_size']}"
    )


_Cell = Callable[[Mapping[str, Any]], str]

COLUMNS: Sequence[tuple[str, _Cell]] = (
    ("tokens/s", lambda run: f"{run['output_throughput']:,.0f}"),
    ("latency p50, s", lambda run: f"{run['p50_latency_ms'] / 1e3:.3g}"),
    ("p99, s", lambda run: f"{run['p99_latency_ms'] / 1e3:.3g}"),
    ("ITL p50, ms", lambda run: f"{run['p50_itl_ms']:.1f}"),
    ("longest, ms", lambda run: f"{run['max_itl_ms']:.0f}"),
    ("sequences per step", lambda run: f"{run['useful_per_step']:.1f}"),
    ("KV memory used", lambda run: f"{run['kv_used']:.0%}"),
)
"""Title and cell."""


def ratio_rows(document: _Document) -> list[tuple[str, ...]]:
    keys = ("throughput", "useful_per_step", "slots", "slots_of_1000")
    return [
        (queue["name"], *(f"{queue[over][key]:.1f}" for over in ("over_all", "over_batch") for key in keys))
        for queue in document["queues"]
    ]


def _sizes(document: _Document) -> Table:
    table = make_table("sequences that decode together", ("batch size", "TPOT, ms", "tokens/s", "E2E, ms"))
    for one in document["batch_sizes"]:
        cells = f"{one['tpot_ms']:.2f}", f"{one['output_throughput']:,.0f}", f"{one['e2el_ms']:,.0f}"
        table.add_row(str(one["batch_size"]), *cells)
    return table


def _queue(queue: _Document) -> Table:
    table = make_table(title(queue), ("", *(name for name, _ in COLUMNS)))
    for contender, run in queue["runs"].items():
        table.add_row(contender, *(cell(run) for _, cell in COLUMNS))
    return table


def _ratios(document: _Document) -> Table:
    table = make_table("continuous, paged, against static batches", RATIO_COLUMNS)
    for row in ratio_rows(document):
        table.add_row(*row)
    return table


class TokenProgress(Bars):
    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
        super().__init__(console, *columns, TextColumn("{task.fields[live]}"))
        self._bar: tuple[str, TaskID] | None = None
        self._began = self._tokens = 0.0

    def notify(self, name: str, tokens: int, total: int) -> None:
        if self._bar is None or self._bar[0] != name:
            self._bar = name, self.progress.add_task(name, total=total, live="")
            self._began, self._tokens = time.monotonic(), 0
        self._tokens += tokens
        rate = self._tokens / max(time.monotonic() - self._began, 1e-9)
        self.progress.update(self._bar[1], completed=self._tokens, live=f"{rate:,.0f} tokens/s")
