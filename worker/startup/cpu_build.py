"""Which build of the kernels a worker runs, and with it the instructions that torch and oneDNN may use.

Without a choice each takes the best that the CPU has. A build for a lesser CPU shows what such a machine computes:
the same tokens are not promised between them, for sums are rounded in other places.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from decant.engine.errors import InvalidConfig

Build = Literal["auto", "avx512", "avx2", "none"]

_ENVIRONMENT = {
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "none": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
}
"""Read by torch and oneDNN when they are imported. Without AVX2 there are no kernels of our own."""

_MODULES = {"avx512": "_kernels_avx512", "avx2": "_kernels", "none": "torch"}
"""The last word of ``decant.engine.cpu.kernels.kind()``."""

_CPU_INFO = Path("/proc/cpuinfo")


def choose(build: Build) -> None:
    """Set what decides the build, before torch is imported. Raises InvalidConfig for a CPU without AVX2."""
    if build == "avx2" and not _has_avx2():
        raise InvalidConfig("kernels", "auto or none on a CPU without AVX2", build)
    os.environ.update(_ENVIRONMENT.get(build, {}))


def _has_avx2() -> bool:
    """Always false where there is no /proc/cpuinfo: kernels are built for x86-64 Linux alone."""
    return _CPU_INFO.exists() and "avx2" in _CPU_INFO.read_text(encoding="utf-8").split()


def check(build: Build, kind: str) -> None:
    """Raises InvalidConfig unless ``kind``, what ``decant.engine.cpu.kernels.kind`` says, is of the build."""
    if build != "auto" and kind.split()[-1] != _MODULES[build]:
        raise InvalidConfig("kernels", f"a build that this CPU and installation can run, not {kind}", build)
