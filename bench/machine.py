"""The machine that a figure was taken on, and the two limits that nothing on it can pass."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
"""What decides how fast a CPU multiplies."""

TRIES = 10
PRODUCT = (1024, 896, 4864)
"""Rows, inner length and columns of the product whose rate is the arithmetic limit."""


def facts() -> dict[str, Any]:
    """What a reader needs to compare a figure with one of theirs."""
    info = _cpuinfo()
    flags = info.get("flags", "").split()
    return {
        "cpu": info.get("model name", platform.processor()),
        "cpu_family_model": f"{info.get('cpu family', '?')}/{info.get('model', '?')}",
        "cores": usable_cores(),
        "flags": {name: name in flags for name in FLAGS},
        "memory_bytes": psutil.virtual_memory().total,
        "load_average": list(os.getloadavg()),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "transformers": metadata.version("transformers"),
        "gomp_spincount": os.environ.get("GOMP_SPINCOUNT"),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def _cpuinfo() -> dict[str, str]:
    """The first processor's lines of /proc/cpuinfo; nothing elsewhere than on Linux."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return {}
    pairs = (line.partition(":") for line in path.read_text().split("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def peak_rss() -> int:
    """Most bytes of memory that this process ever held.

    From /proc: getrusage would count what the parent held when it started us.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return psutil.Process().memory_info().rss


def limits(dtype: str) -> dict[str, Any]:
    """Read bandwidth and product rate with the threads that torch has now, the best of ``TRIES`` each."""
    short = psutil.virtual_memory().available < 6 << 30
    size = (1 if short else 2) << 30
    return {
        "read_bandwidth_gb_s": read_bandwidth(size) / 1e9,
        "read_buffer_bytes": size,
        "product_rate_gflop_s": product_rate(dtype) / 1e9,
        "product_shape": list(PRODUCT),
        "tries": TRIES,
    }


def read_bandwidth(size: int) -> float:
    """Bytes per second at which a buffer of ``size`` bytes is read."""
    import torch

    buffer = torch.ones(size // 4, dtype=torch.float32)
    return size / _best(buffer.sum)


def product_rate(dtype: str, shape: tuple[int, int, int] = PRODUCT) -> float:
    """Floating point operations per second of one packed linear layer, as the engine runs it."""
    import torch

    from engine.linears import PackedLinear

    rows, inner, columns = shape
    linear = PackedLinear(torch.randn(columns, inner, dtype=getattr(torch, dtype)), None)
    x = torch.randn(rows, inner, dtype=getattr(torch, dtype))
    with torch.inference_mode():
        return 2 * rows * inner * columns / _best(lambda: linear(x))


def _best(call: Callable[[], object]) -> float:
    """Seconds of the fastest of ``TRIES`` calls, after one to warm up."""
    call()
    seconds = []
    for _ in range(TRIES):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return min(seconds)
