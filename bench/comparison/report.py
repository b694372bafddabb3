from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from bench.comparison.contenders import DECANT, title_of
from bench.comparison.table import limits_of, workloads_of

BAR = 40

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
    ("ITL longest once the last came, ms", "max_itl_after_last_ms", "{:,.0f}"),
    ("TTFT of the last to come, ms", "last_ttft_ms", "{:,.0f}"),
    ("E2E median, ms", "median_e2el_ms", "{:,.0f}"),
    ("E2E p99, ms", "p99_e2el_ms", "{:,.0f}"),
    ("steps", "steps", "{:,}"),
    ("useful sequences per step", "mean_batch", "{:.1f}"),
    ("step mean, ms", "mean_step_ms", "{:,.1f}"),
    ("outside the model, a step, median ms", "median_outside_model_ms", "{:.2f}"),
    ("outside the model, a step, p99 ms", "p99_outside_model_ms", "{:.2f}"),
    ("peak memory, GB", "peak_rss_gb", "{:.2f}"),
)

BRIEF = ("output_throughput", "median_ttft_ms", "median_itl_ms", "max_itl_after_last_ms", "last_ttft_ms")

PARTS = {
    "linears": "linear layers",
    "attention": "attention",
    "other": "norms, rotary, activation, other",
    "outside": "outside the model",
}


def show(result: Mapping[str, Any], console: Console) -> None:
    parts: list[RenderableType] = []
    if "lines" in result:
        parts += [limits_table(result["lines"]), "", profile_table(result["steps"]), ""]
    for name, workload in workloads_of(result).items():
        parts += [f"[bold]{escape(name)}[/bold]", _contenders(workload["contenders"]), "", *_bars(workload), ""]
    title = f"{result['model_id']}, {result['dtype']}, {result['threads']} threads"
    console.print(Panel(Group(*parts, *map(escape, _notes(result))), title=escape(title)))


def brief(run: Mapping[str, Any]) -> str:
    return ", ".join(f"{label} {form.format(run[key])}" for label, key, form in LINES if key in BRIEF and run.get(key))


def limits_table(lines: list[Mapping[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("", "measured", "limit", "of the limit", "goal", "met"):
        table.add_column(heading, justify="left" if heading == "" else "right")
    table.add_column("the limit, or the goal")
    for line in lines:
        unit = line["unit"]
        table.add_row(
            line["name"],
            _figure(line["measured"], unit),
            _figure(line["limit"], unit),
            _percent(line["share"]),
            _percent(line["share_goal"]) or (f"at most {_figure(line['most'], unit)}" if line["most"] else ""),
            {None: "", True: "yes", False: "no"}[line["met"]],
            line["note"],
        )
    return table


def profile_table(steps: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, title="where a step's time goes", title_justify="left")
    table.add_column("")
    for title in (*PARTS.values(), "profiled"):
        table.add_column(title, justify="right")
    cases = {**steps["cases"], f"prompt {steps['prompt']['tokens']:,}": steps["prompt"]}
    for name, case in cases.items():
        profile, whole = case["profile"], sum(case["profile"].values())
        table.add_row(name, *(_percent(profile[part] / whole) for part in PARTS), _figure(1e3 * whole, "ms"))
    return table


def _figure(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    digits = 0 if value >= 1000 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f} {unit}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"


def _contenders(contenders: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for name in contenders:
        table.add_column(title_of(name), justify="right")
    for label, key, form in LINES:
        values = [figures.get(key) for figures in contenders.values()]
        if any(value is not None for value in values):
            table.add_row(label, *("" if value is None else form.format(value) for value in values))
    return table


def _bars(workload: Mapping[str, Any]) -> list[str]:
    rates = {title_of(name): of["output_throughput"] for name, of in workload["contenders"].items()}
    if workload["allowed"]:
        rates["what the machine allows"] = workload["allowed"]["output_throughput"]
    width, highest = max(len(title) for title in rates), max(rates.values())
    return [
        f"{title:{width}} {'█' * max(1, round(BAR * rate / highest))} {rate:.1f} tok/s" for title, rate in rates.items()
    ]


def _notes(result: Mapping[str, Any]) -> list[str]:
    notes = [f"{title_of(name)} was left out: {reason}" for name, reason in result["unavailable"].items()]
    if result["baselines"] and result["baseline_dtype"] != result["dtype"]:
        notes.append(f"Decant ran in {result['dtype']}, all others in {result['baseline_dtype']}.")
    for name, workload in workloads_of(result).items():
        notes += _static_notes(name, workload)
    if result["runs"] > 1:
        notes.append(
            f"A contender's figures are those of its run of median throughput, of {result['runs']} in alternation."
        )
    if limits := limits_of(result):
        reads, products = (
            _range([each[name] for each in limits]) for name in ("read_bandwidth_gb_s", "product_rate_gflop_s")
        )
        notes.append(f"Limits, taken before each run: reads {reads} GB/s, packed products {products} GFLOP/s.")
    machine = result["machine"]
    flags = [flag for flag, present in machine["flags"].items() if present]
    notes.append(
        f"{machine['cpu']} ({' '.join(flags)}), {machine['cores']} cores, load {machine['load_average'][0]:.1f}"
        f" at the start, torch {machine['torch']}, transformers {machine['transformers']}."
    )
    return notes


def _range(values: list[float]) -> str:
    lowest, highest = f"{min(values):.0f}", f"{max(values):.0f}"
    return lowest if lowest == highest else f"{lowest} to {highest}"


def _static_notes(name: str, workload: Mapping[str, Any]) -> list[str]:
    static = workload["contenders"].get("static")
    if static is None:
        return []
    ours = workload["contenders"][DECANT]["output_throughput"]
    notes = [f"{name}: {ours / static['output_throughput']:.2f} times the tokens of static batches."]
    if static["measured_batches"] < static["batches"]:
        notes.append(
            f"{name}: {static['measured_batches']} of {static['batches']} static batches were run; the others are"
            " predicted from them, by their padded prompt tokens and by their steps."
        )
    return notes
