"""The cost of sampling, from a step's logits to its tokens, by kind of request.

    python -m bench.sampling [--rows 64] [--vocabulary 151936] [--written 200] [--json OUT]

Sampling alternates with one softmax, the lower bound in tensor operations, and with the fallback without kernels.
Figures are medians.
"""

from __future__ import annotations

import argparse
from array import array
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench import machine
from bench.medians import in_turn
from bench.options import add_json, positive, write_result
from decant.engine.backends import make_backend
from decant.engine.cpu.sampler import SCORES_AT_ONCE
from decant.engine.model.sampler import Sampler
from decant.engine.plan import Row
from decant.engine.request import Request, SamplingParams
from decant.engine.sampler_state import SamplerState
from decant.runtime.cores import available_cores

KINDS: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "greedy": {},
        "temperature": {"temperature": 0.8},
        "top-p": {"temperature": 0.8, "top_p": 0.9},
        "top-k, top-p": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
        "penalties": {"temperature": 0.8, "presence_penalty": 0.5},
    }
)
WRITTEN = 200


def make_rows(count: int, vocabulary: int, kind: Mapping[str, Any], written: int = WRITTEN) -> list[Row]:
    tokens = torch.randint(vocabulary, (count, written), generator=torch.Generator().manual_seed(0)).tolist()
    requests = [
        Request(f"s{seed}", (of[0],), sampling=SamplingParams(seed=seed, **kind)) for seed, of in enumerate(tokens)
    ]
    return [
        Row(request, of, written - 1, written, (array("i"),), True, SamplerState(request))
        for request, of in zip(requests, tokens, strict=True)
    ]


def make_logits(count: int, vocabulary: int) -> torch.Tensor:
    """Random bfloat16 logits; some tens of tokens have high values, as in a trained model."""
    generator = torch.Generator().manual_seed(1)
    logits = 2 * torch.randn(count, vocabulary, generator=generator)
    logits[:, :40] += 8 + 8 * torch.rand(count, 40, generator=generator)
    return logits.to(torch.bfloat16)


def in_tensor_operations(rows: list[Row], logits: torch.Tensor) -> list[int]:
    return Sampler(SCORES_AT_ONCE).sample(rows, logits, frozenset())


def measure(count: int, vocabulary: int, runs: int, written: int = WRITTEN) -> dict[str, Any]:
    logits = make_logits(count, vocabulary)
    kinds, sampler = {}, make_backend(torch.device("cpu")).sampler
    for name, kind in track(KINDS.items(), "measuring", console=Console(stderr=True), transient=True):
        rows = make_rows(count, vocabulary, kind, written)
        contenders: dict[str, Callable[[], object]] = {
            "softmax_ms": lambda: torch.softmax(logits.float(), -1),
            "sample_ms": lambda rows=rows: sampler.sample(rows, logits, frozenset()),  # type: ignore[misc]
            "tensor_operations_ms": lambda rows=rows: in_tensor_operations(rows, logits),  # type: ignore[misc]
        }
        kinds[name] = dict(zip(contenders, in_turn(list(contenders.values()), runs), strict=True))
    facts = {"machine": machine.facts(), "threads": torch.get_num_threads(), "rows": count, "vocabulary": vocabulary}
    facts["written"] = written
    return {**facts, "kinds": kinds}


def show(result: dict[str, Any]) -> None:
    title = f"{result['rows']} rows, {result['vocabulary']:,} tokens, {result['threads']} threads; ms"
    table = Table(title=title)
    for heading in ("", "one softmax", "sample", "in tensor operations"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, times in result["kinds"].items():
        table.add_row(name, *(f"{ms:,.1f}" for ms in times.values()))
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.sampling", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=positive, default=64)
    parser.add_argument("--vocabulary", type=positive, default=151_936)
    parser.add_argument("--written", type=positive, default=WRITTEN, help="tokens that each sequence has so far")
    parser.add_argument("--threads", type=positive, default=available_cores())
    parser.add_argument("--runs", type=positive, default=7)
    add_json(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    result = measure(args.rows, args.vocabulary, args.runs, args.written)
    write_result(result, args.json, lambda: show(result))


if __name__ == "__main__":
    main()
