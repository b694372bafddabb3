"""Choice of the build of the CPU kernels, and with it of the instructions of torch and oneDNN.

The default is the best for this CPU. Another build reproduces the results of a lesser CPU, which
rounds sums differently.
"""

from __future__ import annotations

import os
from pathlib import Path

from decant.engine.errors import InvalidConfig
from decant.worker.settings import Build

_ENVIRONMENT = {
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "none": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
}
"""Read by torch and oneDNN when they are imported."""

_MODULES = {"avx512": "_kernels_avx512", "avx2": "_kernels", "none": "torch"}
"""The last word of ``decant.engine.cpu.kernels.loader.kind()``."""


def choose(build: Build, cpu_info: Path = Path("/proc/cpuinfo")) -> None:
    """Set the environment; call it before torch is imported. Raises InvalidConfig for avx2 on a CPU without it."""
    if build == "avx2" and not _has_avx2(cpu_info):
        raise InvalidConfig("kernels", "auto or none on a CPU without AVX2", build)
    os.environ.update(_ENVIRONMENT.get(build, {}))


def _has_avx2(cpu_info: Path) -> bool:
    return cpu_info.exists() and "avx2" in cpu_info.read_text(encoding="utf-8").split()


def check(build: Build, kind: str) -> None:
    if build != "auto" and kind.split()[-1] != _MODULES[build]:
        raise InvalidConfig("kernels", f"a build that this CPU and installation can run, not {kind}", build)
