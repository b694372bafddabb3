"""Decode steps of sequences with 1, 8 and 64 LoRA adapters beside none, in one engine's device.

python -m bench.adapters --model qwen2.5-0.5b --sequences 64 --rank 16

Each step computes one token of each sequence, whose adapters take turns. Steps of each kind run in turn. The adapters
are of random numbers, for all linear layers but the head.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import machine, medians
from bench.adapter_steps import add_adapter, plan
from bench.options import add_json, positive, write_result
from decant.bench import model_shapes as shapes
from decant.engine.loading import load
from decant.engine.model.model import ModelConfig

GOAL = 1.15
"""Time of a step with one adapter over that of one without."""
KV_BYTES = 1 << 30


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.adapters", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen2.5-0.5b", help=f"a folder, or a shape: {', '.join(shapes.SHAPES)}")
    parser.add_argument("--sequences", type=positive, default=64)
    parser.add_argument("--context", type=positive, default=128, help="tokens before each sequence's step")
    parser.add_argument("--rank", type=positive, default=16)
    parser.add_argument("--adapters", type=positive, nargs="+", default=[1, 8, 64])
    parser.add_argument("--runs", type=positive, default=9)
    add_json(parser)
    args = parser.parse_args()
    device = load(ModelConfig(str(shapes.checkpoint(args.model)), device="cpu", kv_bytes=KV_BYTES, adapters=True))
    digests = [add_adapter(device, args.rank, seed) for seed in range(max(args.adapters))]
    kinds = [0, *args.adapters]
    plans = [plan(device, args.sequences, args.context, digests[:count]) for count in kinds]
    times = medians.in_turn([partial(device.run, each) for each in plans], args.runs)
    table = Table("adapters", "step, median", "over none")
    for count, milliseconds in zip(kinds, times, strict=True):
        table.add_row(str(count), f"{milliseconds:.1f} ms", f"{milliseconds / times[0]:.2f}")
    result: dict[str, Any] = {
        **{name: getattr(args, name) for name in ("model", "sequences", "context", "rank", "runs")},
        "step_ms": dict(zip(map(str, kinds), times, strict=True)),
        "machine": machine.facts(),
    }
    line = f"one adapter: {times[1] / times[0]:.2f} times a step without (goal: at most {GOAL:g})"
    write_result(result, args.json, lambda: Console().print(table, line, sep="\n"))
    return 0 if times[1] <= GOAL * times[0] else 1


if __name__ == "__main__":
    sys.exit(main())
