"""The service's own cost: a workload through client, router and worker beside the engine alone, on the same cores.

    engine alone     engine                              one process, no server
    service          client ──> router ──> worker        a process each, and Redis; the same engine in the worker

    python -m bench.service --model qwen2.5-0.5b [--runs 3] [--json OUT] [--profile DIR]

Both alternate, with the same requests, threads, token budget and KV memory. The ratio is that of output tokens per
second; the service's own cost is all CPU that the engine alone does not need.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import machine
from bench.comparison import subprocess_runner as child
from bench.comparison.metrics import Served, summarise
from bench.comparison.subprocess_runner import Job
from bench.deployment.cpu_use import hottest, profiler
from bench.deployment.service import PARTS, LoadFailed, service
from bench.engine import items_of
from bench.options import positive
from bench.workloads import GENERATORS, InvalidWorkload
from decant.bench import model_shapes as shapes
from decant.runtime.cores import available_cores

GOAL = 0.9
KEYS = ("duration", "output_throughput", "median_ttft_ms", "median_tpot_ms", "p99_itl_ms", "max_itl_ms")


def engine_alone(job: Job) -> dict[str, Any]:
    result = child.run("bench.comparison.own_engine", job, lambda _: None)
    return {key: result[key] for key in KEYS} | {"cpu_seconds": result["cpu_seconds"]}


async def whole_service(job: Job, profile: Path | None = None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="decant-bench-") as folder:
        async with service(job, Path(folder)) as running:
            result = await running.serve(job.items, profile)
    answers = result["served"]
    summary = summarise([Served(one["id"], one["input_len"], one["sent"], one["tokens"]) for one in answers])
    tokens, messages = summary["total_output_tokens"], sum(one["messages"] for one in answers)
    seconds = sum(one["user"] + one["system"] for one in result["cpu"].values())
    extra = {"tokens_per_message": tokens / messages, "cpu": result["cpu"], "cpu_seconds": seconds}
    return {key: summary[key] for key in KEYS} | extra


def measure(args: argparse.Namespace, notify: Callable[[str], None]) -> dict[str, Any]:
    folder = shapes.checkpoint(args.model)
    items = tuple(items_of(args.workload, folder, args.seed))
    job = Job(str(folder), args.dtype, args.threads, items, args.token_budget, args.kv_bytes)
    facts = machine.facts()
    alone, served = [], []
    for number in range(1, args.runs + 1):
        notify(f"run {number} of {args.runs}: the engine alone")
        alone.append(engine_alone(job))
        notify(f"run {number} of {args.runs}: the service")
        served.append(asyncio.run(whole_service(job)))
    result = {"machine": facts, "model_id": args.model, "workload": args.workload, "threads": args.threads}
    result |= {"dtype": args.dtype, "token_budget": args.token_budget, "tokens": sum(item.output_len for item in items)}
    result |= {"engine": alone, "service": served} | compare(alone, served, sum(item.output_len for item in items))
    if args.profile is not None:
        notify("the service, sampled")
        args.profile.mkdir(parents=True, exist_ok=True)
        asyncio.run(whole_service(job, args.profile))
        result["hottest"] = {path.stem: hottest(path) for path in sorted(args.profile.glob("*.txt"))}
    return result


def compare(alone: Sequence[Mapping[str, Any]], served: Sequence[Mapping[str, Any]], tokens: int) -> dict[str, Any]:
    def middle(runs: Sequence[Mapping[str, Any]], key: str) -> float:
        return float(statistics.median(run[key] for run in runs))

    ratio = middle(served, "output_throughput") / middle(alone, "output_throughput")
    parts = {name: 1e6 / tokens * statistics.median(_seconds(run["cpu"][name]) for run in served) for name in PARTS}
    engine = 1e6 / tokens * middle(alone, "cpu_seconds")
    own = sum(parts.values()) - engine
    cpu = {"engine": engine, **parts, "own": own, "share_of_engine": engine / sum(parts.values())}
    return {"ratio": ratio, "goal": GOAL, "met": ratio >= GOAL, "cpu_us_per_token": cpu}


def _seconds(spent: Mapping[str, float]) -> float:
    return spent["user"] + spent["system"]


def show(result: Mapping[str, Any], console: Console) -> None:
    table = Table(title=f"{result['workload']}, {result['model_id']}, {result['threads']} threads")
    for name in ("", *KEYS, "CPU s"):
        table.add_column(name, justify="right")
    for title, runs in (("engine alone", result["engine"]), ("service", result["service"])):
        for run in runs:
            table.add_row(title, *(f"{run[key]:,.1f}" for key in (*KEYS, "cpu_seconds")))
    console.print(table)
    table = Table(title="CPU seconds of the service's processes")
    for name in ("run", "process", "user", "system", "event loop's thread", "waits"):
        table.add_column(name, justify="right")
    for number, run in enumerate(result["service"], 1):
        for name, spent in run["cpu"].items():
            seconds = (f"{spent[key]:.2f}" for key in ("user", "system", "main_thread"))
            table.add_row(str(number), name, *seconds, f"{spent['switches']:,}")
    console.print(table)
    for name, functions in result.get("hottest", {}).items():
        table = Table(title=f"Samples of the {name}, %")
        for column in ("function", "own", "within"):
            table.add_column(column)
        for one in functions:
            table.add_row(one["function"], f"{100 * one['own']:.1f}", f"{100 * one['within']:.1f}")
        console.print(table)
    cpu = result["cpu_us_per_token"]
    parts = ", ".join(f"{name} {cpu[name]:,.0f}" for name in PARTS)
    console.print(f"CPU a token, us: engine alone {cpu['engine']:,.0f}; {parts}; the service's own {cpu['own']:,.0f}")
    outcome = "met" if result["met"] else "missed"
    console.print(f"throughput through the service: {100 * result['ratio']:.1f} % of the engine alone; {outcome} 90 %")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.service", description="the service beside its engine alone")
    parser.add_argument("--model", required=True, help=f"a folder, or a shape: {', '.join(shapes.SHAPES)}")
    parser.add_argument("--workload", default="exponential", help=f"a .jsonl file, or one of {', '.join(GENERATORS)}")
    parser.add_argument("--runs", type=positive, default=2, help="of each, in turn")
    parser.add_argument("--threads", type=positive, default=available_cores())
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--token-budget", type=positive, default=512, help="tokens that a step computes")
    parser.add_argument("--kv-bytes", type=positive, default=1 << 30, help="memory for the engine's blocks")
    parser.add_argument("--seed", type=int, default=0, help="of a generated workload")
    parser.add_argument("--profile", type=Path, metavar="DIR", help="sample one more run with py-spy into this folder")
    parser.add_argument("--json", type=Path, metavar="OUT", help="where the JSON goes")
    return parser.parse_args(arguments)


def main() -> int:
    args, console = parse(), Console(stderr=True, width=140)
    try:
        if args.profile is not None:
            profiler()  # before the runs
        result = measure(args, lambda what: console.print(what, markup=False))
    except (InvalidWorkload, FileNotFoundError, child.ChildFailed, LoadFailed, TimeoutError) as error:
        console.print(str(error), style="red", markup=False)
        return 1
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    show(result, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
