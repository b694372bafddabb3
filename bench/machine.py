from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from bench.comparison.subprocess_runner import Job, OnProgress
from decant.runtime.cores import usable_cores

FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")

TRIES = 10
PRODUCT = (1024, 896, 4864)
"""Rows, inner length and columns."""


def facts() -> dict[str, Any]:
    info = _cpuinfo()
    flags = info.get("flags", "").split()
    return {
        "cpu": info.get("model name", platform.machine()),
        "cpu_family_model": f"{info.get('cpu family', '?')}/{info.get('model', '?')}",
        "cores": len(usable_cores()),
        "flags": {name: name in flags for name in FLAGS},
        "memory_bytes": psutil.virtual_memory().total,
        "load_average": list(os.getloadavg()),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "transformers": metadata.version("transformers"),
        "gomp_spincount": os.environ.get("GOMP_SPINCOUNT"),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _cpuinfo() -> dict[str, str]:
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return {}
    pairs = (line.partition(":") for line in path.read_text().split("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def measure(job: Job, _on_progress: OnProgress) -> dict[str, Any]:
    import torch

    torch.set_num_threads(job.threads)
    size = read_bytes()
    return {
        "read_bandwidth_gb_s": read_bandwidth(size) / 1e9,
        "read_buffer_bytes": size,
        "product_rate_gflop_s": product_rate(job.dtype) / 1e9,
        "product_shape": list(PRODUCT),
        "tries": TRIES,
    }


def read_bytes() -> int:
    """Size of a buffer that exceeds every cache."""
    short = psutil.virtual_memory().available < 6 << 30
    return (1 if short else 2) << 30


def read_bandwidth(size: int) -> float:
    return size / _best(reader(size))


def reader(size: int) -> Callable[[], object]:
    import torch

    return torch.ones(size // 4, dtype=torch.float32).sum


def product_rate(dtype: str, shape: tuple[int, int, int] = PRODUCT) -> float:
    """Operations per second of a packed linear layer, the faster of the engine's and oneDNN's."""
    import torch

    from decant.engine.cpu.gemm import OneDnn, prepare
    from decant.engine.cpu.kernels.loader import KERNELS

    rows, inner, columns = shape
    weight = torch.randn(columns, inner, dtype=getattr(torch, dtype))
    x = torch.randn(rows, inner, dtype=weight.dtype)
    with torch.inference_mode():
        fastest = min(_best(partial(pack(weight, None), x)) for pack in (partial(prepare, kernels=KERNELS), OneDnn))
    return 2 * rows * inner * columns / fastest


def _best(call: Callable[[], object]) -> float:
    call()
    seconds = []
    for _ in range(TRIES):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return min(seconds)
