from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from decant.bench.benchmark import Result
from decant.bench.records import Record
from decant.bench.reports.console import Bars, make_table

LATENCIES = (("TTFT", "ttft"), ("TPOT", "tpot"), ("ITL", "itl"), ("second token", "second_token"), ("E2E", "e2el"))
PARTS = (("queue", "queue"), ("prefill", "prefill"), ("handoff", "handoff"), ("decode wait", "decode_wait"))
_COLUMNS = ("mean", "p50", "p90", "p95", "p99")


def to_json(result: Result) -> str:
    runs = [{**run, "request_rate": _rate(run["request_rate"])} for run in result.runs]
    document = runs[0] if len(runs) == 1 else {"runs": runs}
    return dump({**document, "sentence": result.sentence})


def dump(document: Mapping[str, Any]) -> str:
    return json.dumps(document, allow_nan=False)


def _rate(rate: float) -> float | str:
    return "inf" if math.isinf(rate) else rate


def show(result: Result, console: Console) -> None:
    if len(result.runs) == 1:
        run = result.runs[0]
        console.print(_totals(run))
        console.print(_latencies("milliseconds, client", LATENCIES, run))
        console.print(_latencies("milliseconds, receipts", PARTS, run))
        for reason, count in run["errors_by_reason"].items():
            console.print(f"{count} failed: {reason}")
        if run["p99_send_lag_ms"] > _LATE_MS:
            console.print(f"requests were sent late (p99 {run['p99_send_lag_ms']:.0f} ms): this client is too slow")
    else:
        console.print(_sweep(result.runs))
        console.print(f"seed {result.runs[0]['seed']}")
    console.print(result.sentence)


_LATE_MS = 50.0


def _totals(run: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    cached = f", {run['total_cached_tokens']:,} of them cached" if run["total_cached_tokens"] else ""
    unsent = f", {run['not_sent']} not sent" if run["not_sent"] else ""
    counts = f"{run['completed']} completed, {run['failed']} failed{unsent}"
    table.add_row("requests", f"{counts}, in {run['duration']:.1f} s")
    table.add_row(
        "tokens", f"{run['total_input_tokens']:,} of prompts{cached}, {run['total_output_tokens']:,} of output"
    )
    rates = f"{run['request_throughput']:.3g} requests/s, {run['output_throughput']:.1f} output tokens/s"
    table.add_row("seed", str(run["seed"]))
    table.add_row("throughput", f"{rates}, {run['total_token_throughput']:.1f} with prompts")
    table.add_row("output tokens/s of a request", f"{run['mean_tps']:.1f} mean, {run['p50_tps']:.1f} p50")
    if run["request_goodput"] is not None:
        share = f"{run['slo_attainment']:.0%} of the requests meet the objectives"
        table.add_row("goodput", f"{run['request_goodput']:.3g} requests/s: {share}")
    return table


def _latencies(title: str, rows: Sequence[tuple[str, str]], run: Mapping[str, Any]) -> Table:
    table = make_table(title, ("", *_COLUMNS))
    for label, name in rows:
        table.add_row(label, *(f"{run[f'{column}_{name}_ms']:,.1f}" for column in _COLUMNS))
    return table


def _sweep(runs: Sequence[Mapping[str, Any]]) -> Table:
    columns = ("requests/s", "done/s", "goodput", "tokens/s", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99", "failed")
    table = make_table("milliseconds, by rate", columns)
    for run in runs:
        names = ("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms")
        rates = (run["request_rate"], run["request_throughput"], run["request_goodput"])
        cells = [*(f"{rate:.3g}" for rate in rates), f"{run['output_throughput']:.1f}"]
        table.add_row(*cells, *(f"{run[name]:,.1f}" for name in names), str(run["failed"]))
    return table


class LiveProgress(Bars):
    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        super().__init__(console, *columns, TextColumn("{task.fields[live]}"))
        self._bars: dict[str, TaskID] = {}
        self._began = self._tokens = 0.0
        self._failed = 0

    def notify(self, name: str, record: Record | None, count: int) -> None:
        if name not in self._bars:
            self._bars[name] = self.progress.add_task(name, total=count, live="")
            self._began, self._tokens, self._failed = time.monotonic(), 0, 0
        if record is None:
            return
        self._tokens += len(record.tokens)
        self._failed += bool(record.error)
        rate = self._tokens / max(time.monotonic() - self._began, 1e-9)
        live = f"{rate:.0f} tokens/s" + (f", {self._failed} failed" if self._failed else "")
        live += f", TTFT {record.ttft * 1e3:.0f} ms" if record.tokens else ""
        self.progress.update(self._bars[name], advance=1, live=live)
