"""What is written in C++, for CPUs with AVX2, and once more for those that multiply bfloat16 (AVX512 with BF16, VBMI,
VBMI2); compiled at install where there is a compiler.

rows.h        the rows of a step as arrays (``engine/model/step_batch.py``)
columns.h     what a panel of a weight is, on either CPU
tile.h        rows times panels: the inner loop of the next four
weight.h      how a linear layer's weight lies in memory
stream.h      rows times bfloat16 in twelve bits
product.h     linear layers (``engine/cpu/gemm.py``)
guard.h       checks of what callers hand over; exceptions in parallel regions
call.h        what a call of attention reads and writes
attention.h   attention over blocks (``engine/cpu/attention.py``)
few.h         its inner loops where a few rows share keys, as they do while decoding
layer.h       a decoder layer in one call (``engine/cpu/fused_layer.py``)
small.h       norms, gated activations, rotations (``engine/cpu/fused_ops.py``), in the lanes of lanes.h
pairs.h       sixteen numbers at a time, and keys and values as pairs, for CPUs that multiply bfloat16
sample.h      the likeliest tokens, and tokens drawn from scores (``engine/model/sampler.py``)
"""

from __future__ import annotations

import platform
from importlib import import_module
from types import ModuleType

import torch  # first: its libgomp is then the one that the kernels use

AMX = bool(torch.cpu.get_capabilities().get("amx_bf16"))
"""Whether the CPU multiplies tiles of bfloat16, which these kernels leave to oneDNN (``engine/cpu/gemm.py``)."""


def load() -> ModuleType | None:
    """None on a CPU without AVX2, or where the package was built without a C++ compiler."""
    for name in fitting():
        try:
            return import_module(f"decant.engine.cpu.kernels.{name}")
        except ImportError:  # not built
            continue
    return None


def fitting() -> list[str]:
    """Modules that this CPU can run, the best first."""
    has = torch.cpu.get_capabilities()
    match torch.backends.cpu.get_cpu_capability():
        case "AVX512" if all(has.get(f"avx512_{part}") for part in ("bf16", "vbmi", "vbmi2")):
            return ["_kernels_avx512", "_kernels"]
        case "AVX512" | "AVX2":
            return ["_kernels"]
    return []


KERNELS = load()


def kind() -> str:
    """What makes the bits of two workers differ, or their speed: architecture and capability of the CPU, and whose
    kernels it runs."""
    own = KERNELS.__name__.rpartition(".")[2] if KERNELS else "torch"
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}{' AMX' * AMX} {own}"
