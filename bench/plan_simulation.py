"""A planned deployment in simulated time, over the number of workers.

    python -m bench.plan_simulation [--workers 1 10 100 1000] [--routers 10] [--json OUT]

Simulates as `decant plan --simulate` does, with ``--workers`` of each role. Llama-3-8B's shape, on an H100 each;
prompts of 1,500 to 2,000 tokens, the first 1,000 one of 50 prefixes; outputs of 500. The rate is 70 % of what the
workers could serve without a prefix cache.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from rich.console import Console

from bench import machine
from bench.options import add_json, positive, write_result
from decant.bench.reports.console import make_table
from decant.plan.inputs import Inputs, PlanOptions, parse
from decant.plan.simulation.outcome import outcome
from decant.plan.simulation.simulation import Scenario, Simulation
from decant.plan.sizing import Sizing

LLAMA_3_8B = "layers=32,hidden=4096,heads=32,kv_heads=8,intermediate=14336,vocab=128256"
PREFIX_TOKENS, PREFIXES = 1000, 50
SHARE = 0.7
FEWEST_REQUESTS, REQUESTS_PER_WORKER = 10_000, 20


def simulate(inputs: Inputs, workers: int, routers: int) -> dict[str, Any]:
    alone = replace(inputs.workload, rate=1e-3)
    goodput = Sizing(inputs.speed, inputs.kv_capacity, alone, inputs.slo).plan().goodput
    workload = replace(inputs.workload, rate=SHARE * goodput * workers)
    requests = max(FEWEST_REQUESTS, REQUESTS_PER_WORKER * workers)
    scenario = Scenario(workers, workers, routers, requests, prefix_tokens=PREFIX_TOKENS, prefixes=PREFIXES)
    simulation = Simulation(inputs.speed, inputs.kv_capacity, workload, scenario)
    began = time.process_time()
    simulation.run()
    return {
        "workers": workers,
        "routers": routers,
        "rate": workload.rate,
        **asdict(outcome(simulation, inputs.slo)),
        "cpu_seconds": time.process_time() - began,
    }


def show(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    columns = ("workers", "wait p50", "p99", "TTFT p99", "TPOT p99", "busiest", "hits", "placement")
    table = make_table("workers of each role; milliseconds", columns)
    for row in rows:
        wait, ttft, tpot = row["wait"], row["ttft"], row["tpot"]
        table.add_row(
            f"{row['workers']:,}",
            f"{wait['p50'] * 1e3:.0f}",
            f"{wait['p99'] * 1e3:.0f}",
            f"{ttft['p99'] * 1e3:.0f}",
            f"{tpot['p99'] * 1e3:.1f}",
            f"{row['prefill_balance']:.2f}",
            f"{row['cached_share']:.0%}",
            f"{row['placement_cpu'] * 1e3:.3f}",
        )
    console.print(table)
    console.print(
        "busiest: seconds computed by the busiest prefill worker over the mean; hits: share of the prompt tokens that "
        "were cached; placement: CPU time of a request's two searches"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.plan_simulation", description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=positive, nargs="+", default=[1, 10, 100, 1000])
    parser.add_argument("--routers", type=positive, default=10)
    add_json(parser)
    args = parser.parse_args()
    inputs = parse(PlanOptions(shape=LLAMA_3_8B, device="h100"))
    rows = []
    for workers in args.workers:
        rows.append(simulate(inputs, workers, args.routers))
        print(f"{workers} workers: {rows[-1]['cpu_seconds']:.1f} s of CPU", file=sys.stderr, flush=True)
    options = {"shape": LLAMA_3_8B, "device": "h100", "prefix_tokens": PREFIX_TOKENS, "prefixes": PREFIXES}
    result = {"machine": machine.facts(), "options": {**options, "share": SHARE}, "rows": rows}
    write_result(result, args.json, lambda: show(rows, Console()))


if __name__ == "__main__":
    main()
