"""The router's cost: each process by itself, and engines with known times.

    load generator ──> router ──> prefill worker (20 ms to the first token), decode worker (10 ms a step)
                          '──> Redis

    python -m bench.router [--seconds 5] [--json OUT]

    saturation    closed loop with more and more clients until the rate of answers stops growing
    added TTFT    open loop at half of that rate: the client's time to first token minus the engine's part
    CPU           router CPU per message of text streams with one token per message
    session       tokens per second through one session from a scripted worker, with 64 and 256 per frame
    scripts       Redis scripts per running stream and flush interval, and per short request
    idle          CPU of each process without requests

Added TTFT and CPU are also measured with gRPC alone. On few cores, times mostly measure waiting for a core.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import structlog
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench import machine
from bench.deployment.frames import WARM_SECONDS, tokens_per_second
from bench.deployment.load import Job
from bench.deployment.processes import Deployment, Speed, deployment
from bench.options import add_json, write_result
from decant.router.settings import RouterSettings

CLIENTS = (8, 16, 32, 64, 128, 256)
"""Ends where a doubling brings less than GROWTH times as much."""
GROWTH = 1.1
STREAMS = 32
FRAMES = (64, 256)
IDLE = ("router", "prefill", "decode", "redis")
SETTLE_SECONDS = 2.0
"""Pause before the idle deployment is measured."""
FLUSH_SECONDS = RouterSettings.model_fields["flush_ms"].default / 1000


@dataclass(frozen=True, slots=True)
class Goal:
    key: str
    label: str
    unit: str
    value: float | None = None  # None: no target
    at_least: bool = False

    def met(self, figure: float) -> bool:
        return self.value is None or (figure >= self.value if self.at_least else figure <= self.value)


GOALS = (
    Goal("requests_per_s", "saturation", "requests/s"),
    Goal("added_ttft_p50_ms", "added TTFT at half, p50", "ms", 3.0),
    Goal("added_ttft_p99_ms", "added TTFT at half, p99", "ms", 10.0),
    Goal("bare_ttft_p50_ms", "  with gRPC alone, p50", "ms"),
    Goal("bare_ttft_p99_ms", "  with gRPC alone, p99", "ms"),
    Goal("cpu_us_per_message", "router CPU a message", "us", 40.0),
    Goal("bare_cpu_us_per_message", "  with gRPC alone", "us"),
    *[
        Goal(f"session_{n}_tokens_per_s", f"one session, {n} in a frame", "tokens/s", 150_000, at_least=True)
        for n in FRAMES
    ],
    Goal("scripts_per_flush", "scripts a stream and flush", "", 1.0),
    Goal("scripts_per_request", "scripts a short request", ""),
    *[Goal(f"idle_{name}_percent", f"idle CPU, {name}", "% of a core", 2.0) for name in IDLE],
)


@dataclass(frozen=True, slots=True)
class Window:
    seconds: float
    cpu: Mapping[str, float]  # seconds, per process
    scripts: int
    scripts_seconds: float  # between their counts
    seen: Sequence[Mapping[str, Any]]  # bench.deployment.load.RequestTimes of each request
    in_window: int | None

    @property
    def answered(self) -> int:
        return sum(one["tokens"] > 0 for one in self.seen)


class LoadFailed(RuntimeError):
    pass


async def load(job: Job, target: Deployment) -> Window:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.deployment.load", stdin=pipe, stdout=pipe, limit=1 << 26
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(asdict(job)).encode() + b"\n")
        samples, result = [], None
        while result is None and (line := await process.stdout.readline()):
            message = json.loads(line)
            if "window" in message:
                samples.append((time.monotonic(), target.cpu(), await target.scripts()))
                process.stdin.write(b"\n")
            result = message.get("result")
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
    if result is None or result["errors"]:
        raise LoadFailed(f"{job.name}: {result['errors'][0] if result else 'it ended without a result'}")
    (began, cpu, scripts), (ended, cpu_then, scripts_then) = samples
    spent = {name: cpu_then[name] - before for name, before in cpu.items()}
    count, elapsed = (then - before for then, before in zip(scripts_then, scripts, strict=True))
    return Window(ended - began, spent, int(count), elapsed, result["seen"], result["in_window"])


class Bench:
    def __init__(self, target: Deployment, speed: Speed, seconds: float, settle_s: float, warm_s: float) -> None:
        self.figures: dict[str, float] = {}
        self.details: dict[str, Any] = {}
        self._deployment = target
        self._speed = speed
        self._seconds = seconds
        self._settle_s = settle_s
        self._warm_s = warm_s

    async def saturate(self) -> None:
        await load(
            Job("warm", self._deployment.address, "closed", min(1.0, self._seconds), clients=4), self._deployment
        )
        rates: dict[int, float] = {}
        best = 0.0
        for clients in CLIENTS:
            job = Job(
                f"closed{clients}", self._deployment.address, "closed", self._seconds, clients=clients, seed=clients
            )
            window = await load(job, self._deployment)
            rate = rates[clients] = window.answered / window.seconds
            if rate > best:
                self.figures["scripts_per_request"] = window.scripts / window.answered
                self.details["cpu_at_saturation"] = {name: s / window.seconds for name, s in window.cpu.items()}
            if rate < GROWTH * best:
                break
            best = rate
        self.details["closed_requests_per_s"] = rates
        self.figures["requests_per_s"] = max(rates.values())

    async def half(self) -> None:
        rate = self.figures["requests_per_s"] / 2
        job = Job("open", self._deployment.address, "open", 2 * self._seconds, rate=rate, seed=7)
        window = await load(job, self._deployment)
        own = self._deployment.engine_ms()
        added = [1000 * (one["first"] - one["sent"]) - own[one["id"]] for one in window.seen]
        self._quantiles("added_ttft", added)
        bare = await load(replace(job, name="bare", address=self._deployment.bare), self._deployment)
        self._quantiles("bare_ttft", [1000 * (one["first"] - one["sent"]) - self._speed.first_ms for one in bare.seen])
        self.details["open"] = {
            "rate": rate,
            "requests": len(added),
            "engine_ms_median": statistics.median(own[one["id"]] for one in window.seen),
            "cpu": {name: s / window.seconds for name, s in window.cpu.items()},
        }

    def _quantiles(self, name: str, values: Sequence[float]) -> None:
        self.figures[f"{name}_p50_ms"], self.figures[f"{name}_p99_ms"] = np.percentile(values, [50, 99]).tolist()

    async def stream(self) -> None:
        tokens = round(1000 * (2 * self._seconds + 5) / self._speed.step_ms)
        job = Job(
            "streams", self._deployment.address, "streams", self._seconds, STREAMS, output_tokens=min(tokens, 1900)
        )
        window = await load(job, self._deployment)
        bare = await load(replace(job, name="bare", address=self._deployment.bare), self._deployment)
        assert window.in_window
        assert bare.in_window
        self.figures["cpu_us_per_message"] = 1e6 * window.cpu["router"] / window.in_window
        self.figures["bare_cpu_us_per_message"] = 1e6 * bare.cpu["bare"] / bare.in_window
        self.figures["scripts_per_flush"] = window.scripts / (STREAMS * window.scripts_seconds / FLUSH_SECONDS)
        self.details["messages_per_s"] = window.in_window / window.seconds
        tokens, messages = (sum(one[key] for one in window.seen) for key in ("tokens", "messages"))
        self.details["tokens_per_message"] = tokens / messages

    async def session(self) -> None:
        for count in FRAMES:
            self.figures[f"session_{count}_tokens_per_s"] = await tokens_per_second(count, self._seconds, self._warm_s)

    async def idle(self) -> None:
        await asyncio.sleep(self._settle_s)
        before, began = self._deployment.cpu(), time.monotonic()
        await asyncio.sleep(self._seconds)
        spent, seconds = self._deployment.cpu(), time.monotonic() - began
        for name in IDLE:
            self.figures[f"idle_{name}_percent"] = 100 * (spent[name] - before[name]) / seconds


PARTS = {
    "closed loop": Bench.saturate,
    "open loop at half": Bench.half,
    "streams": Bench.stream,
    "one session": Bench.session,
    "idle": Bench.idle,
}


async def measure(
    seconds: float, console: Console, *, settle_s: float = SETTLE_SECONDS, warm_s: float = WARM_SECONDS
) -> dict[str, Any]:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    speed = Speed()
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="decant-bench-")))
        progress = stack.enter_context(Progress(*columns, console=console, transient=True))
        task = progress.add_task("a deployment begins")
        target = await stack.enter_async_context(deployment(speed, folder))
        bench = Bench(target, speed, seconds, settle_s, warm_s)
        for name, part in PARTS.items():
            progress.update(task, description=name)
            await part(bench)
    met = {goal.key: goal.met(bench.figures[goal.key]) for goal in GOALS if goal.value is not None}
    goals = {goal.key: goal.value for goal in GOALS if goal.value is not None}
    return {"figures": bench.figures, "goals": goals, "met": met, "details": bench.details, "machine": machine.facts()}


def show(result: Mapping[str, Any], console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    for name in ("", "measured", "goal", "of goal", ""):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for goal in GOALS:
        figure = result["figures"][goal.key]
        shown = f"{figure:,.{0 if figure >= 100 else 2}f} {goal.unit}"
        if goal.value is None:
            table.add_row(goal.label, shown, "", "", "")
        else:
            sign = "≥" if goal.at_least else "≤"
            mark = "[green]met[/]" if goal.met(figure) else "[red]not met[/]"
            table.add_row(goal.label, shown, f"{sign} {goal.value:,g}", f"{figure / goal.value:.2f}", mark)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.router", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="how long each figure is measured")
    add_json(parser)
    args = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    result = asyncio.run(measure(args.seconds, Console(stderr=True)))
    write_result(result, args.json, lambda: show(result, Console()))


if __name__ == "__main__":
    main()
