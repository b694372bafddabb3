"""Measure the engine on one GPU, in less than 8 minutes.

    python -m bench.gpu --json OUT.json
    python -m bench.gpu --device cpu --tiny        to test this command: the figures mean nothing

Needs torch, transformers, triton and numpy. Weights are random, in the shape of Llama-3.1-8B.
"""

from __future__ import annotations

import argparse
import dataclasses
import platform
import sys
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

import torch
import transformers

from bench.gpu.rows import Bench, Row, measure
from bench.gpu.shapes import TINY, Served, Sizes
from bench.options import add_json, write_result
from decant.engine.checkpoint.quantize import QUANTIZATIONS
from decant.engine.kv_layout import KV_DTYPES
from decant.engine.model.backend import CudaKernels

SECONDS = 400.0

PARTS = (
    *("decode", "prompt", "mixed", "idle", "interference", "dependent", "exact", "adapters"),
    *("queue", "queue-1b", "transformers"),
)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to test this command")
    parser.add_argument("--cuda-kernels", choices=("triton", "none"), default="triton")
    parser.add_argument(
        "--skinny-rows", type=int, help="rows up to which own kernels multiply, 0 to 16; 0: torch always"
    )
    parser.add_argument("--no-dependent-launch", action="store_true", help="start each kernel after the one before")
    parser.add_argument("--block-size", type=int, help="tokens of a block of KV")
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, default="auto")
    parser.add_argument("--quantize", choices=QUANTIZATIONS, help="weights, from random bfloat16 ones")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="no part begins later")
    add_json(parser)
    return parser


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser()
    args = parser.parse_args(arguments)
    names = args.parts.split(",")
    if unknown := set(names) - set(PARTS):
        parser.error(f"--parts: of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("--device: cpu on a machine without a GPU (with --tiny)")
    if problem := choose_products(args, device):
        parser.error(problem)
    kernels: CudaKernels = args.cuda_kernels if device.type == "cuda" else "none"
    bench = Bench(
        TINY if args.tiny else Sizes(), device, Served(kernels, args.block_size, args.kv_dtype, args.quantize)
    )
    head = describe(bench, tiny=args.tiny)
    print("\n".join(f"{name}: {value}" for name, value in head.items()), file=sys.stderr)
    rows: list[dict[str, Any]] = []
    for row in measure(bench, names, args.seconds):
        rows.append(dataclasses.asdict(row) | {"verdict": row.verdict})
        print(line(row), file=sys.stderr, flush=True)
        if args.json != "-":  # what is measured stays if a later part ends the process
            write_result(head | {"loads": bench.loads, "rows": rows}, args.json, lambda: None)
    if args.json == "-":
        write_result(head | {"loads": bench.loads, "rows": rows}, args.json, lambda: None)
    return 0


def choose_products(args: argparse.Namespace, device: torch.device) -> str:
    """Let the engine multiply as the options say, or return what is wrong with them."""
    rows, is_independent = args.skinny_rows, args.no_dependent_launch
    if rows is None and not is_independent:
        return ""
    if device.type != "cuda" or args.cuda_kernels != "triton":
        return "--skinny-rows and --no-dependent-launch: of Triton kernels on a GPU only"
    from decant.engine.cuda import dependent_launch, skinny  # they need triton

    if rows is not None:
        if not 0 <= rows <= skinny.TILE_ROWS:
            return f"--skinny-rows: 0 to {skinny.TILE_ROWS}, got {rows}"
        skinny.SKINNY_ROWS = rows
    if is_independent:
        capability = torch.cuda.get_device_capability(device)
        if capability < dependent_launch.LEAST_CAPABILITY:
            return f"--no-dependent-launch: needs compute capability 9.0, got {'.'.join(map(str, capability))}"
        dependent_launch.ENABLED = False
    return ""


def describe(bench: Bench, *, tiny: bool) -> dict[str, Any]:
    is_cuda = bench.device.type == "cuda"
    return {
        "note": "a tiny model: the figures mean nothing" if tiny else "",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(bench.device) if is_cuda else platform.machine(),
        "driver": torch.version.cuda if is_cuda else None,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "triton": metadata.version("triton") if is_cuda else None,
        "python": platform.python_version(),
        "served": dataclasses.asdict(bench.how),
        "command": " ".join(["python -m bench.gpu", *sys.argv[1:]]),
        "bandwidth_gb_s": bench.bandwidth / 1e9,
        "product_tflop_s": bench.rate / 1e12,
    }


def line(row: Row) -> str:
    if row.value is None:
        return f"{row.name:<90} {row.verdict}"
    target = "" if row.least is None else f"{'at most' if row.is_most else 'at least'} {row.least:g}: {row.verdict}"
    details = ", ".join(f"{name} {value:.4g}" for name, value in row.detail.items() if type(value) in (int, float))
    return f"{row.name:<90} {row.value:>10.4g} {row.unit:<13} {target:<24} {details}"


if __name__ == "__main__":
    sys.exit(main())
