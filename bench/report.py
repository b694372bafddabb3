"""The report of ``bench.engine`` for people: one table, one bar for each contender."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table

BAR = 40
"""Columns of the longest bar."""

NAMES = {"decant": "Decant", "static": "transformers, static batches"}

LINES = (
    ("output tokens/s", "output_throughput", "{:.1f}"),
    ("requests/s", "request_throughput", "{:.2f}"),
    ("duration, s", "duration", "{:.1f}"),
    ("TTFT median, ms", "median_ttft_ms", "{:,.0f}"),
    ("TTFT p99, ms", "p99_ttft_ms", "{:,.0f}"),
    ("TPOT median, ms", "median_tpot_ms", "{:,.1f}"),
    ("TPOT p99, ms", "p99_tpot_ms", "{:,.1f}"),
    ("ITL median, ms", "median_itl_ms", "{:,.1f}"),
    ("ITL p99, ms", "p99_itl_ms", "{:,.1f}"),
    ("ITL longest, ms", "max_itl_ms", "{:,.0f}"),
    ("E2E median, ms", "median_e2el_ms", "{:,.0f}"),
    ("E2E p99, ms", "p99_e2el_ms", "{:,.0f}"),
    ("steps", "steps", "{:,}"),
    ("useful sequences per step", "mean_batch", "{:.1f}"),
    ("step mean, ms", "mean_step_ms", "{:,.1f}"),
    ("outside the model, a step, median ms", "median_outside_model_ms", "{:.2f}"),
    ("outside the model, a step, p99 ms", "p99_outside_model_ms", "{:.2f}"),
    ("peak memory, GB", "peak_rss_gb", "{:.2f}"),
)


def show(result: Mapping[str, Any], console: Console) -> None:
    """Print a result of ``bench.engine``."""
    contenders = result["contenders"]
    console.print(
        Panel(
            Group(_table(contenders), "", *_bars(contenders), "", *_notes(result)),
            title=f"{result['model_id']}, {result['workload']}, {result['dtype']}, {result['threads']} threads",
        )
    )


def _table(contenders: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for name in contenders:
        table.add_column(NAMES.get(name, name), justify="right")
    for label, key, form in LINES:
        values = [figures.get(key) for figures in contenders.values()]
        if any(value is not None for value in values):
            table.add_row(label, *("" if value is None else form.format(value) for value in values))
    return table


def _bars(contenders: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Output tokens per second, drawn to one scale."""
    rates = {name: figures["output_throughput"] for name, figures in contenders.items()}
    width = max(len(NAMES.get(name, name)) for name in rates)
    highest = max(rates.values())
    return [
        f"{NAMES.get(name, name):{width}} {'█' * max(1, round(BAR * rate / highest))} {rate:.1f} tok/s"
        for name, rate in rates.items()
    ]


def _notes(result: Mapping[str, Any]) -> list[str]:
    notes = []
    if "ratio" in result:
        notes.append(f"Decant writes {result['ratio']['output_throughput']:.2f} times as many tokens a second.")
    static = result["contenders"].get("static")
    if static and static["measured_batches"] < static["batches"]:
        measured, whole = static["measured_batches"], static["batches"]
        notes.append(
            f"{measured} of {whole} static batches were run; the others are predicted from them, by their padded"
            " prompt tokens and by their steps."
        )
    runs = max(len(figures["runs"]) for figures in result["contenders"].values())
    if runs > 1:
        notes.append(f"Figures are those of the run of median throughput, of {runs} runs in alternation.")
    if "limits" in result:
        limits = result["limits"]
        notes.append(
            f"Limits in the same run: reads {limits['read_bandwidth_gb_s']:.1f} GB/s, packed products"
            f" {limits['product_rate_gflop_s']:.0f} GFLOP/s."
        )
    machine = result["machine"]
    flags = [flag for flag, present in machine["flags"].items() if present]
    notes.append(
        f"{machine['cpu']} ({' '.join(flags)}), {machine['cores']} cores, load {machine['load_average'][0]:.1f}"
        f" at the start, torch {machine['torch']}, transformers {machine['transformers']}."
    )
    return notes
