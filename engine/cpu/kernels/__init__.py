"""C++ kernels for x86-64: one build for AVX2, one for AVX-512 with BF16, VBMI and VBMI2. README.md has their history.

batch_from_python.h       the rows of a step as arrays (``engine/model/step_batch.py``)
panel_types.h             number formats of a panel of a weight
gemm.h                    rows times panels: the inner loop of linear layers and attention
weight.h                  the packed weight of a linear layer
gemm_bf16.h               rows times bfloat16 in twelve bits
linear.h                  linear layers (``engine/cpu/gemm.py``)
guard.h                   checks of arguments; exceptions in parallel regions
step.h, call.h            arguments of attention
attention.h               attention over blocks (``engine/cpu/attention.py``)
small_batch_attention.h   its inner loops for few rows (decode)
layer.h                   decoder layers in one call (``engine/cpu/fused_layer.py``)
elementwise.h             norms, gated activations, rotary embedding (``engine/cpu/fused_ops.py``)
simd_avx2.h, simd_bf16.h  vectors of eight and of sixteen numbers
sample.h                  the likeliest tokens, and sampled tokens (``engine/cpu/sampler.py``)
"""

from __future__ import annotations

import platform
from importlib import import_module
from types import ModuleType

import torch  # first: its libgomp is then the one that the kernels use

AMX = bool(torch.cpu.get_capabilities().get("amx_bf16"))
"""Whether the CPU multiplies tiles of bfloat16, which is left to oneDNN (``engine/cpu/gemm.py``)."""


def load() -> ModuleType | None:
    """The best module for this CPU; None without AVX2, or if the package was built without a C++ compiler."""
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
    """Architecture, capability of the CPU, and kernel module: what can change bits or speed."""
    own = KERNELS.__name__.rpartition(".")[2] if KERNELS else "torch"
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}{' AMX' * AMX} {own}"
