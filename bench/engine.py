"""The engine beside transformers' ``generate`` with static batches, in one run.

    python -m bench.engine --model qwen2.5-0.5b --workload exponential --json OUT.json

Each contender runs in a process of its own, with the same dtype and threads, in alternation. The report goes to
standard error, the JSON to OUT (``-``: standard output).
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from bench import child, machine, report, shapes, workloads
from bench.child import Job, Tell
from bench.workloads import GENERATORS, InvalidWorkload, Item

CONTENDERS = {"none": ("decant",), "static": ("decant", "static")}
"""--baseline -> who runs."""


def measure(job: Job, contenders: Sequence[str], runs: int, console: Console) -> dict[str, Any]:
    """Every contender ``runs`` times, in alternation; of each the run of median throughput, and all runs."""
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in contenders}
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:3.0f} %"))
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        for index in range(runs):
            for name in contenders:
                task = progress.add_task(f"{report.NAMES[name]}, run {index + 1} of {runs}", total=1.0)
                results[name].append(child.run(name, job, _into(progress, task)))
                progress.update(task, completed=1.0)
    return {name: _median_run(of) for name, of in results.items()}


def _into(progress: Progress, task: TaskID) -> Tell:
    return lambda share: progress.update(task, completed=share)


def _median_run(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The run of (lower) median output throughput; ``runs`` keeps what each one gave."""
    ordered = sorted(runs, key=lambda run: run["output_throughput"])
    chosen = ordered[(len(ordered) - 1) // 2]
    brief = [{key: value for key, value in run.items() if key != "requests"} for run in runs]
    return {**chosen, "peak_rss_gb": max(run["peak_rss_bytes"] for run in runs) / 1e9, "runs": brief}


def bench(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """The whole result, as it is written. Raises ChildFailed, InvalidWorkload."""
    folder = checkpoint(args.model)
    job = Job(
        model=str(folder),
        dtype=args.dtype,
        threads=args.threads,
        items=tuple(items_of(args.workload, folder, args.seed)),
        token_budget=args.token_budget,
        kv_bytes=args.kv_bytes,
        batch_size=args.batch_size,
        static_batches=args.static_batches,
    )
    result: dict[str, Any] = {"machine": machine.facts(), "model_id": args.model, "workload": args.workload}
    result |= {"date": result["machine"]["date"], "num_prompts": len(job.items), "dtype": job.dtype}
    result |= {"threads": job.threads, "token_budget": job.token_budget}
    if args.limits:
        with console.status("reads and products alone"):
            result["limits"] = child.run("limits", replace(job, items=()), lambda _: None)
    contenders = measure(job, CONTENDERS[args.baseline], args.runs, console)
    result["contenders"] = contenders
    if "static" in contenders:
        ours, theirs = contenders["decant"], contenders["static"]
        keys = ("output_throughput", "request_throughput", "median_ttft_ms", "median_tpot_ms", "median_e2el_ms")
        result["ratio"] = {key: ours[key] / theirs[key] if theirs[key] else None for key in keys}
    return result


def checkpoint(model: str) -> Path:
    """A checkpoint's folder: the one named, or that of a shape, made if need be. Raises FileNotFoundError."""
    folder = Path(model)
    if not folder.is_dir() and model in shapes.SHAPES:
        folder = shapes.make(model)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"--model {model}: neither a checkpoint's folder nor one of {', '.join(shapes.SHAPES)}")
    return folder


def items_of(workload: str, folder: Path, seed: int) -> list[Item]:
    """A workload's requests, from its file or its generator, checked against the model. Raises InvalidWorkload."""
    config = json.loads((folder / "config.json").read_text())
    config = config.get("text_config", config)
    vocab_size, window = config.get("vocab_size"), config.get("max_position_embeddings")
    if not Path(workload).is_file() and workload in GENERATORS:
        items = GENERATORS[workload](vocab_size, seed)
    else:
        items = workloads.read(Path(workload))
    workloads.check(items, vocab_size, window)
    return items


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.engine", description="the engine beside static batches")
    parser.add_argument("--model", required=True, help=f"a folder, or a shape: {', '.join(shapes.SHAPES)}")
    parser.add_argument("--workload", required=True, help=f"a .jsonl file, or one of {', '.join(GENERATORS)}")
    parser.add_argument("--json", metavar="OUT", help="where the JSON goes; - for standard output, and nothing else")
    parser.add_argument("--threads", type=_positive, default=machine.usable_cores())
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--token-budget", type=_positive, default=512, help="tokens that a step computes")
    parser.add_argument("--kv-bytes", type=_positive, default=1 << 30, help="memory for the engine's blocks")
    parser.add_argument("--runs", type=_positive, default=1, help="of each contender, in alternation")
    parser.add_argument("--baseline", choices=list(CONTENDERS), default="static")
    parser.add_argument("--batch-size", type=_positive, default=8, help="of a static batch")
    parser.add_argument("--static-batches", type=int, default=5, help="run so many and predict the others; 0: run all")
    parser.add_argument("--seed", type=int, default=0, help="of a generated workload")
    parser.add_argument("--no-limits", dest="limits", action="store_false", help="don't measure reads and products")
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"at least 1, got {value}")
    return value


def main() -> int:
    args, console = parse(), Console(stderr=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as on ctrl-C, the contender under way is ended too
    try:
        result = bench(args, console)
    except (InvalidWorkload, FileNotFoundError, child.ChildFailed) as error:
        console.print(str(error), style="red", markup=False)
        return 1
    if args.json != "-":
        report.show(result, console)
    text = json.dumps(result, indent=1) + "\n"
    if args.json == "-":
        sys.stdout.write(text)
    elif args.json:
        Path(args.json).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
