"""Several outputs of one prompt beside one, in one engine: time to the first tokens, and KV memory.

python -m bench.several_outputs --model qwen2.5-0.5b --prompt-tokens 2000 --outputs 8

Requests with one output and with several run in turn, each with a new prompt and without the prefix cache. The time
ends with the step in which each output has its first token.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import asdict, dataclass, replace
from random import Random

from rich.console import Console
from rich.table import Table

from bench import machine
from bench.options import add_json, positive, write_result
from decant.bench import model_shapes as shapes
from decant.engine.engine import Engine
from decant.engine.loading import load
from decant.engine.model.model import ModelConfig
from decant.engine.request import Request, SamplingParams, StopParams

GOAL = 1.10
"""Time to the first tokens of several outputs over that of one."""
KV_BYTES = 1 << 30


@dataclass(frozen=True)
class Run:
    outputs: int
    first_tokens_s: float
    blocks: int


def measure(engine: Engine, outputs: int, prompt: tuple[int, ...], number: int) -> Run:
    whole = Request(
        f"{number}",
        prompt,
        sampling=SamplingParams(temperature=1.0, seed=number),
        stop=StopParams(max_tokens=2, ignore_eos=True),
        use_prefix_cache=False,
    )
    requests = [
        replace(whole, id=f"{number}/{index}", sampling=replace(whole.sampling, output_index=index))
        for index in range(outputs)
    ]
    began, seen = time.perf_counter(), set[str]()
    engine.add(requests[0], requests[1:])
    while len(seen) < outputs:
        seen |= {token.id for token in engine.step().tokens}
    seconds, blocks = time.perf_counter() - began, engine.load().held_blocks
    while engine.has_work:
        engine.step()
    return Run(outputs, seconds, blocks)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.several_outputs", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen2.5-0.5b", help=f"a folder, or a shape: {', '.join(shapes.SHAPES)}")
    parser.add_argument("--prompt-tokens", type=positive, default=2000)
    parser.add_argument("--outputs", type=positive, default=8)
    parser.add_argument("--runs", type=positive, default=5)
    add_json(parser)
    args = parser.parse_args()
    device = load(ModelConfig(str(shapes.checkpoint(args.model)), kv_bytes=KV_BYTES))
    engine, random = Engine(device), Random(0)
    runs: list[Run] = []
    for number in range(2 * (1 + args.runs)):
        prompt = tuple(random.randrange(device.vocab_size) for _ in range(args.prompt_tokens))
        runs.append(measure(engine, (1, args.outputs)[number % 2], prompt, number))
    runs = runs[2:]  # the first of each warm up
    table = Table("outputs", "first tokens, median", "all runs", "blocks")
    medians = {}
    for outputs in (1, args.outputs):
        own = [run for run in runs if run.outputs == outputs]
        medians[outputs] = statistics.median(run.first_tokens_s for run in own)
        times = ", ".join(f"{run.first_tokens_s * 1000:.0f}" for run in own)
        table.add_row(str(outputs), f"{medians[outputs] * 1000:.0f} ms", times, str(own[0].blocks))
    ratio = medians[args.outputs] / medians[1]
    result = {
        "model": args.model,
        "prompt_tokens": args.prompt_tokens,
        "block_size": device.block_size,
        "runs": [asdict(run) for run in runs],
        "ratio": ratio,
        "machine": machine.facts(),
    }
    line = f"{ratio:.3f} times the time of one output (goal: at most {GOAL:g})"
    write_result(result, args.json, lambda: Console().print(table, line, sep="\n"))
    return 0 if ratio <= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
