"""The engine beside the limits of the machine and beside other servers, in one run.

    python -m bench.engine --model qwen2.5-0.5b --baselines all --runs 5 --json OUT.json --plot OUT.svg
    python -m bench.engine --model qwen2.5-0.5b --workload exponential

Contenders alternate, each in its own process with the same threads and, by default, the same dtype. OUT is written
after each workload.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from bench import machine, medians, workloads
from bench.comparison import contenders, plot, report, table
from bench.comparison import subprocess_runner as child
from bench.comparison.contenders import BASELINES, DECANT, Unavailable, title_of
from bench.comparison.subprocess_runner import Job, OnProgress
from bench.options import positive
from bench.workloads import GENERATORS, InvalidWorkload, Item
from decant.bench import model_shapes as shapes
from decant.runtime.cores import available_cores

DTYPES = ("bfloat16", "float32")


class Bench:
    def __init__(self, args: argparse.Namespace, console: Console) -> None:
        self.folder = shapes.checkpoint(args.model)
        self.job = Job(
            model=str(self.folder),
            dtype=args.dtype,
            threads=args.threads,
            token_budget=args.token_budget,
            kv_bytes=args.kv_bytes,
            batch_size=args.batch_size,
            static_batches=args.static_batches,
        )
        self.unavailable: dict[str, str] = {}
        self._args = args
        self._console = console

    def whole(self) -> Iterator[dict[str, Any]]:
        steps = []
        for index in range(self._args.runs):
            limits = self._limits()
            steps.append(self._part("bench.comparison.steps", f"single steps, run {index + 1}") | limits)
        figures: dict[str, Any] = {}
        result = {
            "steps": medians.of(steps),
            "waste": self._part("bench.comparison.fragmentation", "partly filled blocks"),
            "workloads": figures,
            "kv_bytes": self.job.kv_bytes,
        }
        for name in GENERATORS:
            figures[name] = self.workload(name)
            yield result
        yield result | {"lines": [line.as_json() for line in table.lines(result)]}

    def workload(self, name: str) -> dict[str, Any]:
        items = items_of(name, self.folder, self._args.seed)
        job, runs = replace(self.job, items=tuple(items)), dict[str, list[dict[str, Any]]]()
        for index in range(self._args.runs):
            limits = self._limits()
            with self._progress() as progress:
                for contender in (DECANT, *self._args.baselines):
                    if contender not in self.unavailable:
                        task = progress.add_task(_title(contender, name, index, self._args.runs), total=1.0)
                        found = self._run(contender, job, progress, task)
                        runs.setdefault(contender, []).extend(
                            run | limits if contender == DECANT else run for run in found
                        )
                        for run in found:
                            line = f"{_title(contender, name, index, self._args.runs)}: {report.brief(run)}"
                            self._console.print(line, markup=False)
        figures = {contender: medians.run_of_median(of) for contender, of in runs.items() if of}
        last = max(item.arrival_s for item in items)
        least = table.allowed(table.rates_of(figures[DECANT]), figures[DECANT], last) if self._args.limits else None
        return {"num_prompts": len(items), "contenders": figures, "allowed": least} | _ratio(figures)

    def _limits(self) -> dict[str, Any]:
        return {"limits": self._part("bench.machine", "reads and products alone")} if self._args.limits else {}

    def _run(self, contender: str, job: Job, progress: Progress, task: TaskID) -> Sequence[dict[str, Any]]:
        description = progress.tasks[task].description
        if contender != DECANT:
            job = replace(job, dtype=self._args.baseline_dtype)

        def say(line: str) -> None:
            progress.update(task, description=f"{description}: {line[:80]}")

        try:
            found = [contenders.run(contenders.CONTENDERS[contender], job, _into(progress, task, description), say)]
        except Unavailable as reason:
            self.unavailable[contender] = str(reason)
            self._console.print(f"{title_of(contender)} is left out: {reason}", style="yellow", markup=False)
            found = []
        progress.update(task, description=description, completed=1.0)
        return found

    def _part(self, module: str, title: str) -> dict[str, Any]:
        with self._progress() as progress:
            task = progress.add_task(title, total=1.0)
            result = child.run(module, self.job, _into(progress, task, title))
            progress.update(task, completed=1.0)
        return result

    def _progress(self) -> Progress:
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
        return Progress(*columns, console=self._console)


def _into(progress: Progress, task: TaskID, description: str) -> OnProgress:
    return lambda share: progress.update(task, completed=share, description=description)


def _title(contender: str, workload: str, index: int, runs: int) -> str:
    return f"{Path(workload).name}: {title_of(contender)}, run {index + 1} of {runs}"


def _ratio(figures: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    if "static" not in figures:
        return {}
    ours, theirs = figures[DECANT], figures["static"]
    keys = ("output_throughput", "request_throughput", "median_ttft_ms", "median_tpot_ms", "median_e2el_ms")
    return {"ratio": {key: ours[key] / theirs[key] if theirs[key] else None for key in keys}}


def bench(args: argparse.Namespace, console: Console) -> Iterator[dict[str, Any]]:
    """Yield the result after each workload; only the last one is complete."""
    facts, measuring = machine.facts(), Bench(args, console)
    job = measuring.job
    asked: dict[str, Any] = {"machine": facts, "model_id": args.model, "workload": args.workload}
    asked |= {"date": facts["date"], "dtype": job.dtype, "threads": job.threads, "token_budget": job.token_budget}
    asked |= {"runs": args.runs, "baselines": args.baselines, "baseline_dtype": args.baseline_dtype}
    parts = measuring.whole() if args.workload is None else [measuring.workload(args.workload)]
    for measured in parts:
        yield asked | measured | {"unavailable": measuring.unavailable}


def items_of(workload: str, folder: Path, seed: int) -> list[Item]:
    """Make or read a workload. Raises InvalidWorkload."""
    config = json.loads((folder / "config.json").read_text())
    config = config.get("text_config", config)
    vocab_size, context_length = config.get("vocab_size"), config.get("max_position_embeddings")
    if not Path(workload).is_file() and workload in GENERATORS:
        items = GENERATORS[workload](vocab_size, seed)
    else:
        items = workloads.read(Path(workload))
    workloads.check(items, vocab_size, context_length)
    return items


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.engine", description="the engine beside the machine's limits and other engines"
    )
    parser.add_argument("--model", required=True, help=f"a folder, or a shape: {', '.join(shapes.SHAPES)}")
    parser.add_argument(
        "--workload", help=f"a .jsonl file, or one of {', '.join(GENERATORS)}; without it the whole table of limits"
    )
    parser.add_argument("--json", metavar="OUT", help="where the JSON goes; - for standard output, and nothing else")
    parser.add_argument("--plot", metavar="OUT.svg", type=_svg, help="where a picture of the workloads goes")
    parser.add_argument("--threads", type=positive, default=available_cores())
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--token-budget", type=positive, default=512, help="tokens that a step computes")
    parser.add_argument("--kv-bytes", type=positive, default=1 << 30, help="memory for the engine's blocks")
    parser.add_argument("--runs", type=positive, help="of each contender, in alternation (default: 5, one workload: 1)")
    parser.add_argument(
        "--baselines", type=_baselines, default=("static",), help=f"all, none, or some of {','.join(BASELINES)}"
    )
    parser.add_argument(
        "--baseline-dtype", choices=DTYPES, help="another than ours, where that is what they are fastest in"
    )
    parser.add_argument("--batch-size", type=positive, default=8, help="of a static batch")
    parser.add_argument("--static-batches", type=int, default=5, help="run so many and predict the others; 0: run all")
    parser.add_argument("--seed", type=int, default=0, help="of a generated workload")
    parser.add_argument("--no-limits", dest="limits", action="store_false", help="don't measure reads and products")
    args = parser.parse_args(arguments)
    if args.workload is None and not args.limits:
        parser.error("--no-limits: the table of limits needs them; name a --workload")
    args.runs = args.runs or (5 if args.workload is None else 1)
    args.baseline_dtype = args.baseline_dtype or args.dtype
    return args


def _svg(text: str) -> Path:
    if not text.endswith(".svg"):
        raise argparse.ArgumentTypeError(f"a name that ends in .svg, got {text}")
    return Path(text)


def _baselines(text: str) -> tuple[str, ...]:
    if text in ("all", "none"):
        return BASELINES if text == "all" else ()
    names = tuple(dict.fromkeys(text.split(",")))
    unknown = [name for name in names if name not in BASELINES]
    if unknown:
        raise argparse.ArgumentTypeError(f"all, none, or some of {', '.join(BASELINES)}, got {', '.join(unknown)}")
    return names


def main() -> int:
    args, console = parse(), Console(stderr=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # like ctrl-C, this also ends the running contender
    try:
        for result in bench(args, console):
            _keep(result, args.json)
    except (InvalidWorkload, FileNotFoundError, child.ChildFailed) as error:
        console.print(str(error), style="red", markup=False)
        return 1
    if args.json != "-":
        report.show(result, console)
    if args.plot:
        args.plot.write_text(plot.svg(result))
    if args.json == "-":
        sys.stdout.write(_json(result))
    return 0


def _keep(result: Mapping[str, Any], out: str | None) -> None:
    if out and out != "-":
        Path(out).write_text(_json(result))


def _json(result: Mapping[str, Any]) -> str:
    return json.dumps(result, indent=1) + "\n"


if __name__ == "__main__":
    sys.exit(main())
