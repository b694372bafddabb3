"""What is written in C++, for CPUs with AVX2; compiled at install where there is a compiler.

rows.h        the rows of a step as arrays (``engine/flat.py``)
tile.h        rows times panels: the inner loop of the next two
product.h     linear layers (``engine/products.py``)
attention.h   attention over blocks (``engine/attention/native.py``)
few.h         its inner loops where a few rows share keys, as they do while decoding
layer.h       a decoder layer in one call (``engine/layer.py``)
small.h       norms, gated activations, rotations (``engine/small.py``), in the lanes of lanes.h
sample.h      the likeliest tokens, and tokens drawn from scores (``engine/sampler.py``)
"""

from __future__ import annotations

from types import ModuleType

import torch  # first: its libgomp is then the one that the kernels use


def load() -> ModuleType | None:
    """None on a CPU without AVX2, or where the package was built without a C++ compiler."""
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return None
    try:
        from engine.native import _kernels
    except ImportError:
        return None
    return _kernels


KERNELS = load()


def kind() -> str:
    """What makes the bits of two workers differ, or their speed: the CPU's capability, and who multiplies on it."""
    return f"{torch.backends.cpu.get_cpu_capability()} {'native' if KERNELS else 'torch'}"
