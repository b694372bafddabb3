"""Keys and values in 8 bits beside those in bfloat16: speed, memory and quality, in one process and in turn.

    python -m bench.kv_dtype [--model qwen2.5-0.5b] [--runs 10] [--json OUT]

Decode steps with long contexts are timed on random weights in the shape of ``--model``. Quality is that of the model
tiny-python as an engine computes it, in bfloat16, on the Python files that it was not trained on (the interpreter must
be of the version that it was trained with) and on 1,000 tokens that it writes:

error        root mean square difference of the logits, relative to their spread
perplexity   of the held-out files, in windows that overlap by half
agreement    of 1,000 tokens written greedily with bfloat16: how many are also the likeliest with the codes
undisturbed  of those, how many are written with the codes before the first that differs

Times are medians.
"""

from __future__ import annotations

import argparse
import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from torch.nn import functional

from bench import machine
from bench.comparison.steps import Case, decoding
from bench.medians import in_turn
from bench.options import add_json, positive, write_result
from decant import models
from decant.bench import model_shapes as shapes
from decant.engine.engine import Engine
from decant.engine.kv_layout import KV_DTYPES
from decant.engine.loading import load
from decant.engine.model.model import ModelConfig, ModelDevice
from decant.engine.plan import Row
from decant.engine.request import Request, StopParams
from decant.engine.scheduler import Limits
from decant.models import bpe, corpus
from decant.models.card import GREEDY_PROMPTS
from decant.models.evaluate import OVERLAP
from decant.runtime.cores import available_cores

PLAIN, CODED = KV_DTYPES
CASES = {"1 of 16,384 tokens": Case(1, 16_384), "8 of 4,096": Case(8, 4_096), "32 of 1,024": Case(32, 1_024)}
WRITTEN = 100
"""Tokens that follow each of the prompts."""

Devices = Mapping[str, ModelDevice]


def load_both(model: str, context: int | None, kv_bytes: int) -> dict[str, ModelDevice]:
    options: dict[str, Any] = {"dtype": "bfloat16", "device": "cpu", "context_length": context, "kv_bytes": kv_bytes}
    return {kind: load(ModelConfig(model, **options, kv_dtype=kind)) for kind in KV_DTYPES}


def measure(devices: Devices, runs: int) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield milliseconds of a decode step by kind, for each case."""
    for device in devices.values():
        device.store.blocks.fill_(1)  # memory that was never written costs nothing to read
    for name, case in CASES.items():
        engines = [decoding(device, case, runs + 3) for device in devices.values()]
        yield name, dict(zip(devices, in_turn([engine.step for engine in engines], runs), strict=True))


@torch.inference_mode()
def logits_of(device: ModelDevice, tokens: Sequence[int], first: int = 0) -> torch.Tensor:
    """Logits of the positions of a sequence from ``first`` on."""
    blocks = array("i", range(-(-len(tokens) // device.block_size)))
    row = Row(Request("r", tuple(tokens)), tokens, 0, len(tokens), (blocks,), True)
    return device.runner.logits([row], np.arange(first, len(tokens))).float()


def windows(document: Sequence[int], size: int) -> Iterator[tuple[Sequence[int], int]]:
    """Windows of a document, each with its first position of which no earlier window has the next token."""
    seen = 0
    for start in range(0, len(document), size // OVERLAP):
        piece = document[start : start + size]
        yield piece, seen - start
        seen = start + len(piece) - 1
        if seen == len(document) - 1:
            return


def held_out_quality(devices: Devices, documents: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Perplexity by kind, and the error of the codes' logits."""
    size = devices[PLAIN].context_length
    nats, count, squares, spread = dict.fromkeys(devices, 0.0), 0, 0.0, 0.0
    for piece, first in (window for document in documents for window in windows(document, size)):
        logits = {kind: logits_of(device, piece, first)[:-1] for kind, device in devices.items()}
        targets = torch.tensor(piece[first + 1 :])
        for kind, rows in logits.items():
            nats[kind] += functional.cross_entropy(rows, targets, reduction="sum").item()
        difference = logits[CODED] - logits[PLAIN]
        squares += difference.square().mean(-1).double().sum().item()
        spread += logits[PLAIN].var(-1).double().sum().item()
        count += len(targets)
    perplexity = {kind: math.exp(total / count) for kind, total in nats.items()}
    return {"tokens": count, "perplexity": perplexity, "error": math.sqrt(squares / spread)}


