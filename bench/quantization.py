"""Weights in fewer bits beside the engine's own bfloat16: speed, memory and quality, in one process and in turn.

    python -m bench.quantization [--model qwen2.5-0.5b] [--runs 10] [--json OUT]

Decode steps of 1, 8 and 64 sequences and a prompt are timed on random weights in the shape of ``--model``. Quality is
the perplexity of the model tiny-python on the Python files that it was not trained on; the interpreter must be of the
version that it was trained with. Figures are medians.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, get_args

import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from bench import machine
from bench.comparison.own_engine import make_engine
from bench.comparison.steps import Case, decoding
from bench.medians import in_turn
from bench.options import add_json, positive, write_result
from decant import models
from decant.bench import model_shapes as shapes
from decant.engine.checkpoint.quantize import Quantization, quantize
from decant.engine.cpu.gemm import NativeWeight
from decant.engine.cpu.linear import PackedLinear
from decant.engine.engine import Engine
from decant.engine.loading import load
from decant.engine.model.model import ModelConfig, ModelDevice
from decant.engine.request import Request, StopParams
from decant.models import bpe, corpus, evaluate
from decant.runtime.cores import available_cores

PLAIN = "bfloat16"
KINDS: Sequence[str] = (PLAIN, *get_args(Quantization))
CASES = {"decode 1": Case(1, 128), "decode 8": Case(8, 128), "decode 64": Case(64, 128)}
BUDGET = 512
"""Tokens of a prompt's steps."""


def quantization(kind: str) -> Quantization | None:
    return None if kind == PLAIN else kind  # type: ignore[return-value]


def load_kinds(model: str, context: int, kv_bytes: int) -> dict[str, ModelDevice]:
    return {
        kind: load(
            ModelConfig(
                model, dtype=PLAIN, device="cpu", context_length=context, kv_bytes=kv_bytes, quantize=quantization(kind)
            )
        )
        for kind in KINDS
    }


def weight_bytes(device: ModelDevice) -> int:
    """Bytes of the linear layers and the head."""
    layers = [module for module in device.model.modules() if isinstance(module, PackedLinear)]
    products = [layer._product for layer in layers]
    return sum(product._weight.nbytes for product in products if isinstance(product, NativeWeight))


def measure(devices: Mapping[str, ModelDevice], runs: int, prompt: int) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield milliseconds by kind: of each case, and of a prompt."""
    for name, case in CASES.items():
        engines = [decoding(device, case, runs + 3) for device in devices.values()]
        yield name, dict(zip(devices, in_turn([engine.step for engine in engines], runs), strict=True))
    times = in_turn([prefill_of(device, prompt) for device in devices.values()], max(1, runs // 3))
    yield f"prompt of {prompt}", dict(zip(devices, times, strict=True))


def prefill_of(device: ModelDevice, prompt: int) -> Callable[[], None]:
    tokens = tuple(torch.randint(device.vocab_size, (prompt,), generator=torch.Generator().manual_seed(0)).tolist())

    def run() -> None:
        engine: Engine = make_engine(device, BUDGET)
        engine.add(Request(f"p{time.monotonic_ns()}", tokens, stop=StopParams(max_tokens=1, ignore_eos=True)))
        while engine.has_work:
            engine.step()

    return run


def perplexities(files: int | None = None) -> dict[str, float]:
    """Perplexity of tiny-python on its held-out files, with its weights in each kind, in float32."""
    tokenizer: Any = Tokenizer.from_file(str(models.path() / "tokenizer.json"))
    held_out = [source.text for source in corpus.read_sources(corpus.standard_library()) if source.held_out]
    documents = bpe.encode(tokenizer, held_out[:files])
    found = {}
    for kind in KINDS:
        model = LlamaForCausalLM.from_pretrained(models.path(), dtype=torch.float32).eval()
        if (to := quantization(kind)) is not None:
            quantize(model, to)
        found[kind] = math.exp(evaluate.mean_nats(model, documents))
    return found


def show(result: Mapping[str, Any], console: Console) -> None:
    table = Table("", *KINDS, title=f"{result['model_id']}, {result['threads']} threads")
    for name, times in result["milliseconds"].items():
        table.add_row(name, *(f"{times[kind]:.1f} ms ({times[PLAIN] / times[kind]:.2f})" for kind in KINDS))
    table.add_row("layers and head", *(f"{result['weight_bytes'][kind] / 1e6:.1f} MB" for kind in KINDS))
    if result["perplexity"]:
        plain = result["perplexity"][PLAIN]
        shown = (f"{each:.4f} ({each / plain - 1:+.2%})" for each in result["perplexity"].values())
        table.add_row("perplexity of tiny-python", *shown)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.quantization", description="weights in fewer bits")
    parser.add_argument("--model", default="qwen2.5-0.5b", help=f"a folder, or a shape: {', '.join(shapes.SHAPES)}")
    parser.add_argument("--runs", type=positive, default=10, help="of each kind, in turn")
    parser.add_argument("--prompt", type=positive, default=1024, help="tokens of the prompt")
    parser.add_argument("--threads", type=positive, default=available_cores())
    parser.add_argument("--files", type=positive, help="held-out files of which to compute the perplexity; unset: all")
    parser.add_argument("--no-quality", dest="quality", action="store_false", help="don't compute perplexities")
    add_json(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    context = max(args.prompt + 1, max(case.context for case in CASES.values()) + args.runs + 4)
    devices = load_kinds(str(shapes.checkpoint(args.model)), context, 400 << 20)
    result = {
        "machine": machine.facts(),
        "model_id": args.model,
        "threads": args.threads,
        "runs": args.runs,
        "milliseconds": dict(measure(devices, args.runs, args.prompt)),
        "weight_bytes": {kind: weight_bytes(device) for kind, device in devices.items()},
        "perplexity": perplexities(args.files) if args.quality else {},
    }
    write_result(result, args.json, partial(show, result, Console()))


if __name__ == "__main__":
    main()
