"""Prompt placement in simulated time: the router's own policy beside load alone, random and round robin.

Figures depend on the seed only.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.conversations import arrivals
from bench.options import add_json, positive, write_result
from bench.simulation import Choose, Simulation
from decant.protos import worker_pb2 as wire
from decant.router.placement.policy import PlacementRequest, WorkerSnapshot, choose_first_worker
from decant.state.ids import Incarnation

LOADS = {"conversations": 1.0, "mixed": 0.5}

_DECODE = WorkerSnapshot(
    Incarnation("decode", 1),
    wire.ROLE_DECODE,
    layout_hash=0,
    block_size=1,
    free_blocks=1 << 30,
    sequences=0,
    queued_tokens=0,
)


def placed(workers: Sequence[WorkerSnapshot], tokens: int) -> Incarnation:
    place = choose_first_worker([*workers, _DECODE], PlacementRequest(tokens))
    assert place is not None
    return place.incarnation


def by_load(workers: Sequence[WorkerSnapshot], tokens: int) -> Incarnation:
    return placed([replace(worker, cached_tokens=0) for worker in workers], tokens)


def at_random(seed: int) -> Choose:
    rng = Random(seed)
    return lambda workers, _: rng.choice(workers).incarnation


def in_turn() -> Choose:
    turns = itertools.count()
    return lambda workers, _: workers[next(turns) % len(workers)].incarnation


def policies(routers: int, seed: int) -> Iterator[tuple[str, list[Choose]]]:
    yield "placement", [placed] * routers
    yield "load alone", [by_load] * routers
    yield "round robin", [in_turn() for _ in range(routers)]
    yield "random", [at_random(seed + router) for router in range(routers)]


def simulate(
    *, prompts: int, rate: float, workers: int = 8, routers: int = 2, blocks: int = 8192, seed: int = 0
) -> dict[str, dict[str, dict[str, float]]]:
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for name, shared in LOADS.items():
        load = arrivals(prompts, rate, shared, seed)
        for policy, choose in policies(routers, seed):
            simulation = Simulation(choose, workers, blocks)
            simulation.run(load)
            wait_times = sorted(1000 * seconds for seconds in simulation.wait_times)
            figures.setdefault(name, {})[policy] = {
                "cached_share": simulation.cached_tokens / simulation.prompt_tokens,
                "mean_ttft_ms": fmean(wait_times),
                "median_ttft_ms": wait_times[len(wait_times) // 2],
                "p99_ttft_ms": wait_times[len(wait_times) * 99 // 100],
            }
    return figures


def show(result: dict[str, Any], console: Console) -> None:
    for name, figures in result["loads"].items():
        table = Table("", title=f"{name}, {result['rate']:g} prompts a second, simulated", box=None)
        for column in ("cached", "TTFT mean, ms", "median", "p99", ""):
            table.add_column(column, justify="right" if column else "left")
        longest = max(each["mean_ttft_ms"] for each in figures.values())
        for policy, each in figures.items():
            times = [f"{each[key]:,.0f}" for key in ("mean_ttft_ms", "median_ttft_ms", "p99_ttft_ms")]
            bar = "█" * max(1, round(20 * each["mean_ttft_ms"] / longest))
            table.add_row(policy, f"{each['cached_share']:.0%}", *times, bar)
        console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.placement", description="where prompts go, simulated")
    add_json(parser)
    parser.add_argument("--prompts", type=positive, default=2000)
    parser.add_argument("--rate", type=float, default=60.0, help="prompts a second, on average")
    parser.add_argument("--workers", type=positive, default=8)
    parser.add_argument("--routers", type=positive, default=2)
    parser.add_argument("--blocks", type=positive, default=8192, help="of each worker's cache, 16 tokens each")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    asked = {name: value for name, value in vars(args).items() if name != "json"}
    result = {**asked, "loads": simulate(**asked)}
    write_result(result, args.json, lambda: show(result, Console(stderr=True)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