def written(device: ModelDevice, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    engine = Engine(device, Limits(context_length=512))
    for index, prompt in enumerate(prompts):
        engine.add(Request(str(index), tuple(prompt), stop=StopParams(max_tokens=WRITTEN, ignore_eos=True)))
    tokens: list[list[int]] = [[] for _ in prompts]
    while engine.has_work:
        for event in engine.step().tokens:
            tokens[int(event.id)].append(event.token)
    return tokens


def agreement(devices: Devices, prompts: Sequence[Sequence[int]]) -> dict[str, int]:
    plain, coded = (written(devices[kind], prompts) for kind in (PLAIN, CODED))
    agreed = undisturbed = 0
    for prompt, expected, found in zip(prompts, plain, coded, strict=True):
        logits = logits_of(devices[CODED], [*prompt, *expected[:-1]], len(prompt) - 1)
        agreed += int((logits.argmax(-1) == torch.tensor(expected)).sum())
        differs = [one != other for one, other in zip(expected, found, strict=True)]
        undisturbed += differs.index(True) if True in differs else len(differs)
    return {"tokens": sum(map(len, plain)), "agreement": agreed, "undisturbed": undisturbed}


def quality(files: int | None) -> dict[str, Any]:
    tokenizer: Any = Tokenizer.from_file(str(models.path() / "tokenizer.json"))
    devices = load_both(str(models.path()), None, 64 << 20)
    texts = [source.text for source in corpus.read_sources(corpus.standard_library()) if source.held_out]
    documents = [document.tolist() for document in bpe.encode(tokenizer, texts[:files])]
    prompts = [tokenizer.encode(prompt).ids for prompt in GREEDY_PROMPTS]
    return {"held_out": held_out_quality(devices, documents), "greedy": agreement(devices, prompts)}


def show(result: Mapping[str, Any], console: Console) -> None:
    table = Table("", "bfloat16", CODED, title=f"{result['model_id']}, {result['threads']} threads")
    for name, times in result["milliseconds"].items():
        table.add_row(name, *(f"{time:.1f} ms ({times[PLAIN] / time:.2f})" for time in times.values()))
    table.add_row("KV of a token", *(f"{size:,.0f} bytes" for size in result["token_bytes"].values()))
    if found := result["quality"]:
        held_out, greedy = found["held_out"], found["greedy"]
        plain = held_out["perplexity"][PLAIN]
        shown = (f"{each:.4f} ({each / plain - 1:+.3%})" for each in held_out["perplexity"].values())
        table.add_row(f"perplexity of {held_out['tokens']:,} tokens", *shown)
        table.add_row("error of the logits", "", f"{held_out['error']:.2%} of their spread")
        for name in ("agreement", "undisturbed"):
            table.add_row(f"{name} of {greedy['tokens']:,} tokens", "", f"{greedy[name]:,}")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.kv_dtype", description="keys and values in 8 bits")
    parser.add_argument("--model", default="qwen2.5-0.5b", help=f"a folder, or a shape: {', '.join(shapes.SHAPES)}")
    parser.add_argument("--runs", type=positive, default=10, help="of each kind, in turn")
    parser.add_argument("--threads", type=positive, default=available_cores())
    parser.add_argument("--kv-memory", type=positive, default=512, help="MiB of keys and values, of each kind")
    parser.add_argument("--files", type=positive, help="held-out files to read; unset: all")
    parser.add_argument("--no-quality", dest="quality", action="store_false", help="measure the speed alone")
    add_json(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    longest = max(case.context for case in CASES.values()) + args.runs + 64
    devices = load_both(str(shapes.checkpoint(args.model)), longest, args.kv_memory << 20)
    result = {
        "machine": machine.facts(),
        "model_id": args.model,
        "threads": args.threads,
        "runs": args.runs,
        "milliseconds": dict(measure(devices, args.runs)),
        "token_bytes": {
            kind: device.block_bytes * len(device.windows) / device.block_size for kind, device in devices.items()
        },
        "quality": quality(args.files) if args.quality else {},
    }
    write_result(result, args.json, partial(show, result, Console()))


if __name__ == "__main__":
    main()
