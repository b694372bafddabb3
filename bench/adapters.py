"""Decode steps of sequences with 1, 8 and 64 LoRA adapters beside none, in one engine's device.

python -m bench.adapters --model qwen2.5-0.5b --sequences 64 --rank 16

Each step computes one token of each sequence, whose adapters take turns. Steps of each kind run in turn. The adapters
are of random numbers, for all linear layers but the head.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from array import array
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from bench import machine, medians
from bench.options import add_json, positive, write_result
from decant.bench import model_shapes as shapes
from decant.engine.loading import load
from decant.engine.model.model import ModelConfig, ModelDevice
from decant.engine.plan import Row, StepPlan
from decant.engine.request import Request

GOAL = 1.15
"""Time of a step with one adapter over that of one without."""
KV_BYTES = 1 << 30


def add_adapter(device: ModelDevice, rank: int, seed: int) -> str:
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, layer in device.model.named_modules():
        if name.endswith("_proj"):
            outputs, inner = layer.weight.shape
            prefix = f"base_model.model.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, inner, generator=generator).to(torch.bfloat16)
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator).to(torch.bfloat16)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 0.01, "target_modules": r".*_proj"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "adapter_config.json").write_text(json.dumps(config))
        save_file(tensors, folder / "adapter_model.safetensors")
        prepared = device.adapters.load(f"{seed}", folder)
    device.adapters.add(prepared)
    return prepared.digest


def plan(device: ModelDevice, sequences: int, context: int, digests: list[str]) -> StepPlan:
    """Step of one token of each sequence, behind ``context`` others."""
    rows, count = [], -(-(context + 1) // device.block_size)
    for index in range(sequences):
        tokens = [(index + at) % device.vocab_size for at in range(context + 1)]
        request = Request(f"{index}", tuple(tokens), adapter=digests[index % len(digests)] if digests else "")
        blocks = array("i", range(index * count, (index + 1) * count))
        rows.append(Row(request, tokens, context, context + 1, (blocks,), True))
    return StepPlan(tuple(rows), sequences)


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
