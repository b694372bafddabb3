"""The cost of guided output: masks, and tokens per second of an engine with and without a guide.

    python -m bench.guided [--model qwen2.5-0.5b] [--rows 64] [--tokens 96] [--runs 5] [--json OUT]

A shape has random weights, and a tokenizer with as many tokens as its vocabulary. Every sequence has a schema of 200
properties of its own, which no output of ``--tokens`` completes: both contenders compute the same number of tokens, in
turn after a warm-up. The sequences of a step are all guided, half of them, or none; ``drawn`` are all guided ones, of
which every token is drawn: without forced tokens. Their outputs have to be the same. ``cpu_ms`` are the least of the
runs, of all threads, for a token of each sequence. ``masks_us``, CPU time, are of a matcher along such an output.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from bench import machine, vocabulary
from bench.options import add_json, positive, write_result
from decant import models
from decant.bench import model_shapes as shapes
from decant.engine.engine import Engine
from decant.engine.guides.compiler import Grammar, GrammarCompiler
from decant.engine.guides.guide import Guide, GuideKind
from decant.engine.loading import load
from decant.engine.model.model import ModelConfig
from decant.engine.plan import Device
from decant.engine.request import Request, SamplingParams, StopParams
from decant.engine.scheduler import Limits
from decant.runtime.cores import available_cores

KEYS = 200
PROMPT = 32


def schema(number: int) -> str:
    kinds: list[dict[str, Any]] = [
        {"type": "string", "maxLength": 40},
        {"type": "integer", "minimum": 0, "maximum": 10**6},
        {"enum": ["red", "green", "blue"]},
        {"type": "array", "items": {"type": "number"}, "maxItems": 8},
    ]
    properties = {f"key_{number}_{key}": kinds[key % len(kinds)] for key in range(KEYS)}
    described = {"type": "object", "properties": properties, "required": list(properties)}
    return json.dumps({**described, "additionalProperties": False})


def masks_us(grammars: Sequence[Grammar], vocabulary: int, tokens: int) -> dict[str, float]:
    """Microseconds of CPU time of a token and the mask behind it, along random outputs."""
    times, draw = [], np.random.default_rng(0)
    for grammar in grammars:
        matcher = grammar.new_matcher()
        for _ in range(tokens):
            allowed = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            token = int(draw.choice(np.flatnonzero(allowed[:vocabulary])))
            began = time.thread_time()  # both compute on this thread
            matcher.consume_token(token)
            matcher.compute_bitmask()
            times.append(1e6 * (time.thread_time() - began))
            assert not matcher.is_error(), matcher.get_error()
    shares = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {name: float(np.quantile(times, share)) for name, share in shares.items()} | {"masks": float(len(times))}


class Rate(NamedTuple):
    tokens_per_s: float
    cpu_ms: float
    tokens_per_row: float
    """Of a step, and a sequence."""


Outputs = dict[str, list[int]]


def rate_of(device: Device, requests: Sequence[Request], *, forces: bool = True) -> tuple[Rate, Outputs]:
    engine = Engine(device, Limits(512, len(requests), min(1024, device.context_length)))
    if not forces:
        engine.most_forced = 0
    outputs: Outputs = {request.id: [] for request in requests}

    def step() -> int:
        tokens = engine.step().tokens
        for token in tokens:
            outputs[token.id].append(token.token)
        return len(tokens)

    for request in requests:
        engine.add(request)
    while len(engine.scheduler.running) < len(requests) or any(
        each.num_remaining > 1 + each.num_forced for each in engine.scheduler.running
    ):
        step()  # prompts
    began, cpu, steps, count = time.perf_counter(), time.process_time(), engine.steps, 0
    while engine.has_work:
        count += step()
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    per_row = count / len(requests)
    return Rate(count / seconds, 1000 * cpu / per_row, per_row / (engine.steps - steps)), outputs


def requests_of(grammars: Sequence[Grammar | None], vocabulary: int, tokens: int) -> list[Request]:
    prompts = np.random.default_rng(1).integers(3, vocabulary - 1, (len(grammars), PROMPT)).tolist()
    return [
        Request(
            f"r{number}",
            tuple(prompt),
            sampling=SamplingParams(temperature=1.0, seed=number),
            stop=StopParams(tokens, ignore_eos=grammar is None),
            grammar=grammar,
            use_prefix_cache=False,
        )
        for number, (prompt, grammar) in enumerate(zip(prompts, grammars, strict=True))
    ]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(args.threads)
    folder = shapes.checkpoint(args.model)
    config = ModelConfig(model=str(folder), dtype="bfloat16", device="cpu", kv_bytes=args.kv_bytes)
    device = load(replace(config, eos_token_ids=frozenset({args.eos})))
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as made:
        tokenizer = folder / shapes.TOKENIZER
        if args.model in shapes.SHAPES:
            tokenizer = Path(made) / shapes.TOKENIZER
            vocabulary.write(device.vocab_size, tokenizer)
            began = time.perf_counter()
        compiler = GrammarCompiler(tokenizer, device.vocab_size, frozenset({args.eos}))
    tokenizer_s, began = time.perf_counter() - began, time.perf_counter()
    assert not compiler.refusal, compiler.refusal
    grammars = [compiler.grammar(Guide(GuideKind.JSON_SCHEMA, schema(number))) for number in range(args.rows)]
    for grammar in grammars:
        grammar.prepare()
    compile_ms = 1000 * (time.perf_counter() - began) / len(grammars)
    half = [grammar if number % 2 else None for number, grammar in enumerate(grammars)]
    contenders: dict[str, Sequence[Grammar | None]] = {
        "none": [None] * args.rows,
        "half": half,
        "drawn": grammars,
        "all": grammars,
    }
    rates: dict[str, list[Rate]] = {name: [] for name in contenders}
    outputs: dict[str, Outputs] = {}
    for run in range(args.runs + 1):
        for name, of in contenders.items():
            requests = requests_of(of, device.vocab_size, args.tokens)
            rate, outputs[name] = rate_of(device, requests, forces=name != "drawn")
            if run:
                rates[name].append(rate)
        assert outputs["drawn"] == outputs["all"]
    return {
        "machine": machine.facts(), "model": Path(args.model).name, "vocabulary": device.vocab_size,
        "threads": args.threads, "rows": args.rows,
        "tokenizer_s": tokenizer_s, "compile_ms": compile_ms,
        "masks_us": masks_us(grammars[:16], device.vocab_size, args.tokens),
        "tokens_per_s": {name: statistics.median(one.tokens_per_s for one in each) for name, each in rates.items()},
        "cpu_ms": {name: min(one.cpu_ms for one in each) for name, each in rates.items()},
        "tokens_per_row": {name: each[0].tokens_per_row for name, each in rates.items()}, "runs": rates,
    }  # fmt: skip


def show(result: dict[str, Any]) -> None:
    model = f"{result['model']}, {result['vocabulary']:,} tokens"
    table = Table(title=f"{model}: {result['rows']} sequences, {result['threads']} threads")
    for heading in ("guided", "tokens/s", "of none", "CPU ms a token", "tokens a step"):
        table.add_column(heading, justify="right" if heading != "guided" else "left")
    rates = result["tokens_per_s"]
    for name, rate in rates.items():
        table.add_row(
            name,
            f"{rate:,.0f}",
            f"{rate / rates['none']:.1%}",
            f"{result['cpu_ms'][name]:.1f}",
            f"{result['tokens_per_row'][name]:.2f}",
        )
    Console().print(table)
    masks = result["masks_us"]
    times = ", ".join(f"{name} {masks[name]:.0f} us" for name in ("p50", "p99", "max"))
    print(f"CPU time of a token and its mask: {times}")
    print(f"schema of {KEYS} keys: {result['compile_ms']:.1f} ms; tokenizer: {result['tokenizer_s']:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.guided", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default=str(models.path()), help=f"a folder, or a shape: {', '.join(shapes.SHAPES)}")
    parser.add_argument("--eos", type=int, default=1, help="id of the end token")
    parser.add_argument("--rows", type=positive, default=64)
    parser.add_argument("--tokens", type=positive, default=96)
    parser.add_argument("--kv-bytes", type=positive, default=1 << 28)
    parser.add_argument("--threads", type=positive, default=available_cores())
    parser.add_argument("--runs", type=positive, default=5)
    add_json(parser)
    args = parser.parse_args()
    result = measure(args)
    write_result(result, args.json, lambda: show(result))


if __name__ == "__main__":
    main()
