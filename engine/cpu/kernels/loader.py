from __future__ import annotations

import os
import platform
from importlib import import_module
from types import ModuleType

import torch  # first: its libgomp is then the one that the kernels use

AMX = bool(torch.cpu.get_capabilities().get("amx_bf16"))
"""Whether the CPU multiplies tiles of bfloat16.

oneDNN uses tiles for many rows and not for few, so that the bits of a row depend on the rows beside it. It is limited
to instructions that it uses for any number of rows.
"""
if AMX:
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # read at oneDNN's first operation


def load() -> ModuleType | None:
    """The best module for this CPU; None without AVX2, or if the package was built without a C++ compiler."""
    for name in supported_modules():
        try:
            return import_module(f"decant.engine.cpu.kernels.{name}")
        except ImportError:  # not built
            continue
    return None


def supported_modules() -> list[str]:
    has = torch.cpu.get_capabilities()
    match torch.backends.cpu.get_cpu_capability():
        case "AVX512" if all(has.get(f"avx512_{part}") for part in ("bf16", "vbmi", "vbmi2", "vnni")):
            return ["_kernels_avx512", "_kernels"]
        case "AVX512" | "AVX2":
            return ["_kernels"]
    return []


KERNELS = load()


def kind(kernels: ModuleType | None = KERNELS) -> str:
    own = kernels.__name__.rpartition(".")[2] if kernels else "torch"
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}{' AMX' * AMX} {own}"
