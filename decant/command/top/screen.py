from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from decant.command.status import safe_text
from decant.command.top.figures import (
    DECODE,
    PREFILL,
    ROUTER,
    ProcessFigures,
    RouterFigures,
    Snapshot,
    WorkerFigures,
)

WIDE = 120
"""Columns for all figures."""
_LISTED = 20
"""Requests, without a terminal."""
_AROUND_REQUESTS = 3
"""Number, table head and remainder."""
_BAR = 8
_FULL, _BUSY = 0.95, 0.8
_GOOD, _WARNING, _BAD = "green", "yellow", "red"


def render(snapshot: Snapshot, width: int, height: int | None) -> RenderableType:
    is_wide = width >= WIDE
    parts: list[RenderableType] = [_title(snapshot), Text()]
    tables = [_models(snapshot, is_wide), _routers(snapshot, is_wide), _workers(snapshot, is_wide)]
    for table in tables:
        if table.row_count:
            parts += [table, Text()]
    problems = [
        safe_text(f"{one.name}: {one.state}", _BAD) for one in snapshot.processes if one.state != _short(one.state)
    ]
    parts += [*problems, Text()] if problems else []
    used = sum(table.row_count for table in tables) + len(parts)
    listed = _LISTED if height is None else max(0, height - used - _AROUND_REQUESTS)
    return Group(*parts, *_requests(snapshot, listed, is_wide))


def _title(snapshot: Snapshot) -> Text:
    window = max((one.figures.window_s for one in snapshot.processes if one.figures), default=0.0)
    title = Text.assemble(("decant top", "bold"), f"  {time.strftime('%H:%M:%S')}  {snapshot.title}")
    return title.append(f"  rates of the last {window:.0f} s", "dim")


def _table(first: str, *columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(first, no_wrap=True, overflow="ellipsis")
    for column in columns:
        is_text = column in ("state", "KV in use", "store", "workers", "tenant", "model", "id")
        table.add_column(column, justify="left" if is_text else "right", no_wrap=True, overflow="ellipsis")
    return table


def _add_row(table: Table, *cells: str | Text) -> None:
    table.add_row(*(safe_text(cell) if isinstance(cell, str) else cell for cell in cells))


def _models(snapshot: Snapshot, is_wide: bool) -> Table:
    names = ["req/s", "tokens/s", "TTFT p50", "p99", "TPOT", "ITL p99", "run", "wait"]
    more = ["TTFT mean", "prompt/s", "cached", "oldest", "refused/s", "failovers/s"] if is_wide else []
    table = _table("model", *names, *more)
    for one in snapshot.models:
        cells = [_rate(one.requests_per_s), _rate(one.output_tokens_per_s), _time(one.ttft.p50), _time(one.ttft.p99)]
        cells += [_time(one.itl.mean), _time(one.itl.p99), f"{one.running:.0f}", f"{one.waiting:.0f}"]
        if is_wide:
            cached = "-" if one.cached_share is None else f"{one.cached_share:.0%}"
            cells += [_time(one.ttft.mean), _rate(one.prompt_tokens_per_s), cached]
            oldest = _time(one.oldest_waiting_s) if one.waiting else "-"
            cells += [oldest, _rate(one.refused_per_s), _rate(one.failovers_per_s)]
        _add_row(table, one.model, *cells)
    return table


def _routers(snapshot: Snapshot, is_wide: bool) -> Table:
    more = ["not stored", "errors/s"] if is_wide else []
    table = _table("router", "state", "store", "run", "wait", "req/s", "tokens/s", "CPU", *more)
    for one in snapshot.of(ROUTER):
        figures = one.figures
        cells: list[str | Text] = []
        if isinstance(figures, RouterFigures):
            is_up = figures.is_store_available
            cells = [Text("ok" if is_up else "unavailable", _GOOD if is_up else _BAD), f"{figures.running:.0f}"]
            cells += [f"{figures.waiting:.0f}", _rate(figures.requests_per_s), _rate(figures.output_tokens_per_s)]
            cells += [f"{figures.cpu_cores:.0%}"]
            cells += [f"{figures.unwritten:.0f}", _rate(figures.errors_per_s)] if is_wide else []
        _add_row(table, one.name, _state(one), *cells)
    return table


def _workers(snapshot: Snapshot, is_wide: bool) -> Table:
    names = ["state", "KV in use", "run", "wait", "queued", "prefill/s", "tokens/s"]
    table = _table("worker", *names, *(["CPU", "leases", "KV MB/s", "preempt/s", "model"] if is_wide else []))
    for role, title in ((PREFILL, "prefill"), (DECODE, "decode"), ("", "other")):
        workers = snapshot.of(role)
        if workers:
            table.add_row(Text(title, "dim"))
        for one in workers:
            _add_row(table, f" {one.name}", _state(one), *_worker_cells(one, is_wide))
    return table


def _worker_cells(one: ProcessFigures, is_wide: bool) -> list[str | Text]:
    figures = one.figures
    if not isinstance(figures, WorkerFigures):
        return []
    cells: list[str | Text] = [_bar(figures.kv_usage), f"{figures.running:.0f}", f"{figures.waiting:.0f}"]
    cells += [f"{figures.queued_prompt_tokens:,.0f}", _rate(figures.prefill_tokens_per_s)]
    cells += [_rate(figures.output_tokens_per_s)]
    if is_wide:
        cells += [f"{figures.cpu_cores:.0%}", f"{figures.handoff_leases:.0f}", _rate(figures.handoff_bytes_per_s / 1e6)]
        cells += [_rate(figures.preemptions_per_s), figures.model]
    return cells


def _requests(snapshot: Snapshot, listed: int, is_wide: bool) -> Iterator[RenderableType]:
    states = Counter(one["state"] for one in snapshot.requests)
    counts = ", ".join(f"{count} {state}" for state, count in states.most_common())
    yield Text.assemble((f"requests in flight: {snapshot.requests_in_flight}", "bold"), f"  {counts}")
    shown = snapshot.requests[:listed]
    if not shown:
        return
    table = _table("age", "state", "prompt", "output", *(["attempt", "workers", "tenant"] if is_wide else []), "id")
    for one in shown:
        more = []
        if is_wide:
            used = [one["prefill_worker"], one["decode_worker"]]
            more = [str(one["attempt"]), " -> ".join(name for name in used if name), one["tenant"]]
        lengths = [f"{one['prompt_tokens']:,}", f"{one['output_tokens']:,}"]
        _add_row(table, _time(one["age_s"]), one["state"], *lengths, *more, one["id"])
    yield table
    if hidden := snapshot.requests_in_flight - len(shown):
        yield Text(f"and {hidden} more, which are younger", "dim")


def _state(one: ProcessFigures) -> Text:
    state = _short(one.state)
    is_bad = one.figures is None and (state.startswith(("lost", "no answer", "failed")))
    return safe_text(state, _GOOD if state == "ready" else _BAD if is_bad else _WARNING)


def _short(state: str) -> str:
    return re.split("[:,]", state)[0]


def _bar(share: float) -> Text:
    filled = min(_BAR, round(share * _BAR + 0.49)) if share else 0
    color = _BAD if share > _FULL else _WARNING if share > _BUSY else _GOOD
    return Text.assemble(("█" * filled, color), ("░" * (_BAR - filled), "dim"), f" {share:4.0%}")


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.2f} s" if seconds < 100 else f"{seconds:,.0f} s"
