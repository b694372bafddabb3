"""Weights in fewer bits beside the engine's own bfloat16: speed, memory and quality, in one process and in turn.

    python -m bench.quantization [--model qwen2.5-0.5b] [--runs 10] [--peers] [--json OUT]

Decode steps of 1, 8 and 64 sequences and a prompt are timed on random weights in the shape of ``--model``. In w8a8 and
w4a8 inputs of linear layers are rounded to int8, too (``--activations int8``). Quality is
the perplexity of the model tiny-python on the Python files that it was not trained on; the interpreter must be of the
version that it was trained with. Figures are medians. With --peers, the steps of OpenVINO and llama.cpp are measured
after these, with their own weights in the same kinds: the former in an environment of its own, the latter by libraries
that npm fetches, with BF16, Q8_0 and Q4_0. A peer that can't be installed or fails is left out.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from bench import machine
from bench.comparison.contenders import CONTENDERS, Contender, Unavailable
from bench.comparison.contenders import run as run_contender
from bench.comparison.own_engine import make_engine
from bench.comparison.steps import Case, decoding
from bench.comparison.subprocess_runner import Job
from bench.medians import in_turn
from bench.options import add_json, positive, write_result
from bench.workloads import Item
from decant import models
from decant.bench import model_shapes as shapes
from decant.engine.checkpoint.coded_linear import round_rows
from decant.engine.checkpoint.quantize import Quantization, quantize
from decant.engine.cpu.gemm import NativeWeight
from decant.engine.cpu.kernels.loader import KERNELS
from decant.engine.cpu.linear import PackedLinear, pack
from decant.engine.engine import Engine
from decant.engine.loading import load
from decant.engine.model.model import Activations, ModelConfig, ModelDevice
from decant.engine.request import Request, StopParams
from decant.models import bpe, corpus, evaluate
from decant.runtime.cores import available_cores

PLAIN = "bfloat16"


class Kind(NamedTuple):
    quantize: Quantization | None
    activations: Activations = "auto"


KINDS: Mapping[str, Kind] = {
    PLAIN: Kind(None),
    "int8": Kind("int8"),
    "int4": Kind("int4"),
    "w8a8": Kind("int8", "int8"),
    "w4a8": Kind("int4", "int8"),
}
PEER_KINDS: Sequence[str] = (PLAIN, "int8", "int4")
CASES = {"decode 1": Case(1, 128), "decode 8": Case(8, 128), "decode 64": Case(64, 128)}
BUDGET = 512
"""Tokens of a prompt's steps."""


def load_kinds(model: str, context: int, kv_bytes: int) -> dict[str, ModelDevice]:
    config = ModelConfig(model, dtype=PLAIN, device="cpu", context_length=context, kv_bytes=kv_bytes)
    return {name: load(replace(config, **kind._asdict())) for name, kind in KINDS.items()}


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
    for name, kind in KINDS.items():
        model = LlamaForCausalLM.from_pretrained(models.path(), dtype=torch.float32).eval()
        if kind.quantize is not None:
            quantize(model, kind.quantize)
        if kind.activations != "auto":
            round_rows(model)
            pack(model, KERNELS)
        found[name] = math.exp(evaluate.mean_nats(model, documents))
    return found


PEERS: Mapping[str, Contender] = {
    "OpenVINO": CONTENDERS["openvino"]._replace(module="bench.baselines.openvino_steps"),
    "llama.cpp": Contender("llama.cpp", "bench.baselines.llama_cpp_steps"),
}


def peer_items(vocabulary: int, runs: int, prompt: int) -> tuple[Item, ...]:
    """The same cases for ``openvino_steps`` and ``llama_cpp_steps``."""
    rng = Random(0)

    def item(name: str, tokens: int, output: int) -> Item:
        return Item(name, [rng.randrange(vocabulary) for _ in range(tokens)], output, 0.0)

    def output(case: Case) -> int:
        """Enough that all run together for some steps, after the last prompt."""
        return runs + 2 + 2 * math.ceil(case.sequences * case.context / BUDGET)

    items = [
        item(f"{name}/{at}", case.context, output(case)) for name, case in CASES.items() for at in range(case.sequences)
    ]
    return (*items, *(item(f"prompt of {prompt}/{at}", prompt, 1) for at in range(max(1, runs // 3))))


def measure_peers(job: Job, console: Console) -> dict[str, dict[str, dict[str, float]]]:
    """Milliseconds by peer, case and kind, of the peers that run here."""
    found = {}
    for title in PEERS:
        try:
            found[title] = measure_peer(title, job, console)
        except Unavailable as error:
            console.print(f"{title}: {error}")
    return found


def measure_peer(title: str, job: Job, console: Console) -> dict[str, dict[str, float]]:
    by_kind = {}
    for kind in PEER_KINDS:
        console.print(f"{title}, {kind} ...")
        weights = KINDS[kind].quantize or "plain"
        by_kind[kind] = run_contender(PEERS[title], replace(job, weights=weights), lambda _: None, lambda line: None)
    return {name: {kind: by_kind[kind][name] for kind in PEER_KINDS} for name in by_kind[PLAIN]}


def show(result: Mapping[str, Any], console: Console) -> None:
    table = Table("", *KINDS, title=f"{result['model_id']}, {result['threads']} threads")
    for name, times in result["milliseconds"].items():
        table.add_row(name, *(f"{times[kind]:.1f} ms ({times[PLAIN] / times[kind]:.2f})" for kind in KINDS))
    for title, cases in result["peers"].items():
        for name, times in cases.items():
            table.add_row(f"{title}, {name}", *(f"{times[kind]:.1f} ms" for kind in PEER_KINDS))
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
    parser.add_argument("--peers", action="store_true", help=f"also {' and '.join(PEERS)}")
    parser.add_argument(
        "--peer-dtype", choices=(PLAIN, "float32"), default=PLAIN, help="what peers compute in, where bfloat16 fails"
    )
    add_json(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    context = max(args.prompt + 1, max(case.context for case in CASES.values()) + args.runs + 4)
    model = str(shapes.checkpoint(args.model))
    devices = load_kinds(model, context, 400 << 20)
    result = {
        "machine": machine.facts(),
        "model_id": args.model,
        "threads": args.threads,
        "runs": args.runs,
        "milliseconds": dict(measure(devices, args.runs, args.prompt)),
        "weight_bytes": {kind: weight_bytes(device) for kind, device in devices.items()},
        "perplexity": perplexities(args.files) if args.quality else {},
        "peers": {},
        "peer_dtype": args.peer_dtype,
    }
    if args.peers:
        items = peer_items(devices[PLAIN].vocab_size, args.runs, args.prompt)
        devices.clear()
        job = Job(model, args.peer_dtype, args.threads, items, BUDGET)
        result["peers"] = measure_peers(job, Console(stderr=True))
    write_result(result, args.json, partial(show, result, Console()))


if __name__ == "__main__":
    main()
